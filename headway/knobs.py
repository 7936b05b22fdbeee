"""The surface of a config: every knob by its name, overrides of one, and a sentence for what is wrong with one.

All of it is read from the sections' own fields; `root` is the section that holds the others.
"""

import difflib
import json
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headway.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

ALIASES = {
    "learning_rate": "trainer.lr",
    "optim_lr": "trainer.lr",
    "actor_lr": "trainer.lr",
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_length": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "rollout_n": "rollout.group_size",
    "train_batch_size": "trainer.batch_groups",
    "max_head_offpolicyness": "staleness.max_staleness",
    "max_off_policy_steps": "staleness.max_staleness",
    "cliprange": "algorithm.clip_eps",
    "epsilon": "algorithm.clip_eps",
    "eps_clip": "algorithm.clip_eps",
    "beta": "algorithm.kl_coef",
    "max_grad_norm": "trainer.clip_norm",
    "max_steps": "run.steps",
    "total_training_steps": "run.steps",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "eval_steps": "evaluate.every",
    "test_freq": "evaluate.every",
    "model_name_or_path": "model.path",
    "n_gpus": "trainer.ranks",
    "tensor_parallel_size": "engine.vllm_args",
}
"""What other systems call a knob, words joined by underscores."""


def joined(arguments: list[str]) -> list[str]:
    """Overrides as --section.key=value, where some may be written --section.key value."""
    overrides: list[str] = []
    for argument in arguments:
        if not argument.startswith("--") and overrides and "=" not in overrides[-1]:
            overrides[-1] += f"={argument}"
        else:
            overrides.append(argument)
    return overrides


def apply_override(root: type[BaseModel], values: dict[str, Any], override: str) -> None:
    key, separator, text = override.removeprefix("--").partition("=")
    if not separator or "." not in key:
        raise ConfigError(f"override {override!r} is not of the form --section.key=value{_hint(root, key.split('.'))}")
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
    parsed = _parse_value(text)
    # A directory named 2024 is not a number.
    values[name] = text if _takes_text(root, key) and not isinstance(parsed, str | list) else parsed


def _parse_value(text: str) -> Any:
    """A TOML value where it is one (numbers, booleans, lists, quoted strings), else the text itself."""
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = {text}")["value"]
    return text


def sentence(root: type[BaseModel], error: ValidationError) -> str:
    """The first problem as one sentence."""
    problem = error.errors()[0]
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "value_error" and not location:
        return problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden" and isinstance(problem["input"], dict):
        location += list(problem["input"])[:1]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{_hint(root, location)}"
    if problem["type"] == "missing":
        return f"{key} is required ({_describe(root, location)})"
    got = json.dumps(problem["input"], default=str)
    if problem["type"] == "model_type":
        return f"{key} = {got} is not possible: it is a section, written [{key}]"
    return f"{key} = {got} is not possible: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _hint(root: type[BaseModel], location: list[str]) -> str:
    """The knob an unknown one may mean: of the same name elsewhere, an alias, or the nearest name in its section."""
    *section, name = location
    words = [_plainly(".".join(location)), _plainly(name)]
    found = [ALIASES[word] for word in words if word in ALIASES]
    found += [known for known in keys(root) if known.split(".")[-1] == words[1]]
    if not section or section[0] in root.model_fields:
        nearest = difflib.get_close_matches(name, _keys_at(root, section), n=1, cutoff=0.4)
        found += [".".join([*section, match]) for match in nearest]
    return f"; did you mean {found[0]}?" if found else ""


def _plainly(key: str) -> str:
    return key.lower().replace("-", "_").replace(".", "_")


def _takes_text(root: type[BaseModel], key: str) -> bool:
    *section, name = key.split(".")
    return key in keys(root) and _section_at(root, section).model_fields[name].annotation is str


def _section_at(root: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """The section a location lies in; names and numbers of a dict's or list's sections are passed over."""
    section = root
    parts = iter(location)
    for part in parts:
        annotation = section.model_fields[part].annotation
        if args := get_args(annotation):
            annotation = args[-1]
            next(parts, None)
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        section = annotation
    return section


def _keys_at(root: type[BaseModel], location: list[str]) -> list[str]:
    return list(_section_at(root, location).model_fields)


def _describe(root: type[BaseModel], location: list[str]) -> str:
    field = _section_at(root, location[:-1]).model_fields[location[-1]]
    return field.description or f"section [{location[-1]}]"


@dataclass(frozen=True)
class Knob:
    """All there is to say of one knob."""

    key: str  # section.key
    type: str
    default: str  # as TOML; empty where it is required
    choices: tuple[str, ...]  # of the values it may have, where they are few
    sentence: str


def describe(root: type[BaseModel], words: str = "") -> list[Knob]:
    """Every knob, or those whose name or sentence contains the words."""
    found = []
    for key, text in keys(root).items():
        *section, name = key.split(".")
        field = _section_at(root, section).model_fields[name]
        choices = _choices(field.annotation)
        default = "" if field.is_required() else _as_toml(field.get_default(call_default_factory=True))
        if words.lower() in f"{key} {text}".lower():
            found.append(Knob(key, "choice" if choices else _type(field.annotation), default, choices, text))
    return found


def table(found: list[Knob]) -> "Table":
    """Knobs by section, for the terminal."""
    from rich.table import Table

    listing, section = Table("knob", "type", "default", "meaning", box=None), ""
    for knob in found:
        if section and knob.key.split(".")[0] != section:
            listing.add_row()
        section = knob.key.split(".")[0]
        choices = f" ({', '.join(choice for choice in knob.choices if choice)})" if knob.choices else ""
        listing.add_row(knob.key, knob.type, knob.default or "required", knob.sentence + choices)
    return listing


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(str(value) for value in get_args(annotation))
    return next((found for part in get_args(annotation) if (found := _choices(part))), ())


_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", list: "list", dict: "table"}


def _type(annotation: Any) -> str:
    origin = get_origin(annotation) or annotation
    if origin is Annotated:
        return _type(get_args(annotation)[0])
    if origin in _TYPES:
        return _TYPES[origin]
    return " or ".join(dict.fromkeys(_type(part) for part in get_args(annotation) if part is not type(None)))


def _as_toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def keys(root: type[BaseModel]) -> dict[str, str]:
    """Every knob as section.key, with its sentence."""
    found: dict[str, str] = {}

    def visit(section: type[BaseModel], prefix: str) -> None:
        for name, field in section.model_fields.items():
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                visit(annotation, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = field.description or ""

    visit(root, "")
    return found
