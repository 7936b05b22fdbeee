"""What benchmarks share: arms in processes of their own, alternating repetitions, a record of the run, a table.

An arm is one system under one setting. It lives in its own process, so that no arm's threads, allocator or imports
touch another's, and stays loaded between its turns, so that arms can take turns within one run: on a shared machine
what disturbs one arm then disturbs its neighbour too. Standard library only at the top, because an arm may run under
an interpreter of its own.

Invariant that lives here:
 15. Bounded waits: every answer of an arm has a deadline; what exceeds it fails with the name of the arm.
"""

import asyncio
import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import select
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS_DIR = Path(__file__).resolve().parent / "results"
Message = dict[str, Any]
LEAVE_S = 10.0


class Arm:
    """A process that answers one JSON line on its standard output for each JSON line it is given."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path):
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )

    def ask(self, message: Message, deadline_s: float) -> Message:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self.answer(deadline_s)

    def answer(self, deadline_s: float) -> Message:
        from headway.errors import DeadlineExceeded

        assert self._process.stdout is not None
        # An arm writes a whole line at a time, so once something can be read, the line can.
        if not select.select([self._process.stdout], [], [], deadline_s)[0]:
            self.close()
            raise DeadlineExceeded(f"{self.name} did not answer within {deadline_s:.0f} s; its log is {self._log}")
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        return dict(json.loads(line))

    def _died(self) -> Exception:
        from headway.errors import WorkerDied

        self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return WorkerDied(f"{self.name} ended early ({lines[-1] if lines else 'silently'}); its log is {self._log}")

    def close(self) -> None:
        """The end of its standard input asks it to leave; what does not leave is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve_arm(load: Callable[[], tuple[Message, Callable[[Message], Message]]]) -> None:
    """The other end of `Arm`: load, say so, then answer until standard input ends."""
    # Libraries print to standard output; the answers leave by a private copy of it, and the rest goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ready, handle = load()
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=answers, flush=True)


def headway_logprobs(engine: Any) -> Callable[[list[list[int]], list[int]], list[list[float]]]:
    """An open embedded engine, asked for completions of given lengths: the log-prob of every token."""
    import numpy as np

    from headway.types import Completion, Request, RequestKey, Sampling

    runner, calls = asyncio.Runner(), itertools.count()
    runner.run(engine.open())

    async def complete(request: Request) -> list[float]:
        async for item in engine.generate(request):
            if isinstance(item, Completion):
                return list(item.logprobs.tolist())
        raise AssertionError(f"request {request.key} ended without a completion")

    async def complete_all(requests: list[Request]) -> list[list[float]]:
        return await asyncio.gather(*map(complete, requests))

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[float]]:
        call = next(calls)
        requests = [
            Request(RequestKey(group, 0, call), np.array(prompt, np.int32), Sampling(max_tokens=length), seed=0)
            for group, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return runner.run(complete_all(requests))

    return generate


def vllm_logprobs(llm: Any, prompts: list[list[int]], lengths: list[int]) -> list[list[float]]:
    """What vLLM samples for each prompt, to exactly its length: the log-prob of every token."""
    from vllm import SamplingParams

    wanted = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False, "flat_logprobs": True}
    sampling = [SamplingParams(max_tokens=length, **wanted) for length in lengths]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    found = [output.outputs[0].logprobs for output in outputs]
    # Flat, as vLLM hands them over the fastest: of each token first the one that was sampled.
    return [[flat.logprobs[start] for start in flat.start_indices] for flat in found]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Best is the largest: what the arm does when nobody disturbs it."""
    ordered = sorted(values)
    return {"best": ordered[-1], "median": statistics.median(ordered), "worst": ordered[0]}


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def gpu() -> Message:
    """The GPU's name and driver, where there is one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")[0]
        return dict(zip(("gpu", "driver"), found.split(", "), strict=False))
    return {}


def hardware() -> Message:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    return {
        **gpu(),
        "cpu": model,
        "cores": len(available_cores()),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def shown(argument: str) -> str:
    """An argument without the directories of the machine it was given on."""
    knob, equals, value = argument.rpartition("=")
    return knob + equals + (Path(value).name if value.startswith(os.sep) else value)


class Record:
    """What is known of a run besides its figures, from its first moment on."""

    def __init__(self, name: str, arguments: list[str]):
        self._started_s = time.monotonic()
        self.fields: Message = {
            "name": name,
            "command": shlex.join(["headway", "bench", name, *map(shown, arguments)]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "hardware": hardware(),
        }

    def write(self, out: Path, **fields: Any) -> None:
        wall_s = round(time.monotonic() - self._started_s, 1)
        load = [round(load, 2) for load in os.getloadavg()]
        out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.fields, "wall_s": wall_s, "load_average_at_end": load, **fields}, indent=1)
        out.write_text(text + "\n")
