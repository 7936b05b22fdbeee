"""Is the text's final answer equal to the row's, as mathematics? For answers of any form.

The answer is the marked one (`headway.tasks.verifiers.answers`: `\\boxed{}`, `####`, `answer:`), or else the last
formula of the text, or else its last number. It is compared by structure first: tuples, intervals, sets, lists (in any
order), unions, matrices and `\\pm` element by element, brackets included; words (`even`, `\\text{(A)}`) as words; plain
numbers exactly, with units, percent signs and thousands separators set aside. What is left, single expressions, is
compared by math-verify and sympy.

1.0: equal. 0.0: not equal, or no answer, or one that cannot be read, or whose comparison exceeds its deadline or
memory: the comparison runs in a process that is killed then (`headway.tasks.verifiers.bounded`). An error: the row's
own answer cannot be read; such rows are refused at start. A text is never evaluated as Python.
"""

import logging
import re
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

from headway.tasks.verifiers import Row, verifier
from headway.tasks.verifiers.answers import closing_brace, find_answer, last
from headway.tasks.verifiers.bounded import Bounded, Exceeded
from headway.tasks.verifiers.expressions import guard_sympy
from headway.tasks.verifiers.number import plain_number, same

DEADLINE_S = 2.0
_LONGEST = 2000
_OPEN, _CLOSE = "([{⟨", ")]}⟩"

_INLINE = re.compile(
    r"(?<!\\)\$\$?((?:\\.|[^$\\])+)\$\$?|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]", re.DOTALL
)
"""A formula holds no second opening of its kind, or a text of openings alone would take quadratic time."""
_FORMULAS = re.compile(rf"(?:{_INLINE.pattern})(?:\s*(?:,|or|and|,\s*(?:or|and))\s*(?:{_INLINE.pattern}))*", re.DOTALL)
_REASON = re.compile(r",?\s+(?:because|since|which|so|as|where)\s.*|\s+\([a-z ]{3,}\)\.?\s*$", re.DOTALL)
_ABOUT = re.compile(r"(?:approximately|about|exactly|simply|just)\s+")
_LAST_NUMBER = re.compile(r"(?<![\w.])[-−]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[^}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_NAME = re.compile(
    r"(?:[a-zA-Z](?:_\{?\w+\}?|\([a-z]\))?|\([a-z](?:,\s*[a-z])+\))\s*(?:=|\\in(?![a-z])|\\approx)\s*(?!.*=)", re.DOTALL
)
_BASE = re.compile(r"(-?\d[\d\s]*)_\{?(\d+)\}?$")
_REMOVED = re.compile(
    r"\\(?:left|right|(?:big|Big|bigg|Bigg)[lr]?|displaystyle|limits|!\s*(?=\d)|!|phantom(?:\{[^}]*\}|\s*-)?)(?![a-zA-Z])"
)
_UNITS = re.compile(
    r"\\(?:text|mathrm|mbox|textrm|textbf)\s*\{\s*(?:[a-zA-Z][a-zA-Z\s./-]*)?\}(?:\s*\^\s*\{?\d\}?)?\s*\.?$|\^\s*\{?\s*\\circ\s*\}?|°"
    r"|(?<=\d)\s+(?:degrees?|units?|dollars?|cents?|cm|km|mm|miles?|inches|feet|hours?|minutes?|seconds?|days?|square\s\w+)$"
    r"|(?<=\})\s*%$"
)
_ANGLE = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])(?:\^\{?\d\}?)?)\s*\(?(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\)?"
)
_RELATION = re.compile(r"(\\[lg](?:eq?|eqslant|t)(?![a-z])|[<>]=?|[≤≥])")
_BARE_FRACTION = re.compile(r"\\frac\s*(\\[a-z]+|\d|[a-zA-Z])\s*(\d|[a-zA-Z])(?![a-zA-Z])")
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s*\{?(\d{1,20})\}?")
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox|textrm)\s*\{([^{}\d]*)\}|(?<=[\d}\s])([a-zA-Z. ]{1,30}))(?:\s*\^\s*\{?(\d)\}?)?[\s.$]*$"
)
_UNIT_NAMES = {
    name: words.split()[0]
    for words in (
        "mm millimeter millimetre", "cm centimeter centimetre", "km kilometer kilometre", "m meter metre",
        "in inch inches", "ft foot feet", "yd yard", "mi mile", "s sec second", "min minute", "h hr hour", "day",
        "week", "month", "year", "g gram", "kg kilogram", "am a.m", "pm p.m", "dollar", "cent", "dozen", "hundred",
        "thousand", "million", "billion",
    )
    for name in words.split()
}  # fmt: skip
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit)\s*\{([^{}]*)\}")
_IMAGINARY = re.compile(r"(?<![a-zA-Z])i(?![a-zA-Z])")
_SPACES = re.compile(r"(?<!\\)\\(?:[ ,;:>]|q?quad(?![a-zA-Z])|hspace\{[^}]*\})")
_NEEDLESS_SPACE = re.compile(r"\s+(?![\d\s])|(?<![\d\s])\s+")
"""Any but that between digits: 1 2 is not 12, and 5 1/2 not 51/2."""
_ADJACENT = re.compile(r"\d\s+\d")
_MIXED = re.compile(r"(?<![\d.,/^_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,/])")
_THIN = re.compile(r"\\[,;:! ]")
_ROOT = re.compile(r"(?:√|\\sqrt)\s*\(([^()]*)\)|√\s*(\d+|[a-z])")
_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "√": "\\sqrt",
        "π": "\\pi ",
        "∞": "\\infty ",
        "×": "\\times ",
        "·": "\\cdot ",
        "∪": "\\cup ",
        "±": "\\pm ",
    }
    | {"²": "^2", "³": "^3", "~": " "}
)
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z\s,'.-]*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def check_row(row: Row) -> str:
    """Why the row's answer cannot be compared with anything, or ""."""
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return (
            f"the row's answer is {'nothing' if answer is None else f'a {type(answer).__name__}'}, not text or a number"
        )
    reference = reference_of(answer)
    if not reference.strip() or len(reference) > _LONGEST:
        return f"the row's answer is empty or longer than {_LONGEST} characters: {str(answer)[:80]!r}"
    if plain_number(reference) or _as_words(reference):
        return ""
    try:
        readable = _READ(reference)
    except (Exceeded, RuntimeError) as error:
        return f"the row's answer cannot be read ({error}): {reference[:80]!r}"
    return "" if readable else f"the row's answer cannot be read as mathematics: {reference[:80]!r}"


