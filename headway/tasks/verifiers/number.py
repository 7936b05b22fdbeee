"""Is the number the text ends on the row's answer?

The number that counts is the first one after the last `####` or `answer:`, or inside the last `\\boxed{}`, whichever
comes last; without any of these, the last number in the text. Only that one is compared, so listing many numbers
gains nothing. Numbers are compared exactly, whatever their length or form (1,234.50 or 3/4 or \\frac{3}{4} or 2e3);
an answer given as a float is compared to nine digits, because that is what a float of the row can promise.

The text is hostile: nothing is evaluated, and every pattern here is linear in the length of the text (the possessive
`++`, `*+` and `?+` never try a shorter match).
"""

import re
from collections import deque
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from typing import Any, NamedTuple

from headway.tasks.verifiers import verifier

_UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))++|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++)(?:[eE][-+]?[0-9]{1,6}+(?![0-9]))?+"
)
# A minus after a digit, a letter or a closing bracket is a subtraction: 10-7 ends on 7.
_SIGN = r"(?:(?<![\w)\]}])(?P<sign>[-+−])\$?+)?+"
_NUMBER = re.compile(
    rf"{_SIGN}(?:\\[dt]?frac\{{(?P<top>-?{_UNSIGNED})\}}\{{(?P<bottom>{_UNSIGNED})\}}"
    rf"|(?P<number>{_UNSIGNED})(?:\s*+/\s*+(?P<divisor>{_UNSIGNED}))?+)"
)
_MARKER = re.compile(r"####|answer:|(?P<box>\\boxed\{)", re.IGNORECASE)
_BRACE = re.compile(r"[{}]")

_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
_ROUNDED = Context(prec=30, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_FLOAT_TOLERANCE = Decimal("1e-9")


class _Ratio(NamedTuple):
    top: Decimal
    bottom: Decimal


@verifier(needs=("answer",))
def verify(task: dict[str, Any], text: str) -> float:
    """1.0 when the number the text ends on is `task["answer"]` (int, float or text), else 0.0."""
    answer = task["answer"]
    expected = _parse_answer(answer)
    found = _find(text)
    if found is None:
        return 0.0
    if _EXACT.multiply(found.top, expected.bottom) == _EXACT.multiply(expected.top, found.bottom):
        return 1.0
    return float(isinstance(answer, float) and _nearly_equal(found, expected.top))


def _parse_answer(answer: Any) -> _Ratio:
    if isinstance(answer, str):
        found = _find(answer)
    elif isinstance(answer, int | float) and not isinstance(answer, bool):
        # repr is the shortest text that reads back as this float: 0.1 stays 0.1, not 0.1000000000000000055…
        found = _Ratio(Decimal(repr(answer) if isinstance(answer, float) else answer), Decimal(1))
    else:
        found = None
    if found is None or not found.top.is_finite():
        raise ValueError(f"the row's answer holds no number to compare with: {str(answer)[:80]!r}")
    return found


def _nearly_equal(found: _Ratio, expected: Decimal) -> bool:
    quotient = _ROUNDED.divide(_ROUNDED.plus(found.top), _ROUNDED.plus(found.bottom))
    distance = _ROUNDED.abs(_ROUNDED.subtract(quotient, expected))
    return distance <= _ROUNDED.multiply(_FLOAT_TOLERANCE, abs(expected))


def _find(text: str) -> _Ratio | None:
    """The one number that counts, or None."""
    marker = _last(_MARKER.finditer(text))
    if marker is None:
        match = _last(_NUMBER.finditer(text))
    else:
        end = _closing_brace(text, marker.end()) if marker["box"] else len(text)
        match = _NUMBER.search(text, marker.end(), end)
    return _to_ratio(match) if match else None


def _last(matches: Any) -> re.Match[str] | None:
    kept = deque(matches, maxlen=1)
    return kept[0] if kept else None


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return len(text)


def _to_ratio(match: re.Match[str]) -> _Ratio | None:
    """None for a fraction over zero, which equals nothing."""
    top = Decimal((match["top"] or match["number"]).replace(",", ""))
    bottom = Decimal((match["bottom"] or match["divisor"] or "1").replace(",", ""))
    negative = match["sign"] in ("-", "−")
    return _Ratio(top.copy_negate() if negative else top, bottom) if bottom else None
