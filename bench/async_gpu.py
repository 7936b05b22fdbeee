"""Asynchronous against synchronous training with engine and trainer on one GPU, over forced long-tailed lengths.

Every arm is the same controller over the same engine, trainer and rollout processes, which are started once and warmed
up; arms differ in the size of a batch, in the bound η, in what becomes of running sequences at a swap, and in how long
completions are; for one kind of lengths all arms have the same prompts and lengths in the same order. Effective tokens
a second are those of trained completions over the time from the end of one training step (at η = 0, where nothing has
to fill first, from the first admission) to the end of the last. At η = 0 generation and training take turns.

The ceiling is that of an ideal schedule without overlap: the time to generate a batch at the speed the engine has in
that arm while nothing is trained, plus the time to train it at the speed the trainer has at η = 0, alone.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from common import RESULTS_DIR, Message, Record, versions
from long_tail import write_rows
from shapes import SHAPES, LongTailed, model_directory, trained_groups, vocabulary_of

if TYPE_CHECKING:
    from rich.console import Console

    from headway.config import Config
    from headway.launch import Prepared
    from headway.types import Prompt

PROMPT_LENGTH = 128
SIZES = ("64x16", "32x16", "16x16", "16x8")
POLICIES = ("keep", "recompute", "drain")
STEP_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Plan:
    """One arm, written as `16x8,eta=4,kv=keep,mean=2048,spread=1.0,longest=16384,steps=6,skip=3`."""

    groups: int
    group_size: int
    eta: int = 4
    kv: str = "keep"
    mean: float = 2048
    spread: float = 1.0
    longest: int = 16384
    steps: int = 0  # measured ones; 0 leaves it to η
    skip: int = -1  # first ones that are not; -1 leaves it to η

    @classmethod
    def parse(cls, text: str) -> Self:
        size, *settings = text.split(",")
        groups, group_size = map(int, size.split("x"))
        plan = cls(groups, group_size)
        for setting in settings:
            name, value = setting.split("=")
            plan = replace(plan, **{name: type(getattr(plan, name))(value)})
        if plan.kv not in POLICIES:
            raise ValueError(f"{text}: kv is one of {', '.join(POLICIES)}")
        return replace(
            plan,
            steps=plan.steps or (2 if plan.eta == 0 else 5),
            skip=plan.skip if plan.skip >= 0 else plan.eta,
        )

    @property
    def size(self) -> str:
        return f"{self.groups}×{self.group_size}"

    @property
    def lengths(self) -> str:
        """What arms must share to be compared."""
        return f"{self.mean:g} in the mean, spread {self.spread:g}, {self.longest} at most"


WARM_UP = Plan(64, 16, eta=0, mean=300, longest=1024, steps=1, skip=0)
"""Sequences of all lengths, so that batches of every size decode and their graphs are captured."""


def make_config(options: argparse.Namespace, model: Path, rows: Path, plan: Plan) -> "Config":
    from headway.config import validate

    context = -(-(options.longest + PROMPT_LENGTH + 64) // 64) * 64
    here = Path(__file__).resolve().parent
    return validate(
        {
            "run": {"dir": str(rows.parent / "run"), "steps": 10**6, "seed": options.seed},
            "model": {"path": str(model), "dtype": "bfloat16" if options.device == "cuda" else "float32"},
            "task": {"train": str(rows), "verifier": f"{here}/long_tail.py:no_score"},
            "sampling": {"max_tokens": options.longest},
            "rollout": {"workflow": f"{here}/long_tail.py:ForcedLengths", "group_size": plan.group_size},
            "engine": {
                "device": options.device,
                "max_num_seqs": options.max_num_seqs,
                "max_context": context,
                "kv_tokens": options.kv_tokens,
                "prefill_chunk": 16384,
                "chunk_tokens": 4096,
                "kv_on_swap": plan.kv,
            },
            "staleness": {"max_staleness": plan.eta, "window": options.window},
            "trainer": {
                "device": options.device,
                "batch_groups": plan.groups,
                "token_budget": max(options.token_budget, context),
                "minibatches": options.minibatches,
                "lr": 1e-6,
            },
            "checkpoint": {"every": 10**6},
            "metrics": {"tensorboard": False},
        }
    )


class Shifted:
    """A stream of prompts whose first is that of group number `first`: arms begin where the one before ended."""

    def __init__(self, prompts: "list[Prompt]", first: int):
        self._prompts, self._first = prompts, first

    def __getitem__(self, position: int) -> "Prompt":
        return self._prompts[(position - self._first) % len(self._prompts)]


@dataclass
class Listener:
    """The events of an arm, and a wait for its training steps."""

    events: list[Any] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_event(self, event: Any) -> None:
        self.events.append(event)
        self.changed.set()

    @property
    def trained(self) -> list[Any]:
        return [event for event in self.events if event.kind == "trained"]

    async def steps(self, number: int, run: "asyncio.Task[None]") -> None:
        while len(self.trained) < number:
            if run.done():
                run.result()
                raise AssertionError("the run ended before it was measured")
            self.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 1)
            last = self.events[-1].time if self.events else time.time()
            if time.time() - last > STEP_DEADLINE_S:
                raise AssertionError(f"no event for {STEP_DEADLINE_S:g} s")


class Bench:
    """The processes all arms share, and where the trainer stands."""

    def __init__(self, options: argparse.Namespace, directory: Path, model: Path, fleet: Any):
        self.options, self.directory, self.model, self.fleet = options, directory, model, fleet

    async def run(self, plan: Plan, name: str) -> Message:
        """One arm: a controller from the trainer's version on, ended when it has trained its steps."""
        from headway.control.controller import Controller
        from headway.record.shards import RunLog

        prepared = prepare(self.options, self.directory, self.model, plan)
        version = await self._next_version(prepared)
        directory = self.directory / name
        directory.mkdir(parents=True)
        log, listener = RunLog(directory), Listener()
        log.subscribe(listener.on_event)
        progress, tasks = _progress(prepared, version), _tasks(prepared, version * plan.groups)
        controller = Controller(prepared.config, self.fleet, tasks, progress, log, directory)
        run = asyncio.create_task(controller.run())
        try:
            await listener.steps(plan.skip + plan.steps, run)
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            log.close()
        return effective(listener.events, plan)

    async def _next_version(self, prepared: "Prepared") -> int:
        """A small training step, because an engine takes no version that it has: the version it leads to."""
        from headway.types import Batch

        trainer = await self.fleet.start_trainer()
        version = (await trainer.score((prepared.prompts[0].tokens,), 1.0)).version
        groups = trained_groups([[4, 8]], 16, vocabulary_of(self.model), version=version)
        report = await trainer.train(Batch(version, tuple(groups)))
        if report.skipped:
            raise AssertionError(report.skipped)
        return int(report.version)