def warm_up() -> None:
    _EQUAL("\\sqrt{2}x", "x \\sqrt{2}")


@verifier(needs=("answer",), check_row=check_row, warm_up=warm_up)
def verify(row: Row, text: str) -> float:
    """1.0 when the text's final answer equals `row["answer"]` (text or a number), else 0.0."""
    if not isinstance(row["answer"], str | int | float) or isinstance(row["answer"], bool):
        raise ValueError(check_row(row))
    reference, given = reference_of(row["answer"]), given_answer(text)
    if given is None or len(given) > _LONGEST:
        return 0.0
    return float(equal(reference, given))


def equal(reference: str, given: str) -> bool:
    """Whether two answers are the same mathematics; False, too, when finding out takes too long."""
    reference, given = _unbraced(reference), _unbraced(given)
    if _squeeze(reference) == _squeeze(given):
        return True
    if _other_units(reference, given):
        return False
    one, other = plain_number(reference), plain_number(given)
    if one is not None and other is not None:
        return same(one, other) or _percent(reference, given, one, other)
    if (words := _as_words(reference)) is not None and not _is_symbol(reference):
        return words == _as_words(given)
    return bool(_EQUAL.within_limits(reference, given, otherwise=False))


def _other_units(reference: str, given: str) -> bool:
    """Whether both name a unit, and not the same. Units are set aside otherwise, but areas are no volumes."""
    (one, power), (other, other_power) = _unit(reference), _unit(given)
    return bool(one and other and one != other) or bool(power and other_power and power != other_power)


def _unit(text: str) -> tuple[str, str]:
    found = _UNIT.search(text[-80:])
    if not found:
        return "", ""
    name = (found[1] or found[2] or "").lower().strip(" .")
    return _UNIT_NAMES.get(name, _UNIT_NAMES.get(name.removesuffix("s"), "")), found[3] or ""


def reference_of(answer: Any) -> str:
    """The answer itself, or the marked part of a worked solution."""
    text = repr(answer) if isinstance(answer, float) else str(answer)
    place = find_answer(text)
    return text[place.start : place.end].strip() if place else text


