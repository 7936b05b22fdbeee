"""Several engines in one run: who generates what, that it does not matter who does, and that their numbers add up.

Invariant 1: single admission authority; the version that admits is the lowest of all engines. Invariant 2: nothing
vanishes. Invariant 4: η = 0 is synchronous training, whichever engine serves a group.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from stage import StandInRewards, kinds
from synthetic import SyntheticRun
from system import (
    HeadwayProcess,
    check_fates,
    check_finished,
    events_of,
    make_config,
    run_inline,
    write_config,
)

from headway import codec
from headway.config import Config, EngineSection, RolloutSection, WeightsSection, load
from headway.control import workers
from headway.engine.embedded.service import EmbeddedEngine
from headway.engine.fake import FakeEngine
from headway.engine.protocol import Engine
from headway.monitor.rates import rates
from headway.monitor.report import Summary
from headway.record.events import Event
from headway.record.run import fold
from headway.record.shards import Record
from headway.rollout.reward_pool import RewardPool
from headway.rollout.worker import RolloutWorker
from headway.runtime.protocol import Runtime
from headway.types import (
    Admission,
    Chunk,
    Completion,
    Prompt,
    Request,
    Sampling,
)

BOTH = ("engine-0", "engine-1")


# Whole runs


def check_both(config: Config, events: list[Event]) -> None:
    """A finished run in which both engines took part; what they counted is what the groups hold."""
    check_finished(config, events)
    generated = Counter[str]()
    for event in kinds(events, "stats"):
        generated[event.engine] += event.generated
    assert generated.keys() == set(BOTH) and all(generated.values())
    assert generated.total() == check_fates(events).generated
    for engine in BOTH:
        swapped = [event for event in events if event.kind == "swapped" and event.engine == engine]
        assert [event.version for event in swapped] == list(range(config.run.steps + 1))
        assert max(event.parity_max_abs for event in swapped) < 1e-5


def check_summary(summary: Summary, events: list[Event]) -> None:
    assert summary.tokens_generated == sum(event.generated for event in kinds(events, "stats"))
    assert summary.engine_busy_share is None or 0 < summary.engine_busy_share <= 1
    assert summary.eval_before is not None and summary.eval_after is not None


def groups_of(config: Config, events: list[Event]) -> bytes:
    """Every finished group, by id: tokens, log-probs, versions and rewards."""
    state, record = fold(events), Record(Path(config.run.dir) / "record")
    return codec.encode([record.load(group.ref) for group in state.groups if group.ref])


def digests(events: list[Event]) -> list[str]:
    return [event.digest for event in events if event.kind == "trained"]


def test_two_engines_and_training_satisfy_eq_3_and_the_ledger(tmp_path: Path, tiny_model: str) -> None:
    config = make_config(tmp_path, tiny_model, engine={"count": 2, "max_num_seqs": 4}, evaluate={"every": 2})
    summary, _ = run_inline(config)
    events = events_of(config)
    check_both(config, events)
    check_summary(summary, events)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> tuple[list[str], bytes]:
    """Weights and groups of a run at η = 0 with one engine."""
    config = make_config(tmp_path_factory.mktemp("one"), tiny_model, staleness={"max_staleness": 0})
    run_inline(config)
    events = events_of(config)
    check_finished(config, events)
    assert len(set(digests(events))) == config.run.steps, "the weights must have moved"
    return digests(events), groups_of(config, events)


def test_invariant_4_two_engines_in_one_process_make_the_weights_of_one(
    tmp_path: Path, tiny_model: str, synchronous: tuple[list[str], bytes]
) -> None:
    config = make_config(tmp_path, tiny_model, staleness={"max_staleness": 0}, engine={"count": 2})
    run_inline(config)
    events = events_of(config)
    check_both(config, events)
    assert (digests(events), groups_of(config, events)) == synchronous


def test_invariant_4_two_engines_in_processes_make_the_weights_of_one(
    tmp_path: Path, tiny_model: str, synchronous: tuple[list[str], bytes]
) -> None:
    sections = {"staleness": {"max_staleness": 0}, "engine": {"count": 2}}
    path = write_config(tmp_path, tiny_model, run={"runtime": "local"}, **sections)
    config = load(path)
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(lambda events: any(event.kind == "trained" for event in events), "a training step")
        names = [" ".join(process.cmdline()) for process in run.descendants()]
        assert run.wait() == 0, run.output
    for engine in BOTH:
        assert sum(f"headway.runtime.worker {engine} " in name for name in names) == 1, names
    events = run.events()
    check_both(config, events)
    assert (digests(events), groups_of(config, events)) == synchronous


# Which engine serves a group


class Recorded(FakeEngine):
    """Remembers whom it served; answers once its gate is open."""

    def __init__(self, is_open: bool = True) -> None:
        super().__init__(mean_tokens=4.0)
        self.groups: list[int] = []
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        self.groups.append(request.key.group)
        await self.gate.wait()
        async for item in super().generate(request):
            yield item


async def make_worker(model: str, engines: list[Recorded]) -> RolloutWorker:
    named: dict[str, Engine] = {f"engine-{number}": engine for number, engine in enumerate(engines)}
    worker = RolloutWorker(model, RolloutSection(), 0, 100, 512, 512, 60.0)
    await worker.connect(named, dict.fromkeys([*named, "reward"], 0), (), cast(RewardPool, StandInRewards()))
    return worker


def admission(group: int, size: int = 3, stream: str = "train") -> Admission:
    prompt = Prompt(group, np.array([3, 4, 5], np.int32), "1+1", {"prompt": f"{group}", "answer": "2"})
    return Admission(group, prompt, size, 0, 0, Sampling(max_tokens=8), stream)


async def start(worker: RolloutWorker, *admissions: Admission) -> list[asyncio.Task[Any]]:
    """All in the same turn of the event loop, as a confirmed version admits them; back when all were placed."""
    tasks = [asyncio.create_task(worker.run(admission)) for admission in admissions]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("stream", ["train", "eval@0"])
def test_a_burst_of_groups_is_spread_evenly_and_each_stays_on_one_engine(tiny_model: str, stream: str) -> None:
    engines = [Recorded(is_open=False) for _ in range(3)]

    async def play() -> None:
        tasks = await start(
            await make_worker(tiny_model, engines), *(admission(group, 3, stream) for group in range(6))
        )
        for engine in engines:
            assert len(engine.groups) == 6 and len(set(engine.groups)) == 2
            engine.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(play())


def test_a_group_goes_to_the_engine_with_the_least_to_do(tiny_model: str) -> None:
    slow, fast = Recorded(is_open=False), Recorded()

    async def play() -> None:
        worker = await make_worker(tiny_model, [slow, fast])
        waiting = await start(worker, admission(0))
        for group in (1, 2, 3, 4):
            await worker.run(admission(group))
        assert set(slow.groups) == {0} and set(fast.groups) == {1, 2, 3, 4}
        slow.gate.set()
        await asyncio.gather(*waiting)
        await worker.run(admission(6))
        assert 6 in slow.groups, "what has ended must no longer count"

    asyncio.run(play())


def test_workers_with_one_group_each_do_not_all_begin_at_the_first_engine(tiny_model: str) -> None:
    engines = [Recorded(), Recorded()]

    async def play() -> None:
        for group in range(2):
            await (await make_worker(tiny_model, engines)).run(admission(group))

    asyncio.run(play())
    assert [set(engine.groups) for engine in engines] == [{0}, {1}]


# What is started where


class Starting:
    """A runtime that only remembers what it was asked to start."""

    async def num_machines(self) -> int:
        return 1

    def __init__(self) -> None:
        self.started: dict[str, tuple[type, tuple[Any, ...]]] = {}

    async def start(self, name: str, cls: type, *args: Any, threads: int = 1) -> Any:
        self.started[name] = cls, args
        return self

    async def connect(self, *args: Any) -> None: ...


def engines_of(runtime: Starting) -> dict[str, tuple[Any, ...]]:
    return {name: args for name, (cls, args) in runtime.started.items() if cls is EmbeddedEngine}


@pytest.mark.parametrize(
    ("trainer", "devices", "shares"),
    [
        ("cpu", "cuda:0,cuda:1", [0.8, 0.8]),
        ("cuda:2", "cuda:0,cuda:1", [0.8, 0.8]),
        ("cuda:0", "cuda,cuda:1", [0.3, 0.8]),
        ("cuda", "cuda:0", [0.15, 0.15]),
        ("cuda:1", "cuda", [0.4, 0.4]),
        ("cuda", "cuda,cuda:1,cuda:0", [0.15, 0.8, 0.15]),
    ],
)
def test_engines_of_one_gpu_divide_its_memory(
    tmp_path: Path, tiny_model: str, trainer: str, devices: str, shares: list[float]
) -> None:
    section = {"device": devices, "count": len(shares)}
    runtime = Starting()
    config = make_config(tmp_path, tiny_model, engine=section, trainer={"device": trainer})
    fleet = workers.Fleet(cast(Runtime, runtime), config)
    for name in config.engine.placement:
        asyncio.run(fleet.start_engine(name))
    engines = engines_of(runtime)
    assert list(engines) == [f"engine-{number}" for number in range(len(shares))]
    assert [args[-1] for args in engines.values()] == pytest.approx(shares)
    sections = [next(arg for arg in args if isinstance(arg, EngineSection)) for args in engines.values()]
    named = devices.split(",")
    assert [section.placement["engine"] for section in sections] == [
        named[number % len(named)] for number in range(len(shares))
    ]


@pytest.mark.parametrize(
    ("trainer", "devices", "on_device"),
    [
        ("cuda", "cuda:1,cuda:2", True),
        ("cuda", "cuda:1,cpu", False),
        ("cpu", "cuda:0,cuda:1", False),
        ("cpu", "cpu", False),
    ],
)
def test_weights_go_from_gpu_to_gpu_only_where_every_engine_is_on_one(
    tmp_path: Path, tiny_model: str, trainer: str, devices: str, on_device: bool
) -> None:
    runtime = Starting()
    engine = {"device": devices, "count": 2}
    config = make_config(tmp_path, tiny_model, engine=engine, trainer={"device": trainer})
    asyncio.run(workers.start_trainer(cast(Runtime, runtime), config, 0))
    (weights,) = (arg for arg in runtime.started["trainer"][1] if isinstance(arg, WeightsSection))
    assert weights.transport == ("cuda" if on_device else "shared_memory")


# What a person sees


def test_rates_of_engines_add_up_however_far_apart_their_stats_are() -> None:
    run = SyntheticRun(steps=4)
    for _ in range(3):
        run.now += 60.0
        for engine in BOTH:
            run.generated = 600
            run.look(60.0, 15.0, engine=engine)
    run.now += 30.0
    run.checkpoint()
    recent = rates(fold(run.events))
    assert recent.generated_per_s == pytest.approx(2 * 600 / 60)
    assert recent.trainer_wait == pytest.approx(2 * 15 / 60)
