"""A GPU trainer that repeats, resumes and saves: deterministic mode, retraining, snapshots, memory that runs out.

Invariants 14 and 16 on a GPU: bit for bit in deterministic mode, otherwise with a logged difference.
"""

import asyncio
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from system import HeadwayProcess, events_of, headway, make_config, run_inline, write_config
from training import (
    digest_of,
    load_state,
    make_batch,
    make_trainer,
    same_bits,
    save_state,
    stale_batch,
    state_of,
    write_model,
)

from headway.record.log import read
from headway.record.run import fold
from headway.training import checkpoint
from headway.training.state import HostCopy
from headway.training.trainer import Trainer

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product of this process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def repeatable_only_here() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


def gpu_trainer(path: str, **knobs: Any) -> Trainer:
    return make_trainer(path, **({"device": "cuda", "compile": False} | knobs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_invariant_16_in_deterministic_mode_the_same_batches_give_the_same_bits(
    tiny_model: str, dtype: str, minibatches: int
) -> None:
    digests = []
    for _ in range(3):
        trainer = gpu_trainer(
            tiny_model, dtype=dtype, minibatches=minibatches, token_budget=64, lr=1e-3, compile=True, deterministic=True
        )
        for version in range(3):
            trainer.train(stale_batch(tiny_model, version, first=10 * version, num_groups=8))
        digests.append(digest_of(trainer))
    assert len(set(digests)) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_14_in_deterministic_mode_a_loaded_checkpoint_continues_bit_for_bit(
    tiny_model: str, tmp_path: Path, dtype: str
) -> None:
    knobs = {"dtype": dtype, "token_budget": 64, "lr": 1e-3, "deterministic": True}
    first, second = (gpu_trainer(tiny_model, **knobs) for _ in range(2))
    batches = [stale_batch(tiny_model, version, first=10 * version) for version in range(4)]
    for batch in batches[:2]:
        first.train(batch)
    save_state(first, tmp_path / "a")
    assert load_state(second, tmp_path / "a") == 2
    for batch in batches[2:]:
        for trainer in (first, second):
            trainer.train(batch)
    assert digest_of(first) == digest_of(second)


def test_13_the_digest_is_of_the_values_and_not_of_the_way_they_travel(tiny_model: str) -> None:
    digests = set()
    for transport in ("cuda", "shared_memory"):
        trainer = gpu_trainer(tiny_model, dtype="bfloat16", transport=transport, deterministic=True)
        trainer.train(make_batch(0))
        update = trainer.publish()
        assert transport == update.transport and update.digest
        digests.add(update.digest)
        trainer.train(make_batch(1, first=10))
        assert trainer.publish().digest not in digests
        asyncio.run(trainer.close())
    assert len(digests) == 1


def test_2_a_model_is_copied_during_the_next_step_and_is_of_its_own_version(tiny_model: str, tmp_path: Path) -> None:
    trainer = gpu_trainer(tiny_model, dtype="bfloat16", lr=1e-2)
    trainer.train(make_batch(0))
    write_model(trainer, tmp_path / "exact")
    trainer.copy_model()
    trainer.train(make_batch(1, first=10))
    checkpoint.begin(tmp_path / "copied")
    asyncio.run(trainer.write_model(str(tmp_path / "copied")))
    checkpoint.finish_model(tmp_path / "copied")
    write_model(trainer, tmp_path / "later")
    exact, copied, later = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "copied", "later"))
    assert same_bits(copied, exact) and not same_bits(later, exact)


def test_a_snapshot_is_copied_during_the_next_step_and_is_of_its_own_version(tiny_model: str, tmp_path: Path) -> None:
    trainer = gpu_trainer(tiny_model, dtype="bfloat16", lr=1e-2)
    trainer.train(make_batch(0))
    exact = state_of(trainer, tmp_path / "exact")
    trainer.snapshot()
    for version in range(1, 3):
        trainer.train(make_batch(version, first=10 * version))
    checkpoint.begin(tmp_path / "a")
    checkpoint.finish(tmp_path / "a", [asyncio.run(trainer.save(str(tmp_path / "a")))])
    assert same_bits(checkpoint.load(tmp_path / "a").tensors, exact)
    assert not same_bits(state_of(trainer, tmp_path / "later"), exact)


