"""Verifiers: pure functions (task, text) → score. A verifier that raises is broken; it has not given a low score.

The task is the prompt's row, the text is what the model wrote. `@verifier(needs=("answer",))` names the fields of the
row that are read, so that a row without them is found before anything is loaded. `number` compares numbers.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Verifier = Callable[[dict[str, Any], str], float | int | bool]

F = TypeVar("F", bound=Verifier)


def verifier(needs: tuple[str, ...]) -> Callable[[F], F]:
    """Say which fields of the row a verifier reads."""
    if not (isinstance(needs, tuple) and all(isinstance(field, str) for field in needs)):
        raise TypeError(f'a verifier needs a tuple of field names, as in @verifier(needs=("answer",)), not {needs!r}')

    def mark(function: F) -> F:
        function.needs = needs  # type: ignore[attr-defined]
        return function

    return mark


def needs_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The fields of the row that `function` reads; none when it does not say."""
    needs: tuple[str, ...] = getattr(function, "needs", ())
    return needs