def prepare(options: argparse.Namespace, directory: Path, model: Path, plan: Plan) -> "Prepared":
    from headway import launch

    rows = directory / f"rows-{plan.groups}x{plan.group_size}-{plan.mean:g}-{plan.spread:g}-{plan.longest}.jsonl"
    if not rows.exists():
        lengths = LongTailed(plan.mean, plan.longest, plan.spread, seed=options.seed)
        write_rows(rows, lengths, options.rows * plan.groups, plan.group_size, PROMPT_LENGTH)
    return launch.prepare(make_config(options, model, rows, plan))


def _progress(prepared: "Prepared", version: int) -> Any:
    from headway.control.adaptive import AdaptiveStaleness
    from headway.control.buffer import Buffer
    from headway.control.controller import Progress
    from headway.control.staleness import StalenessControl

    fresh = prepared.staleness()
    num_before = version * fresh.batch_groups
    control = StalenessControl.restore(
        fresh.batch_groups,
        fresh.max_staleness,
        fresh.window,
        num_admitted=num_before,
        trained=set(range(num_before)),
        dropped=set(),
    )
    adaptive = AdaptiveStaleness(prepared.config.staleness)
    return Progress(version, control, Buffer(control), adaptive, evaluated_before=True)


def _tasks(prepared: "Prepared", first: int) -> Any:
    from headway import launch
    from headway.control.controller import Tasks

    return Tasks(
        prompts=prepared.prompts,
        stream=Shifted(prepared.prompts, first),  # type: ignore[arg-type]  # a stream is what has prompts by number
        held_out=[],
        probe=launch.probe(prepared.prompts, prepared.longest),
        sampling=prepared.sampling,
        eval_sampling=prepared.eval_sampling,
    )


