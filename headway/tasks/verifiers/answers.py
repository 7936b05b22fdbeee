"""Where in a text the final answer is: the same rule for every verifier that compares answers.

The answer is what follows the last `####`, `answer:`, `answer is` or `<answer>` (up to a `</answer>`), or the contents
of the last `\\boxed{}` (nested braces included), whichever comes last. A text with none of these has no marked answer.
Linear in the length of the text, whatever it holds.
"""

import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_MARKER = re.compile(
    r"####|<answer>|answer(?:\*\*)?(?::|\s+is\b:?)|\\f?box(?:ed)?[ \t]*(?P<box>\{)|\\boxed[ \t]+(?P<bare>[^\s$]+)",
    re.IGNORECASE,
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class Answer(NamedTuple):
    """The marked part of a text: it goes from `start` to `end`; `boxed` says that nothing else belongs to it."""

    start: int
    end: int
    boxed: bool


def find_answer(text: str) -> Answer | None:
    marker = last(_MARKER.finditer(text))
    if marker is None:
        return None
    if marker["box"]:
        return Answer(marker.end(), closing_brace(text, marker.end()), True)
    if marker["bare"]:
        return Answer(marker.start("bare"), marker.end(), True)
    end = text.find("</answer>", marker.end())
    return Answer(marker.end(), end if end >= 0 else len(text), False)


def last(matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    kept = deque(matches, maxlen=1)
    return kept[0] if kept else None


def closing_brace(text: str, start: int) -> int:
    """The place of the brace that closes one opened just before `start`; the end of the text where none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return len(text)
