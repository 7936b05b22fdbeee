"""The base class of the configuration's sections."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from headway.codec import portable


class Section(BaseModel):
    """One component's knobs: frozen, strictly typed, no unknown keys, can be sent between processes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        portable(cls)

    def to_plain(self) -> dict[str, Any]:
        return self.model_dump()

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        return cls.model_validate(plain)
