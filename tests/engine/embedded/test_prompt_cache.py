"""Cached prompts over both memories: forked under their own version only, retained while wanted, nothing ever lost."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from driving import make_request

from headway.engine.embedded.paged_kv import PAGE, PagedMemory
from headway.engine.embedded.prompt_cache import PromptCache
from headway.engine.embedded.sequence import RunningSequence
from headway.engine.embedded.slab_kv import KvMemory
from headway.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=1, hidden_size=4, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=8
)
CONTEXT = 256


def make_memory(kind: str) -> Any:
    if kind == "slabs":
        return KvMemory(SHAPE, torch.float32, 4096, CONTEXT)
    return PagedMemory(SHAPE, torch.float32, 4096, CONTEXT, torch.device("cpu"))


class Contents:
    """Reads and writes single places of a row, whichever the memory."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def _places(self, row: Any, stop: int) -> torch.Tensor:
        if isinstance(self.memory, KvMemory):
            return self.memory._view_LKSD(row)[0, 0, :stop, 0]
        self.memory.flush()
        slots = torch.tensor([int(row.ids[i // PAGE]) * PAGE + i % PAGE for i in range(stop)], dtype=torch.long)
        return self.memory.layer(0)[0].view(-1, 2)[slots, 0]

    def write(self, sequence: RunningSequence, start: int, stop: int, value: float) -> None:
        if isinstance(self.memory, KvMemory):
            self.memory._view_LKSD(sequence.row)[0, 0, start:stop, 0] = value
        else:
            self.memory.flush()
            for i in range(start, stop):
                self.memory.layer(0)[0][int(sequence.row.ids[i // PAGE]), i % PAGE, 0, 0] = value

    def read(self, sequence: RunningSequence) -> list[float]:
        return self._places(sequence.row, sequence.num_cached).tolist()


@pytest.mark.parametrize("kind", ["slabs", "pages"])
@pytest.mark.parametrize("seed", range(15))
def test_no_history_forks_another_versions_prompt_or_loses_memory(kind: str, seed: int) -> None:
    """Every place of a row holds the number of the prompt and version that computed it, whatever happens to others."""
    draw, memory = random.Random(seed), make_memory(kind)
    cache, contents = PromptCache(memory, 0), Contents(memory)
    waiting: list[RunningSequence] = []
    running: list[tuple[RunningSequence, int]] = []  # with the version that computed its prompt
    number = 0
    for _ in range(400):
        action = draw.choice(
            ["arrive", "arrive", "admit", "admit", "compute", "compute", "end", "abort", "swap", "full"]
        )
        if action == "arrive" and len(waiting) < 12:
            prefix = draw.randrange(4)
            tokens = np.full((1, 2, 40, 130)[prefix], prefix, np.int32)
            waiting.append(RunningSequence(make_request(tokens, number, max_tokens=9), CONTEXT))
            cache.acquire(waiting[-1])
            number += 1
        elif action == "admit" and waiting and len(running) < 12:
            sequence = waiting.pop(0)
            if cache.allocate(sequence, sequence.num_prompt + 1):
                running.append((sequence, cache.version))
            else:
                waiting.insert(0, sequence)
        elif action == "compute":
            for sequence, version in running:
                if not sequence.awaits_prompt and sequence.num_cached < sequence.num_prompt - 1:
                    stop = min(sequence.num_prompt - 1, sequence.num_cached + draw.choice([7, 16, 200]))
                    contents.write(sequence, sequence.num_cached, stop, 10 * version + float(sequence.tokens[0]))
                    sequence.num_cached = stop
                    cache.computed(sequence)
            for sequence, _ in running:
                if sequence.awaits_prompt:
                    cache.advance(sequence)
        elif action == "end" and running:
            cache.free(running.pop(draw.randrange(len(running)))[0], is_poisoned=draw.random() < 0.1)
        elif action == "abort" and waiting:
            cache.release(waiting.pop(draw.randrange(len(waiting))))
        elif action == "swap" and draw.random() < 0.4:
            keeps = draw.random() < 0.5
            cache.set_version(cache.version + 1)
            for place, (sequence, _) in enumerate(running):
                if not keeps or sequence.awaits_prompt or sequence.num_cached < sequence.num_prompt - 1:
                    assert cache.renew(sequence)
                    running[place] = sequence, cache.version
        elif action == "full":
            cache.release_retained()
        for sequence, version in running:
            expected = 10 * version + float(sequence.tokens[0])
            assert contents.read(sequence) == [expected] * sequence.num_cached
    for sequence, _ in running:
        cache.free(sequence)
    for sequence in waiting:
        cache.release(sequence)
    assert memory.num_used == 0 and not cache._entries and not cache._references


def test_a_page_copied_twice_before_the_device_runs_has_the_first_ones_contents() -> None:
    """A fork of a fork whose own copy is still to come."""
    memory = make_memory("pages")
    first = memory.allocate(PAGE)
    memory.layer(0)[0][int(first.ids[0])] = 5.0
    second, third = memory.allocate(PAGE, first, 9), memory.allocate(PAGE, first, 9)
    memory.copy(first, second, 9)
    memory.free(first)
    memory.copy(second, third, 9)
    memory.flush()
    assert float(memory.layer(0)[0][int(third.ids[0]), 0, 0, 0]) == 5.0