def test_a_snapshot_of_gigabytes_holds_the_host_for_less_than_a_second() -> None:
    """Six gigabytes, once their pages are locked; the device copies them while it computes."""
    live = {str(number): torch.full((2**28,), float(number), device=CUDA) for number in range(6)}
    HostCopy(live, CUDA).tensors()
    torch.cuda.synchronize()
    started = time.perf_counter()
    copy = HostCopy(live, CUDA)
    held_s = time.perf_counter() - started
    copy.hold_changes()
    for tensor in live.values():
        tensor += 1
    found = copy.tensors()
    copied_s = time.perf_counter() - started
    assert all(bool((found[name] == float(name)).all()) for name in live)
    LOG.info("host held for %.1f ms, 6.4 GB copied in %.2f s", held_s * 1e3, copied_s)
    assert held_s < 0.5 and copied_s < 2.0


def test_memory_that_runs_out_in_a_real_pass_makes_micro_batches_smaller(tiny_model: str) -> None:
    """A real allocation fails, and training continues with a tighter fit."""
    trainer = gpu_trainer(tiny_model, dtype="bfloat16", token_budget=4096)
    trainer.train(make_batch(0))
    forward = trainer._forward

    def greedy(micro_batch: Any) -> Any:
        if len(micro_batch.lengths) > 4:
            torch.empty(2**50, dtype=torch.uint8, device=CUDA)
        return forward(micro_batch)

    trainer._forward = greedy  # type: ignore[method-assign]
    report = trainer.train(make_batch(1, first=10))
    assert report.version == 2 and report.metrics["token_budget"] < 4096


@pytest.mark.parametrize("deterministic", [True, False])
def test_invariant_14_a_killed_gpu_run_comes_back(tiny_model: str, tmp_path: Path, deterministic: bool) -> None:
    """From the checkpoint of version 2 of 3 steps, by retraining the third; then three more steps."""
    sections: dict[str, Any] = {
        "run": {"steps": 3, "deterministic": deterministic},
        "staleness": {"max_staleness": 0},
        "model": {"dtype": "bfloat16", "path": tiny_model},
        "trainer": {"device": "cuda", "batch_groups": 3, "token_budget": 256, "lr": 1e-3, "compile": False},
    }
    config = make_config(tmp_path, tiny_model, **sections)
    run_inline(config)
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "b")  # of version 3
    recorded = fold(events_of(config)).digests
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 6})})
    summary, _ = run_inline(longer, resume=True)
    events = events_of(longer)
    retrained = [event for event in events if event.kind == "retrained"]
    LOG.info("retrained with max_abs, relative_norm: %s", [(e.max_abs, e.relative_norm) for e in retrained])
    assert summary.status == "finished" and fold(events).num_trained == 6
    if deterministic:
        assert not retrained and fold(events).digests[3] == recorded[3]
    else:
        assert all(event.relative_norm < 1e-2 for event in retrained)


def test_invariants_14_and_16_a_deterministic_run_on_a_gpu_killed_and_resumed_keeps_every_digest(
    tiny_model: str, tmp_path: Path
) -> None:
    """In processes of its own: engine and trainer on the GPU; what is retrained and replayed is equal bit for bit."""
    path = write_config(
        tmp_path,
        tiny_model,
        run={"steps": 8, "runtime": "local", "deterministic": True},
        model={"dtype": "bfloat16", "path": tiny_model},
        engine={"device": "cuda", "kv_tokens": 65536},
        trainer={"device": "cuda", "lr": 1e-3, "token_budget": 256},
        checkpoint={"every": 3},
    )
    run = tmp_path / "run"
    with HeadwayProcess("train", path, run=run) as first:
        events = first.kill_at(lambda events: sum(event.kind == "trained" for event in events) >= 5, "step 5")
    recorded = fold(events).digests
    assert headway("train", path, "--resume").returncode == 0
    found = fold(read(run / "events.jsonl"))
    assert found.status == "finished" and found.num_trained == 8
    assert not [event for event in read(run / "events.jsonl") if event.kind == "retrained"]
    assert all(found.digests[version] == digest for version, digest in recorded.items())
    replayed = headway("replay", run)
    assert replayed.returncode == 0 and "identical to the record" in replayed.stdout, replayed.stderr
