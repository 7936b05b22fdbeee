"""Did the text choose the right option? For questions with options A, B, C …

The choice is the marked answer (`headway.tasks.verifiers.answers`), else the last letter in brackets or bold, else a
letter that stands alone at the end. It may be the letter (`B`, `(B)`, `\\text{(B)}`, `B. because …`) or, where the row
has `choices`, the option's own words.

1.0: the chosen option is the row's `answer` (a letter, or an index into `choices`). 0.0: another option, several, or
none. An error: the row's answer is neither; such rows are refused at start.
"""

import re
from typing import Any

from headway.tasks.verifiers import Row, complaint, verifier
from headway.tasks.verifiers.answers import find_answer, last

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LEADING = re.compile(
    r"(?:option|choice)?\s*[(\[]?([A-Za-z])(?:[)\]]|(?![A-Za-z'’]))\s*(?P<rest>.*)", re.DOTALL | re.IGNORECASE
)
_BRACKETED = re.compile(r"\(([A-Z])\)|\*\*\(?([A-Z])[).]?\*\*")
_ALONE = re.compile(r"(?<![A-Za-z])([A-Z])[.)\s]*$")
_ARTICLE = re.compile(r"a\s[a-zA-Z]")
_DRESS = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox)(?![a-z])|\\ |[{}$*:\"`]")
_ANOTHER = re.compile(
    r"(?:[\s,;/.&|()\[\]-]|(?:or|and|maybe|perhaps)\b)*\b[a-z]\s*(?:$|[,;.)\]/&|-]|(?:or|and)\b|[a-z]\b)", re.IGNORECASE
)


def _wanted(row: Row) -> str:
    """The right letter; raises where the row has none."""
    answer, choices = row["answer"], row.get("choices")
    if isinstance(answer, int) and not isinstance(answer, bool) and choices is not None and 0 <= answer < len(choices):
        return _LETTERS[answer]
    if isinstance(answer, str) and (found := re.fullmatch(r"\s*\(?([A-Za-z])[).]?\s*", answer)):
        return found[1].upper()
    if isinstance(answer, str) and choices is not None and answer in choices:
        return _LETTERS[list(choices).index(answer)]
    raise ValueError(f"the row's answer is neither a letter nor one of its choices: {str(answer)[:80]!r}")


def check_row(row: Row) -> str:
    return complaint(_wanted, row)


@verifier(needs=("answer",), check_row=check_row)
def verify(row: Row, text: str) -> float:
    """1.0 when the text chose the row's option, else 0.0."""
    return float(_chosen(text, row.get("choices") or ()) == _wanted(row))


def _chosen(text: str, choices: Any) -> str | None:
    place = find_answer(text)
    if place is not None:
        line = text[place.start : place.end].strip(" :*\n").partition("\n")[0]  # what follows is an explanation
        said = " ".join(_DRESS.sub(" ", line[:500]).split())
        return _by_words(said, choices) or _by_letter(said)
    if bracketed := last(_BRACKETED.finditer(text)):
        return bracketed[1] or bracketed[2]
    alone = _ALONE.search(text[-20:].rstrip())
    return alone[1] if alone else _by_words(text.strip()[-500:], choices)


def _by_letter(said: str) -> str | None:
    found = _LEADING.match(said)
    if found is None or _ANOTHER.match(found["rest"]):
        return None
    return None if _ARTICLE.match(said) else found[1].upper()


def _by_words(said: str, choices: Any) -> str | None:
    spoken = [str(choice).strip().lower() for choice in choices]
    return _LETTERS[spoken.index(said.lower().rstrip("."))] if said.lower().rstrip(".") in spoken else None
