"""Invariant 4: η = 0 is synchronous training.

The asynchronous system and the short loop in examples/sync_loop.py give the same tokens, losses and weights, bit for
bit, on a CPU in deterministic mode.
"""

import asyncio
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headway import codec, launch
from headway.config import Config, InitSection, validate
from headway.model.loading import build_model
from headway.model.tokenizer import build_character_tokenizer
from headway.monitor.view import open_view
from headway.record.events import Event
from headway.record.log import read
from headway.record.run import fold
from headway.record.shards import Record
from headway.training.checkpoint import save_model

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from sync_loop import Step, SyncLoop  # noqa: E402

TASK = """
def rows():
    return [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(10) for b in range(10)]

def verify(task, text):
    return float(task["answer"] in text) + 0.01 * min(len(text), 9)
"""


def make_config(directory: Path, runtime: str, minibatches: int, rank: int) -> Config:
    tokenizer = build_character_tokenizer("0123456789+=")
    init = InitSection(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96)
    save_model(directory / "model", build_model(init, len(tokenizer), 0, 1, 96, seed=3), tokenizer)
    (directory / "task.py").write_text(TASK)
    return validate(
        {
            "run": {"dir": str(directory / "run"), "steps": 4, "runtime": runtime, "deterministic": True, "seed": 5},
            "model": {"path": str(directory / "model"), "lora": {"rank": rank}},
            "task": {"train": f"{directory / 'task.py'}:rows", "verifier": f"{directory / 'task.py'}:verify"},
            "sampling": {"max_tokens": 40},
            "rollout": {"group_size": 4, "workers": 2 if runtime == "local" else 1},
            "engine": {"max_num_seqs": 12, "kv_tokens": 4096, "prefill_chunk": 16},
            "staleness": {"max_staleness": 0},
            "trainer": {"batch_groups": 5, "lr": 3e-3, "token_budget": 256, "threads": 1, "minibatches": minibatches},
            "checkpoint": {"every": 3},
        }
    )


def run_asynchronous(config: Config) -> list[Event]:
    view = open_view(io.StringIO())
    asyncio.run(launch.train(config, resume=False, view=view))
    view.close()
    return read(Path(config.run.dir) / "events.jsonl")


@pytest.mark.parametrize(
    ("runtime", "minibatches", "rank"), [("inline", 1, 0), ("inline", 2, 0), ("inline", 2, 4), ("local", 2, 0)]
)
def test_invariant_4_eta_zero_equals_the_synchronous_loop_bit_for_bit(
    tmp_path: Path, runtime: str, minibatches: int, rank: int
) -> None:
    config = make_config(tmp_path, runtime, minibatches, rank)
    events = run_asynchronous(config)
    state, record = fold(events), Record(tmp_path / "run" / "record")
    expected: list[Step] = asyncio.run(SyncLoop(config).run())
    trained = [event for event in events if event.kind == "trained"]
    assert len(trained) == len(expected) == config.run.steps
    for event, step in zip(trained, expected, strict=True):
        recorded = (record.load(state.ref(group)) for group in event.groups)
        groups = tuple(replace(group, reference={}) for group in recorded)  # the row's fields, for readers alone
        assert codec.encode(groups) == codec.encode(step.batch.groups)
        assert event.metrics["loss"] == step.report.metrics["loss"]
        assert event.digest == step.digest
    assert len({event.digest for event in trained}) == config.run.steps, "the weights must have moved"
    assert all(event.staleness_max == 0 for event in trained)


def test_the_synchronous_loop_stays_readable() -> None:
    assert len((EXAMPLES / "sync_loop.py").read_text().splitlines()) <= 150
