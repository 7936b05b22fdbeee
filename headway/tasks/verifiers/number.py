"""Is the number the text ends on the row's answer? For plain numbers; other answers are for `math_answer`.

The number that counts is the first one of the marked answer (`headway.tasks.verifiers.answers`: `####`, `answer:`,
`\\boxed{}`), or the last one of a text without marks. Only that one is compared, so listing many numbers gains nothing.
It counts only if it stands alone: `18\\sqrt2`, `18^2`, `\\sqrt{18}` and `(18, 2)` are expressions that hold 18, and no
number. A box must hold a number and nothing else but a unit, a currency or `x =`.

1.0: it equals the row's `answer` (int, float or text), exactly, whatever its length or form: 1,234.50, 10,\\!080, 3/4,
\\frac{3}{4}, \\frac34, 2e3, - 5. An answer given as a float is compared to nine digits, because that is what a float of
the row can promise. 0.0: any other number, or none. An error: the row's answer is no plain number; such rows are
refused at start.

The text is hostile: nothing is evaluated, and every pattern here is linear in the length of the text (the possessive
`++`, `*+` and `?+` never try a shorter match).
"""

import re
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from typing import Any, NamedTuple

from headway.tasks.verifiers import Row, complaint, verifier
from headway.tasks.verifiers.answers import find_answer, last

_UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))++|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++)(?:[eE][-+]?[0-9]{1,6}+(?![0-9]))?+"
)
# A minus after a digit, a letter or a closing bracket is a subtraction: 10-7 ends on 7.
_SIGN = r"(?:(?<![\w)\]}])(?P<sign>[-+−])\s*+\$?+)?+"
_NUMBER = re.compile(
    rf"{_SIGN}(?:\\[dt]?frac\s*+(?:\{{\s*+(?P<top>-?{_UNSIGNED})\s*+\}}|(?P<digit>[0-9]))"
    rf"\s*+(?:\{{\s*+(?P<bottom>{_UNSIGNED})\s*+\}}|(?P<under>[0-9]))"
    rf"|(?P<number>{_UNSIGNED})(?:\s*+/\s*+(?P<divisor>{_UNSIGNED}))?+)"
)
_SPACING = re.compile(
    r"\\(?:!|[,;: ](?![0-9])|[,;: ](?<=[0-9]..)(?=[0-9]{3}(?![0-9])))|\{,\}(?=[0-9]{3})|\\(?:left|right)(?![a-zA-Z])"
)
_OPERATORS = r"sqrt|[dt]?frac|d?binom|log|ln|exp|sin|cos|tan|cot|sec|csc|cbrt|overline|operatorname|begin"
_BEFORE = re.compile(rf"(?:[\^_√]|\\(?:{_OPERATORS})\s?(?:\[[^\]{{}}]{{0,20}}\])?)\s{{0,3}}[{{(]?\s{{0,3}}$")
_AFTER = re.compile(
    rf"\s{{0,3}}(?:\^(?!\{{?\s?\\circ)|[_√]|\\(?:{_OPERATORS}|pi|theta|alpha|beta|cdot|times|div|over|pm|infty)(?![a-z])"
    r"|\*\s?[\w(\\]|[0-9]{1,9}\s?/\s?[0-9])|(?![mgshlL])[a-zA-Z](?![a-zA-Z])|\s?\(\s?[a-z0-9]\s?[-+]"
)
_TUPLE_BEFORE = re.compile(r"[(\[][^()\[\]]{0,40},\s*$")
_TUPLE_AFTER = re.compile(r"\s*,[^()\[\]]{0,40}[)\]]")
_WRAP = re.compile(
    r"^(?:\\?\$+|\\\(|\\\[|\\(?:text|mathrm|mathbf|textbf|mbox)(?=\{[^{}]*\}$))|(?<!\\)(?:\$+|\\\)|\\\])$"
)
_POWER_OF_UNIT = re.compile(r"\}\^\{?[0-9]$")
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox|textbf|textrm)\s*\{[^{}0-9]{0,60}\}(?:\^\{?[0-9]\}?)?|\^?\{?\s*\\circ\s*\}?|\^\\circ|°|\\?%|\\?\$"
    r"|(?<=[0-9}\s])[a-zA-Z]{2,}(?:[\s/a-zA-Z]{0,40})(?:\^?[0-9])?|(?<=[0-9])[mgshlL]|\.)\s*$"
)
_NAME = re.compile(r"^\s*[a-zA-Z](?:_\{?\w\}?|\([a-z0-9]\))?\s*(?:=|\\approx)\s*")

