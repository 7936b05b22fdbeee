"""Verifiers: functions (task, text) → score. A verifier that raises is broken; it has not given a low score.

The task is the prompt's row, the text is what the model wrote. `@verifier(...)` attaches what is known before the first
text: the fields of the row it reads, a check that refuses a row it could never score, and what to load at start.

`number` compares plain numbers; `math_answer` compares any mathematical answer by equivalence; `code` runs programs
in a sandbox; `choice`, `match`, `schema` and `form` judge letters, strings, JSON and format; `judge` asks a language
model; `gym` takes prompts and scores from reasoning-gym. `answers` finds the final answer in a text, `bounded` runs one
function in a process that is killed at its deadline, and `expressions` evaluates no more of a text than numbers.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Row = dict[str, Any]
Verifier = Callable[[Row, str], Any]
"""Returns a number, or a dict of named components (`headway.tasks.scoring` says how they are weighted)."""

F = TypeVar("F", bound=Verifier)


def verifier(
    needs: tuple[str, ...],
    check_row: Callable[[Row], str] | None = None,
    warm_up: Callable[[], None] | None = None,
) -> Callable[[F], F]:
    """Say which fields of the row a verifier reads; `check_row` returns why it could not score a row, or "".

    `check_row` is called for every row before a run starts; `warm_up` once in each process that verifies, before its
    first text, for imports and child processes that no verdict should wait for.
    """
    if not (isinstance(needs, tuple) and all(isinstance(field, str) for field in needs)):
        raise TypeError(f'a verifier needs a tuple of field names, as in @verifier(needs=("answer",)), not {needs!r}')

    def mark(function: F) -> F:
        function.needs = needs  # type: ignore[attr-defined]
        function.check_row = check_row  # type: ignore[attr-defined]
        function.warm_up = warm_up  # type: ignore[attr-defined]
        return function

    return mark


def needs_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The fields of the row that `function` reads; none when it does not say."""
    needs: tuple[str, ...] = getattr(function, "needs", ())
    return needs


def complaint(parse: Callable[[Any], object], value: Any) -> str:
    """Why `parse` refuses the value, or "": a `check_row` made of the function that a verifier reads the row with."""
    try:
        parse(value)
    except ValueError as error:
        return str(error)
    return ""
