"""Is the text, or its answer, a given string, or does it match a regular expression?

`verify` compares the marked answer (`headway.tasks.verifiers.answers`), or the whole text where nothing is marked, with
the row's `answer`, or any of a list of answers, without regard to case, spaces and a full stop at the end.
`verify_text` compares the whole text as it is. `verify_regex` searches the whole text for the row's `pattern`.

1.0: it is, or matches. 0.0: it is not, does not, or the search exceeded its deadline: it runs in a process that is
killed then, because some patterns take for ever on some texts. An error: the row's answer is no text, or its pattern no
regular expression; such rows are refused at start.
"""

import re
from typing import Any

from headway.tasks.verifiers import Row, complaint, verifier
from headway.tasks.verifiers.answers import find_answer
from headway.tasks.verifiers.bounded import Bounded


def _accepted(row: Row) -> list[str]:
    answers: Any = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise ValueError(f"the row's answer is neither a text nor a list of texts: {str(row['answer'])[:80]!r}")
    return list(answers)


def check_row(row: Row) -> str:
    return complaint(_accepted, row)


@verifier(needs=("answer",), check_row=check_row)
def verify(row: Row, text: str) -> float:
    """1.0 when the answer is one of the row's, but for case, spaces and a full stop."""
    place = find_answer(text)
    said = text[place.start : place.end] if place else text
    return float(_folded(said) in map(_folded, _accepted(row)))


@verifier(needs=("answer",), check_row=check_row)
def verify_text(row: Row, text: str) -> float:
    """1.0 when the whole text is one of the row's answers, to the letter."""
    return float(text in _accepted(row))


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .*:$")


def check_pattern(row: Row) -> str:
    try:
        re.compile(row["pattern"])
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"the row's pattern is no regular expression ({error}): {str(row['pattern'])[:80]!r}"
    return ""


@verifier(needs=("pattern",), check_row=check_pattern)
def verify_regex(row: Row, text: str) -> float:
    """1.0 when the pattern is found in the text."""
    if wrong := check_pattern(row):
        raise ValueError(wrong)
    return float(_SEARCH.within_limits(row["pattern"], text, otherwise=False))


def _search(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


_SEARCH = Bounded(_search, deadline_s=1.0)