def given_answer(text: str) -> str | None:
    """The final answer of a text, or None."""
    place = find_answer(text)
    if place is None:
        return _last_formula(text[-20 * _LONGEST :])
    found = text[place.start : place.end]
    if place.boxed:
        return found
    found = found[: 2 * _LONGEST].lstrip(" :*\n")
    if formulas := _FORMULAS.match(found):  # several, as in "$5$ or $6$", are a list
        several = [_last_formula(formula[0]) or "" for formula in _INLINE.finditer(formulas[0])]
        return ", ".join(several)
    line = _REASON.sub("", _ABOUT.sub("", found.partition("\n")[0], count=1))
    return _last_formula(line) if _INLINE.search(line) else line.rstrip(" *.")


def _last_formula(text: str) -> str | None:
    formula = last(_INLINE.finditer(text))
    if formula is not None:
        found = next(group for group in formula.groups() if group is not None)
        chained = found.count("=") > 1 and not re.search(r",|\b(?:and|or)\b", found)
        return found.rpartition("=")[2] if chained else found
    number = last(_LAST_NUMBER.finditer(text))
    if number:
        return number[0].rstrip(",")
    lines = text.strip().splitlines()
    return lines[-1] if lines else None


# Words and plain numbers


def _squeeze(text: str) -> str:
    text = _TEXT.sub(r"\1", _SPACES.sub(" ", _REMOVED.sub("", text))).replace("dfrac", "frac").replace("tfrac", "frac")
    return _NEEDLESS_SPACE.sub("", text.replace("$", "")).rstrip(".")


def _as_words(text: str) -> str | None:
    """A text answer in lower case, without marks: \\text{(A)} and A are alike; None for anything mathematical."""
    plain = _TEXT.sub(r"\1", _THIN.sub(" ", text).strip(" $."))
    plain = re.sub(r"^\\?\((.*)\\?\)$", r"\1", plain.strip(" .,")).strip(" .")
    if not _WORDS.fullmatch(plain) or (" - " in plain and not re.search("[a-zA-Z]{2}", plain)):
        return None
    return ", ".join(sorted(" ".join(part.lower().split()) for part in plain.split(",") if part.strip()))


def _is_symbol(text: str) -> bool:
    """A letter or a product of few may be a variable as well as a word."""
    return "\\text" not in text and len(text.strip(" $")) <= 2


def _percent(reference: str, given: str, one: Any, other: Any) -> bool:
    """50% is also 1/2, where one side says percent and the other does not."""
    if ("%" in reference) == ("%" in given):
        return False
    whole, part = (one, other) if "%" in reference else (other, one)
    return same(whole._replace(bottom=whole.bottom * 100), part)


# Structure: runs in the bounded process


def _compare(reference: str, given: str) -> bool:
    guard_sympy()
    return _alike(_normal(reference), _normal(given))