_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
_ROUNDED = Context(prec=30, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_FLOAT_TOLERANCE = Decimal("1e-9")
_NUM_UNITS = 4


class Ratio(NamedTuple):
    """A number as two decimals, exact."""

    top: Decimal
    bottom: Decimal


def check_row(row: Row) -> str:
    """Why the row's answer is no plain number, or ""."""
    return complaint(_parse_answer, row["answer"])


@verifier(needs=("answer",), check_row=check_row)
def verify(row: Row, text: str) -> float:
    """1.0 when the number the text ends on is `row["answer"]`, else 0.0."""
    answer = row["answer"]
    expected = _parse_answer(answer)
    found = _find(text)
    if found is None:
        return 0.0
    if same(found, expected):
        return 1.0
    return float(isinstance(answer, float) and _nearly_equal(found, expected.top))


def same(one: Ratio, other: Ratio) -> bool:
    """Whether two numbers are equal, without rounding."""
    return _EXACT.multiply(one.top, other.bottom) == _EXACT.multiply(other.top, one.bottom)


def _parse_answer(answer: Any) -> Ratio:
    if isinstance(answer, str):
        found = _find(answer) if find_answer(answer) else plain_number(answer)
    elif isinstance(answer, int | float) and not isinstance(answer, bool):
        # repr is the shortest text that reads back as this float: 0.1 stays 0.1, not 0.1000000000000000055…
        found = Ratio(Decimal(repr(answer) if isinstance(answer, float) else answer), Decimal(1))
    else:
        found = None
    if found is None or not found.top.is_finite():
        raise ValueError(
            f"the row's answer is no plain number: {str(answer)[:80]!r}; headway.tasks.verifiers.math_answer:verify "
            "compares any mathematical answer"
        )
    return found


def _nearly_equal(found: Ratio, expected: Decimal) -> bool:
    quotient = _ROUNDED.divide(_ROUNDED.plus(found.top), _ROUNDED.plus(found.bottom))
    distance = _ROUNDED.abs(_ROUNDED.subtract(quotient, expected))
    return distance <= _ROUNDED.multiply(_FLOAT_TOLERANCE, abs(expected))


def _find(text: str) -> Ratio | None:
    """The one number that counts, or None."""
    text = _SPACING.sub("", text)
    answer = find_answer(text)
    if answer is None:
        match = last(_NUMBER.finditer(text))
    elif answer.boxed:
        return plain_number(text[answer.start : answer.end])
    else:
        match = _NUMBER.search(text, answer.start)
    if match is None or not _stands_alone(text, match):
        return None
    before = text[max(0, match.start() - 20) : match.start()].rstrip()
    spaced = match["sign"] and text[match.start() + 1 : match.start() + 2].isspace()
    # "10 - 5" ends on 5, "x = - 5" on -5: what comes before the minus says which.
    return _to_ratio(match, subtracted=bool(spaced) and before[-1:] not in ("", "=", ":", "(", ",", "$", "{", "[", "#"))


def _stands_alone(text: str, match: re.Match[str]) -> bool:
    """Whether a number in running text is one, and not a part of a larger expression."""
    start = match.start()
    before = text[max(0, start - 60) : start]
    if _BEFORE.search(before) or (match[0].startswith("\\") and before[-1:].isdigit()):
        return False
    opened, later = before.rstrip().endswith(("(", "[")), _TUPLE_BEFORE.search(before)
    if (opened or later) and _TUPLE_AFTER.match(text, match.end()):
        return False
    if later and text[match.end() : match.end() + 1] in (")", "]"):
        return False
    return not _AFTER.match(text, match.end())


def plain_number(text: str) -> Ratio | None:
    """The number that the whole text is, or None; a unit, a currency, a percent sign and `x =` may be around it."""
    text = _NAME.sub("", _unwrap(_SPACING.sub("", text)))
    for _ in range(_NUM_UNITS):
        if not text or (text[-1].isdigit() and not _POWER_OF_UNIT.search(text[-10:])):
            break
        text = text[:-70] + _UNIT.sub("", text[-70:])
    match = _NUMBER.fullmatch(_unwrap(text))
    return _to_ratio(match) if match else None


def _unwrap(text: str) -> str:
    """Without what only sets it off: mathematics marks, braces and brackets around all of it, a currency before it."""
    for _ in range(4):
        text = _WRAP.sub("", text.strip()).strip()
        if text[:1] + text[-1:] == "{}" or (text[:1] + text[-1:] == "()" and "," not in text):  # (20,100) is a point
            text = text[1:-1]
    return text


def _to_ratio(match: re.Match[str], subtracted: bool = False) -> Ratio | None:
    """None for a fraction over zero, which equals nothing."""
    top = Decimal((match["top"] or match["digit"] or match["number"]).replace(",", ""))
    bottom = Decimal((match["bottom"] or match["under"] or match["divisor"] or "1").replace(",", ""))
    negative = match["sign"] in ("-", "−") and not subtracted
    return Ratio(top.copy_negate() if negative else top, bottom) if bottom else None
