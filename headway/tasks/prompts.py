"""Rows → prompts: what a task's config says about its rows, applied; and an endless, resumable stream of them.

A row that cannot work (no prompt, a field missing that its verifier needs) is one sentence at start-up, naming the row;
rows that are too long, repeated or beyond the verifier are left out and counted. The stream is arithmetic: the prompt
at a position depends on the seed and the position alone, so a resumed run needs no cursor but a number.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.config import TaskSection
from headway.errors import CAUSE, ConfigError, translated
from headway.model.tokenizer import Messages, encode_prompt
from headway.tasks.datasets import Row, distinct, load_rows, same_prompt_key
from headway.tasks.scoring import needs_of_task, row_checks
from headway.types import Chat, Ints, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_UNSCORABLE = 0.1
"""The share of rows a verifier may be unable to score before the data set is refused; fewer are left out."""


@dataclass(frozen=True)
class Prompts:
    """What a run's tasks give: prompts to train on and held-out ones, and what there is to tell about them."""

    train: list[Prompt]
    held_out: list[Prompt]
    notes: list[str]


def load_all(tasks: Mapping[str, TaskSection], tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> Prompts:
    """The prompts of every task, each of at most `max_tokens`, with all its verifier needs."""
    train: list[Prompt] = []
    held_out: list[Prompt] = []
    notes: list[str] = []
    for name, task in tasks.items():
        reader = _RowReader(name, task, tokenizer, max_tokens, notes)
        if task.train and task.weight > 0:
            train += reader.read(task.train, _next_index(train), held_out=False if task.eval_share else None)
        if task.eval:
            held_out += reader.read(task.eval, _next_index(held_out))
        elif task.eval_share:
            held_out += reader.read(task.train, _next_index(held_out), held_out=True)
        if tokenizer.chat_template and not task.chat:
            notes.append(f"the model has a chat template, and {reader.where}.chat = false; an instruct model needs it")
    return Prompts(train, held_out, list(dict.fromkeys(notes)))


def _next_index(prompts: list[Prompt]) -> int:
    return prompts[-1].index + 1 if prompts else 0


def is_held_out(key: str, share: float) -> bool:
    """By the prompt's hash, so that a prompt is on the same side wherever and how often it stands."""
    return int.from_bytes(hashlib.sha256(key.encode(errors="surrogatepass")).digest()[:8], "big") < share * 2**64


class _RowReader:
    """Reads the rows of one task."""

    def __init__(
        self,
        name: str,
        task: TaskSection,
        tokenizer: "PreTrainedTokenizerBase",
        max_tokens: int,
        notes: list[str],
    ) -> None:
        self.name, self.task, self._tokenizer, self._notes = name, task, tokenizer, notes
        self.where = f"tasks.{name}" if name else "task"
        self._max_tokens = min(task.max_prompt_tokens or max_tokens, max_tokens)
        self._needed = {task.prompt_field: "task.prompt_field names"}
        self._needed |= {field: f"the verifier {verifier} needs" for field, verifier in needs_of_task(task).items()}
        self._checks = row_checks(task)

    def read(self, reference: str, first_index: int, held_out: bool | None = None) -> list[Prompt]:
        """The rows, or those on one side of the split, as prompts numbered by row; what is left out is noted."""
        rows = load_rows(reference, self.task.fields)
        for index, row in enumerate(rows):
            self._check_fields(row, f"{reference}, row {index}")
        keys = [same_prompt_key(row[self.task.prompt_field]) for row in rows]
        share = self.task.eval_share
        wanted = [held_out is None or is_held_out(key, share) == held_out for key in keys]
        if not any(wanted):
            raise ConfigError(f"{reference} has no rows on one side of {self.where}.eval_share = {share}; change it")
        if self.task.deduplicate:
            wanted = self._leave_out(reference, wanted, distinct(keys), "repeat an earlier prompt")
        wanted = self._leave_out_unscorable(reference, rows, wanted)
        prompts, lengths = [], dict[int, int]()
        for index in (index for index, is_in in enumerate(wanted) if is_in):
            tokens = self._encode(rows[index], f"{reference}, row {index}")
            if len(tokens) > self._max_tokens:
                lengths[index] = len(tokens)
                continue
            text = str(self._tokenizer.decode(tokens.tolist()))
            prompts.append(Prompt(first_index + index, tokens, text, rows[index], self.name, self._chat(rows[index])))
        self._note_long(reference, lengths, sum(wanted))
        return prompts

    def _check_fields(self, row: Row, where: str) -> None:
        for field, reason in self._needed.items():
            if field not in row:
                raise ConfigError(f"{where} has no field {field!r}, which {reason}; it has {sorted(row)}")

    def _leave_out(self, reference: str, wanted: list[bool], good: list[bool], why: str) -> list[bool]:
        both = [one and other for one, other in zip(wanted, good, strict=True)]
        if num := sum(wanted) - sum(both):
            self._notes.append(f"{reference}: {num} of {sum(wanted)} rows left out, which {why}")
        return both

    def _leave_out_unscorable(self, reference: str, rows: list[Row], wanted: list[bool]) -> list[bool]:
        problems = dict[int, str]()
        for index in (index for index, is_in in enumerate(wanted) if is_in):
            if problem := next((p for check in self._checks if (p := check(rows[index]))), ""):
                problems[index] = problem
        if not problems:
            return wanted
        index, problem = next(iter(problems.items()))
        told = f"{len(problems)} of {sum(wanted)} rows cannot be scored by their verifier (row {index}: {problem})"
        if len(problems) > MOST_UNSCORABLE * sum(wanted):
            raise ConfigError(f"{reference}: {told}; choose another verifier, or repair the rows")
        self._notes.append(f"{reference}: {told} and are left out")
        return [is_in and index not in problems for index, is_in in enumerate(wanted)]

    def _note_long(self, reference: str, lengths: dict[int, int], num_wanted: int) -> None:
        if not lengths:
            return
        longest = max(lengths, key=lambda index: lengths[index])
        told = f"{len(lengths)} of {num_wanted} rows have prompts of more than {self._max_tokens} tokens"
        if len(lengths) == num_wanted:
            raise ConfigError(f"{reference}: {told}, so none is left; raise engine.max_context or shorten them")
        self._notes.append(f"{reference}: {told} and are left out (row {longest} has {lengths[longest]})")

    def _chat(self, row: Row) -> Chat | None:
        messages = compose(self.task, row[self.task.prompt_field])
        return Chat(messages, self.task.template) if isinstance(messages, list) else None

    def _encode(self, row: Row, where: str) -> Ints:
        tokens = encode_row(self.task, self._tokenizer, row, where)
        if not len(tokens):
            raise ConfigError(f"{where}: the prompt has 0 tokens; give it some text")
        return tokens


def encode_row(task: TaskSection, tokenizer: "PreTrainedTokenizerBase", row: Row, where: str) -> Ints:
    """The tokens of a row's prompt, with the system prompt, examples and suffix of its task around it."""
    prompt = row[task.prompt_field]
    messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not (isinstance(prompt, str) or messages):
        kind = type(prompt).__name__
        raise ConfigError(f"{where}: {task.prompt_field!r} is text or a list of chat messages, not {kind}")
    with translated(ConfigError, ConfigError, f"{where}: {CAUSE}"):
        return encode_prompt(tokenizer, compose(task, prompt), task.chat, task.template)


def compose(task: TaskSection, prompt: str | Messages) -> str | Messages:
    """The whole prompt as the model is to see it: text, or messages where the task is a chat or the row has them."""
    if isinstance(prompt, str) and not task.chat:
        shown = [f"{example.prompt}{task.suffix}{example.completion}\n\n" for example in task.few_shot]
        return "".join([task.system and f"{task.system}\n\n", *shown, prompt, task.suffix])
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    has_system = bool(asked) and asked[0].get("role") == "system"
    system = asked[:1] if has_system else [{"role": "system", "content": task.system}] if task.system else []
    return [*system, *_examples(task), *_with_suffix(asked[has_system:], task.suffix)]


def _examples(task: TaskSection) -> Iterator[dict[str, Any]]:
    for example in task.few_shot:
        yield {"role": "user", "content": example.prompt + task.suffix}
        yield {"role": "assistant", "content": example.completion}


def _with_suffix(messages: Messages, suffix: str) -> Messages:
    """With the suffix at the end of the last message, if that is text."""
    if not suffix or not messages or not isinstance(messages[-1].get("content"), str):
        return messages
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + suffix}]


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


