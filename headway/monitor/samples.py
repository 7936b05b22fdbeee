"""Sample completions of a training step, for the terminal, TensorBoard and W&B; read from the record."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.monitor.text import clean, printable
from headway.monitor.viewer.texts import Texts
from headway.record.events import Place
from headway.record.shards import RECORD_NAME, Record

NUM_GROUPS = 4
"""Groups of a step that are sampled; of each, the trajectory with the highest and the one with the lowest reward."""

COLUMNS = ("group", "trajectory", "reward", "stop", "prompt", "completion")


@dataclass(frozen=True)
class SampleRow:
    group: int
    trajectory: int
    reward: float
    stop: str
    prompt: str
    completion: str

    def cells(self) -> list[str]:
        """As COLUMNS, without control characters."""
        texts = printable(self.prompt), printable(self.completion)
        return [str(self.group), str(self.trajectory), f"{self.reward:.3f}", self.stop, *texts]

    def line(self, step: int) -> str:
        about = f"step {step}, group {self.group}, reward {self.reward:.2f}, {self.stop}"
        return f"sample ({about}): {clean(self.prompt, 70)} → {clean(self.completion, 150)}"


class Samples:
    """Reads the samples of a step; its tokenizer is loaded when the first are wanted."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        self._run_dir, self._config = run_dir, config
        self._record = Record(run_dir / RECORD_NAME)
        self._texts: Texts | None = None

    def read(self, refs: Sequence[Place]) -> list[SampleRow]:
        texts = self._texts = self._texts or Texts(self._run_dir, self._config)
        rows = []
        for group in map(self._record.load, refs):
            ranked = sorted(group.trajectories, key=lambda one: (-one.reward, one.index))
            for one in ranked if len(ranked) < 2 else (ranked[0], ranked[-1]):
                stop = str(one.stops[-1]) if one.stops else "none"
                completion = texts.completion(one)
                rows.append(SampleRow(group.id, one.index, one.reward, stop, texts.prompt(group), completion))
        return rows


def markdown(rows: Sequence[SampleRow]) -> str:
    """A table in which a model's text is nothing but text: every mark in it is written as a character reference."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(map(_literal, row.cells())) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _literal(text: str) -> str:
    return "".join(char if char.isalnum() or char == " " else f"&#{ord(char)};" for char in text.replace("\n", " ↵ "))
