"""From the death of an engine to its requests running elsewhere: median and worst over many deaths of real processes.

Engines that take the time of real ones, a rollout worker and a stand-in for the reward pool live in processes of their
own. In turn each engine is killed (or stopped, as if it hung) while requests run on all of them; the clock runs until
every request it had was sent to another. A killed engine is noticed by the rollout worker itself. A stopped one is
noticed by the look that it does not answer, so its time is that of `--health-s` and little more.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from common import RESULTS_DIR, Message, Record

from headway.config import RolloutSection
from headway.engine.fake import FakeEngine
from headway.types import Admission, Prompt, Sampling, Verdict

if TYPE_CHECKING:
    from headway.rollout.reward_pool import RewardPool
    from headway.rollout.worker import RolloutWorker
    from headway.runtime.local import LocalRuntime

ALPHABET = "0123456789+-=() \n"
MEAN_TOKENS, SECONDS_PER_TOKEN, DEADLINE_S = 200.0, 0.02, 60.0
_SLACK = 1


class MortalEngine(FakeEngine):
    """Tells whom to kill."""

    async def pid(self) -> int:
        return os.getpid()


class StandInVerifier:
    """In place of the reward pool: every text is right."""

    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Verdict:
        return Verdict(1.0, "", 0.0)


class Scene:
    """Engines by name, each with its life, and the worker that asks them."""

    def __init__(self, runtime: "LocalRuntime", options: argparse.Namespace) -> None:
        self._runtime, self._options = runtime, options
        self.engines: dict[str, MortalEngine] = {}
        self.lives: dict[str, int] = {"reward": 0}
        self.worker: RolloutWorker
        self._pool: RewardPool

    async def open(self, model: str) -> None:
        from headway.rollout.reward_pool import RewardPool
        from headway.rollout.worker import RolloutWorker

        self._pool = cast(RewardPool, await self._runtime.start("reward", StandInVerifier))
        self.worker = await self._runtime.start(
            "rollout-0", RolloutWorker, model, RolloutSection(), 0, len(ALPHABET), 4096, 4096, DEADLINE_S
        )
        for number in range(self._options.engines):
            await self.start(f"engine-{number}")

    async def start(self, name: str) -> None:
        arguments = (MEAN_TOKENS, SECONDS_PER_TOKEN, len(ALPHABET))
        self.engines[name] = await self._runtime.start(name, MortalEngine, *arguments)
        self.lives[name] = self.lives.get(name, -1) + 1
        await self.connect()

    async def connect(self) -> None:
        await self.worker.connect(cast(Any, self.engines), self.lives, (), self._pool)

    async def end(self, name: str, how: str) -> float:
        """Let an engine die; the seconds until its requests were sent to others, which take in what they are sent."""
        pid = await self.engines[name].pid()
        await self.worker.stats()
        had, moved = (await self.engines[name].stats()).running, 0
        started = time.perf_counter()
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":
            await self._notice(name)
        # One that ended between the look and the kill has nowhere to go.
        while moved < had - _SLACK:
            if time.perf_counter() - started > DEADLINE_S:
                raise AssertionError(f"of {had} requests of {name} only {moved} went on elsewhere")
            moved += sum(item.engine == name for item in (await self.worker.stats()).retries)
        seconds = time.perf_counter() - started
        await self._runtime.stop(name)
        return seconds

    async def _notice(self, name: str) -> None:
        """As the controller does: a health check that is not answered, then all workers know."""
        try:
            async with asyncio.timeout(self._options.health_s):
                await self.engines[name].stats()
        except TimeoutError:
            self.engines.pop(name)
            await self.connect()


def admissions() -> Any:
    tokens = np.arange(3, 13, dtype=np.int32)
    sampling = Sampling(max_tokens=100_000, stop_tokens=(1,))
    number = 0
    while True:
        yield Admission(number, Prompt(number, tokens, "a problem", {}), 4, 0, 0, sampling)
        number += 1


@contextlib.asynccontextmanager
async def generating(scene: Scene, num_groups: int) -> AsyncIterator[None]:
    """A fixed number of groups at any time."""
    source = admissions()

    async def forever() -> None:
        while True:
            await scene.worker.run(next(source))

    tasks = [asyncio.create_task(forever()) for _ in range(num_groups)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    from headway.model.tokenizer import build_character_tokenizer
    from headway.runtime.local import LocalRuntime

    model = str(directory / "tokenizer")
    build_character_tokenizer(ALPHABET).save_pretrained(model)
    runtime = LocalRuntime(directory / "logs", DEADLINE_S)
    found: dict[str, list[float]] = {"killed": [], "stopped": []}
    try:
        scene = Scene(runtime, options)
        await scene.open(model)
        async with generating(scene, options.groups):
            for how, num in (("killed", options.kills), ("stopped", options.stops)):
                for number in range(num):
                    await asyncio.sleep(1.0)
                    name = f"engine-{number % options.engines}"
                    found[how].append(await scene.end(name, how))
                    await scene.start(name)
    finally:
        await runtime.close()
    return found


def summarise(seconds: list[float]) -> Message:
    if not seconds:
        return {"num": 0}
    return {"num": len(seconds), "median_s": statistics.median(seconds), "max_s": max(seconds)}


def main(arguments: list[str]) -> None:
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="headway bench failover", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=3, help="engines, each a process")
    parser.add_argument("--groups", type=int, default=24, help="groups of four that run at any time")
    parser.add_argument("--kills", type=int, default=20, help="engines that are killed, one after the other")
    parser.add_argument("--stops", type=int, default=5, help="engines that are stopped, one after the other")
    parser.add_argument("--health-s", type=float, default=2.0, help="longest wait for the answer to a look")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "failover.json", help="where the record goes")
    options = parser.parse_args(arguments)
    console, record = Console(), Record("failover", arguments)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        found = asyncio.run(measure(options, Path(directory)))
    figures = {how: summarise(seconds) for how, seconds in found.items()}
    settings = {name: getattr(options, name) for name in ("engines", "groups", "health_s")}
    record.write(options.out, settings=settings, figures=figures, repetitions=found)
    for how, figure in figures.items():
        if figure["num"]:
            times = f"median {figure['median_s'] * 1e3:.0f} ms, worst {figure['max_s'] * 1e3:.0f} ms"
            console.print(f"{figure['num']} engines {how}: {times}", highlight=False)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    # Workers are started by the name of their class, and nobody else can import a class of `__main__`.
    import failover

    failover.main(sys.argv[1:])