def effective(events: list[Any], plan: Plan) -> Message:
    """What was trained after the first steps, and in how much time."""
    started = next(event.time for event in events if event.kind == "admitted")
    trained = [event for event in events if event.kind == "trained"]
    begin = trained[plan.skip - 1].time if plan.skip else started
    kept = trained[plan.skip : plan.skip + plan.steps]
    wall_s, tokens = kept[-1].time - begin, sum(event.tokens for event in kept)

    def mean(name: str) -> float:
        return float(sum(getattr(event, name) for event in kept) / len(kept))

    return {
        "size": plan.size,
        "eta": plan.eta,
        "kv": plan.kv,
        "lengths": plan.lengths,
        "steps": len(kept),
        "skipped": plan.skip,
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "train_s": mean("seconds"),
        "wait_s": mean("wait_s"),
        "staleness_mean": mean("staleness_mean"),
        "staleness_max": max(event.staleness_max for event in kept),
        **engine_figures(events, begin, kept[-1].time),
        "timeline": timeline(events, begin, kept[-1].time),
    }


def engine_figures(events: list[Any], begin: float, end: float) -> Message:
    """What the engine did in the measured time: how busy it was, how many sequences ran, how long swaps stopped it."""
    stats = [event for event in events if event.kind == "stats" and begin <= event.time <= end]
    swaps = [event for event in events if event.kind == "swapped" and begin <= event.time <= end]
    found: Message = {}
    if len(stats) > 1:
        seconds = stats[-1].time - stats[0].time
        found = {
            "engine_busy": sum(event.busy_s for event in stats[1:]) / seconds,
            "running_mean": sum(event.running for event in stats) / len(stats),
            "generated_per_s": sum(event.generated for event in stats[1:]) / seconds,
            "preempted": sum(event.preempted for event in stats[1:]),
        }
    if swaps:
        pauses = [swap.pause_ms for swap in swaps]
        found["pause_ms"] = {"mean": sum(pauses) / len(pauses), "max": max(pauses)}
        found["stage_s"] = sum(swap.stage_s for swap in swaps) / len(swaps)
        found["parity_max_abs"] = max(swap.parity_max_abs for swap in swaps)
    return found


def timeline(events: list[Any], begin: float, end: float) -> Message:
    """For a picture: looks at the engine (second, sequences, share of time busy, tokens/s), training, swaps."""
    stats = [event for event in events if event.kind == "stats" and begin <= event.time <= end]
    looks = [
        (
            round(event.time - begin, 2),
            event.running,
            round(event.busy_s / event.seconds, 3),
            round(event.generated / event.seconds),
        )
        for event in stats[1:]
    ]
    steps = [
        (round(event.started - begin, 2), round(event.seconds, 2))
        for event in events
        if event.kind == "trained" and begin < event.time <= end
    ]
    swaps = [
        (round(event.time - begin, 2), event.pause_ms)
        for event in events
        if event.kind == "swapped" and begin < event.time <= end
    ]
    return {"seconds": round(end - begin, 2), "engine": looks, "trainer": steps, "swaps": swaps}


def generation_alone(item: Message) -> float | None:
    """Tokens a second of the engine in the measured time while nothing was trained; None if there was no such time."""
    tokens = seconds = 0.0
    steps = item["timeline"]["trainer"]
    for (before, *_), (at, *_, speed) in itertools.pairwise(item["timeline"]["engine"]):
        if not any(begin < at and before < begin + length for begin, length in steps):
            tokens, seconds = tokens + speed * (at - before), seconds + at - before
    return tokens / seconds if seconds else None


def add_ceiling(results: list[Message]) -> None:
    """For each asynchronous arm, what an ideal schedule without overlap would give."""
    for item in results:
        base = next((r for r in results if r["eta"] == 0 and _comparable(r, item)), None)
        if base is None or not item["eta"] or item["kv"] != "keep":
            continue
        if (alone := generation_alone(item)) is not None:
            tokens = item["tokens"] / item["steps"]
            train_s = base["train_s"] * tokens / (base["tokens"] / base["steps"])
            item["generation_alone"] = alone
            item["ceiling"] = tokens / (tokens / alone + train_s)


def _comparable(one: Message, other: Message) -> bool:
    return bool(one["size"] == other["size"] and one["lengths"] == other["lengths"])


