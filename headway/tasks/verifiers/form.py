"""Rewards for the form of a text, whatever it says: its format and its length. To be combined with one for content.

`Format("<think>.*</think>.*<answer>.*</answer>")` makes a verifier of a pattern the whole text must match;
`verify_tags` is the one for `<think>` and `<answer>`, each once and in this order; `verify_boxed` asks for a marked
answer. `Length(most, least)` gives 1.0 within its bounds (in characters or words) and falls off linearly to 0.0 at
twice the most and at half the least.

1.0 to 0.0 as said; there is no error, because nothing of the row is read. A pattern that takes too long has not
matched.
"""

import re
from typing import Literal

from headway.errors import CAUSE, ConfigError, translated
from headway.tasks.verifiers import Row
from headway.tasks.verifiers.answers import find_answer
from headway.tasks.verifiers.bounded import Bounded


class Format:
    """1.0 when the whole text, without spaces around it, matches the pattern (a dot also matches line breaks)."""

    def __init__(self, pattern: str) -> None:
        with translated(re.error, ConfigError, f"Format({pattern!r}): this is no regular expression ({CAUSE})"):
            self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, row: Row, text: str) -> float:
        return float(_MATCHES.within_limits(self._pattern.pattern, text.strip(), otherwise=False))


class Length:
    """1.0 for a text of `least` to `most` characters or words, and less the further from it."""

    def __init__(self, most: int, least: int = 0, unit: Literal["characters", "words"] = "characters") -> None:
        if not 0 <= least <= most or most == 0:
            raise ConfigError(f"Length(most={most}, least={least}): a text cannot be as long as that")
        self._most, self._least, self._unit = most, least, unit

    def __call__(self, row: Row, text: str) -> float:
        size = len(text) if self._unit == "characters" else len(text.split())
        if size > self._most:
            return max(0.0, 2.0 - size / self._most)
        if size < self._least:
            return max(0.0, 2.0 * size / self._least - 1.0)
        return 1.0


def verify_tags(row: Row, text: str) -> float:
    """1.0 for <think>…</think> and then <answer>…</answer>, each tag once, nothing else around."""
    tags = re.findall(r"</?(?:think|answer)>", text)
    inside = text.strip().startswith("<think>") and text.strip().endswith("</answer>")
    between = re.search(r"</think>\s*+<answer>", text) is not None
    return float(tags == ["<think>", "</think>", "<answer>", "</answer>"] and inside and between)


def verify_boxed(row: Row, text: str) -> float:
    """1.0 for a text that marks an answer, in a box or after ####."""
    place = find_answer(text)
    return float(place is not None and bool(text[place.start : place.end].strip()))


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.DOTALL) is not None


_MATCHES = Bounded(_matches, deadline_s=1.0)
