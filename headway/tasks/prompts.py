"""Datasets → an endless, resumable stream of prompts.

Rows come from a .jsonl file or a Python function; a row that cannot work (no prompt, a field missing that its verifier
needs, a prompt that fills the context) is one sentence at start-up, naming the row. The stream is arithmetic: the
prompt at a position depends on the seed and the position alone, so a resumed run needs no cursor but a number.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.config import TaskSection
from headway.errors import ConfigError
from headway.model.tokenizer import encode_prompt
from headway.tasks import imports
from headway.tasks.scoring import needs_of_task
from headway.types import Ints, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]


def load_rows(reference: str) -> list[Row]:
    """The rows of a .jsonl file, or those that the function of a "file.py:function" returns."""
    rows = _read_jsonl(Path(reference)) if reference.endswith(".jsonl") else _call(reference)
    if not rows:
        raise ConfigError(f"{reference} has no rows; give at least one")
    return rows


def check_there(reference: str) -> None:
    """That a .jsonl file exists, for whoever wants to know before anything is loaded."""
    if reference.endswith(".jsonl") and not Path(reference).is_file():
        raise ConfigError(f"dataset {reference} does not exist")


def _read_jsonl(path: Path) -> list[Row]:
    check_there(str(path))
    rows: list[Row] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"dataset {path} is not UTF-8 text ({error})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not valid JSON ({error.msg}, column {error.colno})") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: a row is a JSON object, not {type(row).__name__}")
        rows.append(row)
    return rows


def _call(reference: str) -> list[Row]:
    function = imports.load(reference)
    # The function is the user's: whatever it raises is told as one sentence that names it.
    try:
        rows = list(function())
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{reference} raised {type(error).__name__}: {error}") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{reference}, row {index}: a row is a dict, not {type(row).__name__}")
    return rows


def load_prompts(
    task: TaskSection,
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    split: Literal["train", "eval"] = "train",
) -> list[Prompt]:
    """Every row of the split as a prompt of at most `max_prompt_tokens`, with all its verifier needs."""
    reference = task.train if split == "train" else task.eval
    needed = {task.prompt_field: "task.prompt_field names"}
    needed |= {field: f"the verifier {verifier} needs" for field, verifier in needs_of_task(task).items()}
    prompts = []
    for index, row in enumerate(load_rows(reference)):
        where = f"{reference}, row {index}"
        _check_fields(row, needed, where)
        tokens = _encode(row[task.prompt_field], task, tokenizer, where)
        if not 0 < len(tokens) <= max_prompt_tokens:
            raise ConfigError(
                f"{where}: the prompt has {len(tokens)} tokens, and 1 to {max_prompt_tokens} leave the context room to "
                "answer; shorten the prompt or raise engine.max_context"
            )
        prompts.append(Prompt(index=index, tokens=tokens, text=str(tokenizer.decode(tokens.tolist())), task=row))
    return prompts


def _check_fields(row: Row, needed: dict[str, str], where: str) -> None:
    for field, reason in needed.items():
        if field not in row:
            raise ConfigError(f"{where} has no field {field!r}, which {reason}; it has {sorted(row)}")


def _encode(prompt: Any, task: TaskSection, tokenizer: "PreTrainedTokenizerBase", where: str) -> Ints:
    messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not (isinstance(prompt, str) or messages):
        kind = type(prompt).__name__
        raise ConfigError(f"{where}: {task.prompt_field!r} is text or a list of chat messages, not {kind}")
    try:
        return encode_prompt(tokenizer, prompt, task.chat, task.suffix)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


class PromptStream:
    """The endless stream: epoch after epoch, each a permutation of the prompts drawn from (seed, epoch)."""

    NUM_CACHED_EPOCHS = 4

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        if not prompts:
            raise ConfigError("a stream of prompts needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __getitem__(self, position: int) -> Prompt:
        if position < 0:
            raise IndexError(f"positions of the stream start at 0, not {position}")
        epoch, place = divmod(position, len(self._prompts))
        return self._prompts[int(self._order(epoch)[place])]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            while len(self._orders) >= self.NUM_CACHED_EPOCHS:
                del self._orders[next(iter(self._orders))]
            bits = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
            self._orders[epoch] = np.random.Generator(bits).permutation(len(self._prompts))
        return self._orders[epoch]
