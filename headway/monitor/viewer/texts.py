"""The texts of recorded tokens, by the tokenizer file of the run's model: no model and no torch is loaded.

A token of a byte-level vocabulary can be part of a character. Its text is then empty, and the token that completes the
character shows it, so that the texts of all tokens, joined, are the text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.types import NOT_SAMPLED, Group, Ints, Trajectory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class Texts:
    """Decodes tokens; where no tokenizer is found, a token's text is its number."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        self._tokenizer = _load(run, str(config.get("model", {}).get("path", "")))

    @property
    def found(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds."""
        if self._tokenizer is None:
            return [f"⟨{token}⟩" for token in tokens]
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, int(token)) or "" for token in tokens]

    def text(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(self.pieces(tokens))
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def completion(self, trajectory: Trajectory) -> str:
        """What the policy wrote and what came in between, sequences separated by a line."""
        pieces = [sequence.tokens[_num_given(sequence.versions) :] for sequence in trajectory.sequences]
        return "\n".join(self.text(tokens.tolist()) for tokens in pieces)

    def prompt(self, group: Group) -> str:
        """What comes before the first sampled token; empty where no trajectory survived."""
        if not group.trajectories or not group.trajectories[0].sequences:
            return ""
        sequence = group.trajectories[0].sequences[0]
        return self.text(sequence.tokens[: _num_given(sequence.versions)].tolist())


def _num_given(versions_T: Ints) -> int:
    """How many tokens precede the first sampled one."""
    sampled_T = versions_T != NOT_SAMPLED
    return int(np.argmax(sampled_T)) if sampled_T.any() else len(versions_T)


def _load(run: Path, model: str) -> "Tokenizer | None":
    from tokenizers import Tokenizer

    for path in (run / "model" / TOKENIZER_FILE, Path(model) / TOKENIZER_FILE, _cached(model)):
        if path is not None and path.is_file():
            return Tokenizer.from_file(str(path))
    return None


def _cached(model: str) -> Path | None:
    """The tokenizer of a model by hub name, where it was fetched before."""
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, TOKENIZER_FILE)
    return Path(found) if isinstance(found, str) else None