def _normal(text: str) -> str:
    """One spelling of many: what only sets, spaces or names an answer is gone."""
    text = _REMOVED.sub("", _ROOT.sub(r"\\sqrt{\1\2}", text.strip().strip("$")).translate(_CHARACTERS))
    text = _SPACES.sub(" ", text)
    text = text.removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]")
    text = text.replace("\\langle", "(").replace("\\rangle", ")")
    text = text.replace("{,}", ",").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.replace("\\{", "⟨").replace("\\}", "⟩").replace("\\lbrace", "⟨").replace("\\rbrace", "⟩")
    text = re.sub(r"\\varnothing|⟨\s*⟩", r"\\emptyset", text)
    text = text.replace("\\$", "").replace("\\%", "%").replace("\\le ", "\\leq ").replace("\\ge ", "\\geq ")
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{\s*(and|or)\s*\}|(?<=[\d}\s])(?:and|or)(?=[\s\\\d$-])", ",", text)
    text = (
        re.sub(r"\s+(?=\d{3}(?!\d))(?<=\d\s)", "", text) if re.fullmatch(r"\s*-?\d{1,3}(\s+\d{3})+\s*", text) else text
    )
    text = _BARE_FRACTION.sub(r"\\frac{\1}{\2}", _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = _REPEATING.sub(_repeating_fraction, text)
    text = _ANGLE.sub(r"\1 (\\frac{\2 \\pi}{180})", text)
    for _ in range(2):
        text = _UNITS.sub("", text.strip().rstrip(",").removeprefix("\\approx").strip())
    text = _NAME.sub("", text, count=1) if _NAME.match(text) else text
    text = text.strip().rstrip(".").strip()
    return "(-\\infty,\\infty)" if text == "\\mathbb{R}" else text


def _repeating_fraction(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction 15/90."""
    whole, still, cycle = match[1] or "0", match[2], match[3]
    top = int(whole + still + cycle) - int(whole + still)
    return f"\\frac{{{top}}}{{{'9' * len(cycle)}{'0' * len(still)}}}"


def _alike(one: str, other: str) -> bool:
    one, other = _unbraced(one), _unbraced(other)
    if _NEEDLESS_SPACE.sub("", one) == _NEEDLESS_SPACE.sub("", other):
        return True
    letters = [_letter(one), _letter(other)]
    if all(letters) and letters[0] != letters[1]:
        return False
    kinds = [_shape(one), _shape(other)]
    if kinds[0][0] != kinds[1][0]:
        return _expanded_alike(kinds[0], kinds[1])
    kind, parts, others = kinds[0][0], kinds[0][1], kinds[1][1]
    if kind == "leaf":
        return _same_expression(one, other)
    if len(parts) != len(others):
        return False
    if kind in ("set", "list", "union"):
        return _same_in_any_order(parts, others)
    return all(_alike(part, item) for part, item in zip(parts, others, strict=True))


def _expanded_alike(one: tuple[str, list[str]], other: tuple[str, list[str]]) -> bool:
    """A bare list is a set, or the values of named unknowns in their order; a tuple is neither of the first two."""
    kinds = {one[0], other[0]}
    if len(one[1]) != len(other[1]) or not ("named" in kinds or kinds == {"set", "list"}):
        return False
    if "named" in kinds:
        return kinds <= {"named", "list", "tuple ()"} and all(map(_alike, one[1], other[1]))
    return _same_in_any_order(one[1], other[1])


def _same_in_any_order(parts: list[str], others: list[str]) -> bool:
    rest = list(others)
    for part in parts:
        match = next((item for item in rest if _alike(part, item)), None)
        if match is None:
            return False
        rest.remove(match)
    return not rest


def _shape(text: str) -> tuple[str, list[str]]:
    """What an answer is made of: its kind, brackets included, and its elements."""
    if matrix := _MATRIX.fullmatch(text[1:-1] if text[:1] in ("(", "[") else text):
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-z])", matrix[2]) if row.strip()]
        return f"matrix {len(rows)}", [cell for row in rows for cell in row.split("&")]
    if len(parts := _split(text, "\\cup")) > 1:
        return "union", parts
    if "\\pm" in text:
        return "list", [text.replace("\\pm", "+"), text.replace("\\pm", "-")]
    parts = _split(text, ",")
    if len(parts) > 1 and not _THOUSANDS_ONLY.fullmatch(text):
        parts = [part for part in parts if part]
        names = [match[0] for part in parts if (match := _NAME.match(part))]
        if len(set(names)) == len(parts):
            return "named", [part[len(name) :] for name, part in sorted(zip(names, parts, strict=True))]
        expanded = [item for part in parts for item in (_shape(part)[1] if "\\pm" in part else [part])]
        return "union" if all(map(_letter, expanded)) else "list", expanded
    if text[:1] in tuple(_OPEN) and text[-1:] in tuple(_CLOSE) and _closes_at_end(text):
        parts = _split(text[1:-1], ",")
        if text[0] in "⟨{":
            return "set", parts
        if len(parts) > 1:
            return f"tuple {text[0]}{text[-1]}", parts
    return _interval(text) or ("leaf", [])


def _letter(text: str) -> str:
    """The unknown of an inequality, such as the x of 2 < x; "" for anything else."""
    terms = [term.strip() for term in _RELATION.split(text)[::2]]
    found = terms[1] if len(terms) == 3 else next((term for term in terms if len(term) == 1 and term.isalpha()), "")
    return found if len(terms) in (2, 3) and len(found) == 1 and found.isalpha() else ""


def _interval(text: str) -> tuple[str, list[str]] | None:
    """An inequality as the interval that it says: 2 < x \\leq 5 as (2, 5]."""
    letter, pieces = _letter(text), [piece.strip() for piece in _RELATION.split(text)]
    terms, signs = pieces[::2], pieces[1::2]
    rising = {sign[0] in "<≤" or sign.startswith("\\l") for sign in signs}
    if not letter or len(rising) > 1:
        return None
    if not rising.pop():
        terms, signs = terms[::-1], signs[::-1]
    if len(terms) == 2:
        terms, signs = (
            (["-\\infty", *terms], ["<", *signs]) if terms[0] == letter else ([*terms, "\\infty"], [*signs, ">"])
        )
    strict = [sign in ("<", ">", "\\lt", "\\gt") for sign in signs]
    return f"tuple {'[('[strict[0]]}{'])'[strict[1]]}", [terms[0], terms[2]]


_THOUSANDS_ONLY = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")


def _closes_at_end(text: str) -> bool:
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if depth == 0:
            return place == len(text) - 1
    return False


def _split(text: str, mark: str) -> list[str]:
    """At the marks that are inside no bracket."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        depth += (text[place] in _OPEN) - (text[place] in _CLOSE)
        if depth == 0 and text.startswith(mark, place):
            parts.append(text[start:place].strip())
            start = place = place + len(mark)
        else:
            place += 1
    return [*parts, text[start:].strip()]


def _unbraced(text: str) -> str:
    text = text.strip()
    while text.startswith("{") and text.endswith("}") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    return text


# Single expressions


def _same_expression(one: str, other: str) -> bool:
    import math_verify

    numbers = [plain_number(one), plain_number(other)]
    if numbers[0] is not None and numbers[1] is not None:
        return same(numbers[0], numbers[1]) or _percent(one, other, *numbers)
    words = _as_words(one)
    if words and (words == _as_words(other) or not _is_symbol(one)):
        return words == _as_words(other)
    bases = [_BASE.fullmatch(one), _BASE.fullmatch(other)]
    if bases[0]:  # digits in a stated base: the base may be left out, and nothing else may differ
        digits = bases[1][1] if bases[1] else other
        return digits.replace(" ", "") == bases[0][1].replace(" ", "") and (not bases[1] or bases[0][2] == bases[1][2])
    gold, target = _expression(one), _expression(other)
    if gold is None or target is None or _misread(gold, target):
        return False
    alike = math_verify.verify([gold], [target], strict=True, float_rounding=9, timeout_seconds=None)
    values = [_value(gold), _value(target)]
    if None in values:
        return bool(alike)
    # math-verify rounds to digits after the point, which makes all tiny numbers equal; and i is a letter to it.
    return _near(*values) and bool(alike or _IMAGINARY.search(one + other))


def _near(one: Any, other: Any) -> bool:
    return bool(one == other or abs(one - other) <= 1e-9 * max(abs(one), abs(other)))


def _value(expression: Any) -> Any:
    """A number, to thirty digits, or None; i is the imaginary unit."""
    import sympy

    with suppress(TypeError, ValueError, AttributeError):
        units = {letter: sympy.I for letter in expression.free_symbols if letter.name == "i"}
        if len(units) == len(expression.free_symbols):
            return complex(expression.subs(units).doit().evalf(30))
    return None


def _misread(gold: Any, target: Any) -> bool:
    """Where math-verify takes a value for an equation (10 for 2x = 10, 5 for x + y = 5), or a false equation of numbers
    for a true one."""
    import sympy

    if isinstance(target, sympy.Eq) and None not in (sides := [_value(target.lhs), _value(target.rhs)]):
        return not _near(*sides)
    equations = [side for side in (gold, target) if isinstance(side, sympy.Eq)]
    left: Any = equations[0].lhs if len(equations) == 1 else None
    return bool(left is not None and left.free_symbols and (left.is_Add or left.is_Pow or left.as_coeff_Mul()[0] != 1))


@lru_cache(maxsize=4096)
def _expression(text: str) -> Any:
    """What math-verify reads, or None; a text of which it reads only a part has not been read."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    if "$" in text or _ADJACENT.search(_TEXT.sub(r" \1 ", text)):
        return None
    spelling = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
    config = math_verify.LatexExtractionConfig(normalization_config=spelling)
    text = "$" + _THOUSANDS.sub("", text).replace("%", "\\%") + "$"
    found = math_verify.parse(text, [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found and not isinstance(found[0], str) else None


def _readable(reference: str) -> bool:
    """Whether every element of an answer is words, a number, or an expression that can be read."""

    def every(text: str) -> bool:
        text = _unbraced(text)
        kind, parts = _shape(text)
        if kind != "leaf":
            return bool(parts) and all(map(every, parts))
        known = plain_number(text) or _as_words(text) or _BASE.fullmatch(text)
        return bool(known) or _expression(text) is not None

    guard_sympy()
    return every(_normal(reference))


@cache
def _load() -> None:
    """Import what reading needs, and read something: the grammar's tables are made on first use, by the parent of all
    forks."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of deadlines it leaves to its caller
    _alike("\\frac{\\sqrt{2}}{3} x^2", "(x+1)^2 \\cdot \\pi")  # not _compare, which changes sympy for its process


_EQUAL = Bounded(_compare, DEADLINE_S, prepare=_load)
_READ = Bounded(_readable, DEADLINE_S, prepare=_load)