class MixedStream:
    """Several tasks' streams in one, by weight: every block of positions has each task's share, in a drawn order."""

    BLOCK = 120

    def __init__(self, prompts: list[Prompt], weights: Mapping[str, float], seed: int) -> None:
        """`weights` by task name; a task without prompts takes no part."""
        names = [name for name, weight in weights.items() if weight > 0]
        of = {name: [prompt for prompt in prompts if prompt.source == name] for name in names}
        self._streams = {name: PromptStream(own, seed + number) for number, (name, own) in enumerate(of.items())}
        self._seed = seed
        self._block = _block_of({name: weights[name] for name in names}, self.BLOCK)

    def __getitem__(self, position: int) -> Prompt:
        if position < 0:
            raise IndexError(f"positions of the stream start at 0, not {position}")
        block, place = divmod(position, len(self._block))
        bits = np.random.Philox(np.random.SeedSequence([self._seed, block, len(self._streams)]))
        order = np.random.Generator(bits).permutation(len(self._block))
        name = self._block[order[place]]
        num_before = sum(self._block[other] == name for other in order[:place])
        return self._streams[name][block * self._block.count(name) + num_before]


def _block_of(weights: Mapping[str, float], size: int) -> list[str]:
    """Each name as often as its weight asks for, at least once; of `size` places or a few more."""
    total = sum(weights.values())
    return [name for name, weight in weights.items() for _ in range(max(1, round(size * weight / total)))]


def stream_of(prompts: list[Prompt], tasks: Mapping[str, TaskSection], seed: int) -> PromptStream | MixedStream:
    """The stream of a run's prompts: one task's, or several tasks' by weight."""
    if len(tasks) == 1:
        return PromptStream(prompts, seed)
    return MixedStream(prompts, {name: task.weight for name, task in tasks.items()}, seed)