def show(results: list[Message], console: "Console") -> None:
    from rich.table import Table

    columns = ("batch", "η", "at a swap", "tokens/s", "against η = 0", "ceiling", "s a step", "training s", "staleness")
    table = Table(*columns)
    for item in results:
        base = next((r["tokens_per_s"] for r in results if r["eta"] == 0 and _comparable(r, item)), None)
        ratio = f"{item['tokens_per_s'] / base:.2f}×" if base else "–"
        ceiling = f"{item['ceiling'] / base:.2f}×" if base and "ceiling" in item else "–"
        numbers = [f"{item['wall_s'] / item['steps']:.1f}", f"{item['train_s']:.1f}", f"{item['staleness_mean']:.2f}"]
        speed = f"{item['tokens_per_s']:,.0f}"
        table.add_row(item["size"], str(item["eta"]), item["kv"], speed, ratio, ceiling, *numbers)
    console.print(table)


def _standing(fleet: type) -> type:
    """A fleet whose workers outlive each controller: what was started once is handed out again."""

    class Standing(fleet):  # type: ignore[misc]
        started: dict[str, Any]

        async def _once(self, name: str, start: Any) -> Any:
            known = self.__dict__.setdefault("started", {})
            if name not in known:
                known[name] = await start
            elif asyncio.iscoroutine(start):
                start.close()
            return known[name]

        async def start_engine(self, name: str) -> Any:
            return await self._once(name, super().start_engine(name))

        async def start_rollout(self, name: str) -> Any:
            return await self._once(name, super().start_rollout(name))

        async def start_rewards(self) -> Any:
            return await self._once("reward", super().start_rewards())

        async def start_trainer(self) -> Any:
            return await self._once("trainer", super().start_trainer())

    return Standing


@asynccontextmanager
async def open_bench(options: argparse.Namespace, directory: Path) -> AsyncIterator[Bench]:
    """Engine, trainer and rollout worker, started and warmed up."""
    from headway.control.workers import Fleet, open_runtime

    model = model_directory(options.shape, directory, options.device)
    prepared = prepare(options, directory, model, WARM_UP)
    # The workers import the workflow from this directory's modules.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    async with open_runtime(prepared.config, directory / "workers") as runtime:
        bench = Bench(options, directory, model, _standing(Fleet)(runtime, prepared.config))
        if not options.cold:
            await bench.run(WARM_UP, "warm-up")
        yield bench


async def measure(options: argparse.Namespace, directory: Path, record: Record, console: "Console") -> list[Message]:
    results: list[Message] = []
    settings = {key: str(value) for key, value in vars(options).items() if key != "out"}

    def write() -> None:
        found = versions("torch", "triton", "transformers")
        record.write(options.out, versions=found, settings=settings, repetitions=results)

    async with open_bench(options, directory) as bench:
        console.print("warm", highlight=False)
        for number, plan in enumerate(options.arms):
            results.append(await bench.run(plan, f"arm-{number}"))
            console.print(f"{plan}: {results[-1]['tokens_per_s']:,.0f} tokens/s", highlight=False)
            add_ceiling(results)
            write()
    return results


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench async_gpu", description=(__doc__ or "").splitlines()[0])
    arms = [f"{size},eta={eta}" for size in reversed(SIZES) for eta in (0, 4)]
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="shape of the model")
    parser.add_argument("--device", default="cuda", help="where engine and trainer compute")
    parser.add_argument("--arms", nargs="+", type=Plan.parse, default=list(map(Plan.parse, arms)), help=Plan.__doc__)
    parser.add_argument(
        "--window", type=int, default=-1, help="take-order window; -1 is the paper's, oldest ready first"
    )
    parser.add_argument("--longest", type=int, default=16384, help="longest completion of any arm")
    parser.add_argument("--rows", type=int, default=24, help="batches of prompts before they come again")
    parser.add_argument("--max-num-seqs", type=int, default=768, help="most sequences decoded together")
    parser.add_argument("--kv-tokens", type=int, default=1_800_000, help="key/value memory")
    parser.add_argument("--token-budget", type=int, default=16896, help="most tokens of a micro-batch")
    parser.add_argument("--minibatches", type=int, default=1, help="more than one makes proximal passes necessary")
    parser.add_argument("--cold", action="store_true", help="without the warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, prompts and sampling")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "async_gpu.json", help="where the record goes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options = Console(width=140), parse(arguments)
    record = Record("async_gpu", arguments)
    with tempfile.TemporaryDirectory() as scratch:
        results = asyncio.run(measure(options, Path(scratch), record, console))
    show(results, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
