"""Plays scenarios in a real run: begins it, does the harm, follows it to its end, resumes it if need be, judges it."""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from system import HeadwayProcess, run_inline, write_config

from chaos.faults import INSIDE, NotDone, harm, names_cause, processes_in, repair, small_disk, write_plan
from chaos.scenario import BATCH_GROUPS, NUM_STEPS, Scenario
from chaos.verdict import problems_of, problems_of_the_end
from headway.config import Config, load
from headway.events import Event
from headway.ledger import fold

TASK = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def rows():
    return [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(5) for b in range(5)]

def verify(task, text):
    time.sleep(0.01)
    if (HERE / "harm-now").exists() and '"verifier"' in (HERE / "harm.json").read_text():
        os.rename(HERE / "harm-now", HERE / "harm-done")
        return float("nan")
    return float(task["answer"] in text) + 0.01 * min(len(text), 9)
"""

_PROCESS_S = 30.0  # for the last processes of a run to go


@dataclass(frozen=True)
class World:
    """What scenarios are played in."""

    home: Path
    models: dict[str, str]  # by kind of engine
    vocab_sizes: dict[str, int]
    health_s: float  # after which a silent worker counts as lost
    deadline_s: float  # of any call
    digest: str = ""  # of the weights that every undisturbed run at η = 0 comes to
    ray_address: str = ""
    vllm_python: str = ""

    @property
    def run_s(self) -> float:
        """How long a run may go on after a fault."""
        return 60.0 + 6 * self.deadline_s


@dataclass
class Verdict:
    scenario: Scenario
    problems: list[str] = field(default_factory=list)
    done: str = ""  # what was done to the run
    outcome: str = ""  # finished, or ended by itself or by force and then resumed
    cause: str = ""
    seconds: float = 0.0
    lost: list[str] = field(default_factory=list)
    continued_s: list[float] = field(default_factory=list)
    where: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed, "repeat": self.scenario.command}


def sections(scenario: Scenario, world: World, directory: Path) -> dict[str, dict[str, Any]]:
    task = directory / "task.py"
    is_vllm = scenario.engine == "vllm"
    engine: dict[str, Any] = {"count": scenario.engines, "kv_on_swap": scenario.kv_on_swap, "chunk_tokens": 4}
    if is_vllm:
        from vllm_servers import ARGS

        own = {"kind": "vllm", "vllm_python": world.vllm_python, "vllm_args": ARGS}
        engine |= own | {"max_num_seqs": 8, "kv_tokens": 4096, "max_context": 64}
    found: dict[str, dict[str, Any]] = {
        "run": {
            "dir": str(directory / "disk" / "run"),
            "steps": 100_000 if is_vllm else NUM_STEPS,
            "runtime": scenario.runtime,
            "deterministic": not is_vllm,
            "deadline_s": world.deadline_s,
        },
        "task": {"train": f"{task}:rows", "eval": "", "verifier": f"{task}:verify"},
        "sampling": {"max_tokens": 24},
        "rollout": {"group_size": 3, "workers": scenario.rollouts},
        "engine": engine,
        "supervise": {"health_s": world.health_s, "backoff_s": 0.1},
        "staleness": {"max_staleness": scenario.eta},
        "trainer": {"batch_groups": BATCH_GROUPS, "ranks": scenario.ranks, "token_budget": 256, "threads": 1},
        "weights": {"transport": scenario.transport},
        "checkpoint": {"every": scenario.checkpoint_every},
        "metrics": {"tensorboard": False, "stats_every_s": 0.2},
    }
    if scenario.runtime == "ray":
        from ray_cluster import PLACES

        places = {kind: PLACES[kind] for kind in ("engine", "trainer", "rollout", "reward")}
        found["ray"] = {"address": world.ray_address, **places}
    return found


def expected_digest(home: Path, model: str) -> str:
    """Of the weights that an undisturbed run comes to at η = 0, whatever its engines and workers."""
    from chaos.scenario import draw

    home.mkdir()
    (home / "task.py").write_text(TASK)
    world = World(home, {}, {}, 30.0, 600.0)
    plain = next(one for one in map(lambda number: draw(0, number), range(99)) if one.kind[:2] == ("local", "embedded"))
    values = sections(plain, world, home)
    values["run"] |= {"runtime": "inline"}
    values["staleness"] |= {"max_staleness": 0}
    values["engine"] |= {"count": 1}
    values["trainer"] |= {"ranks": 1}
    config = load(write_config(home, model, **values))
    run_inline(config)
    from system import events_of

    return fold(events_of(config)).digests[NUM_STEPS]


class Play:
    """One run, and the scenarios that befall it."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.first, self.world = scenario, world
        self.directory = world.home / f"{scenario.number:04d}"
        self.directory.mkdir()
        (self.directory / "task.py").write_text(TASK)
        self.path = write_config(
            self.directory, world.models[scenario.engine], **sections(scenario, world, self.directory)
        )
        self.config: Config = load(self.path)
        self.run_directory = Path(self.config.run.dir)

    def start(self, *arguments: str) -> HeadwayProcess:
        # The environment's own path comes after: what harms from inside must be found first.
        path = os.pathsep.join([str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
        return HeadwayProcess(
            "train",
            self.path,
            *arguments,
            run=self.run_directory,
            cwd=self.directory,
            env={"PYTHONPATH": path},
        )

    def play(self) -> Verdict:
        """One scenario, from the beginning of a run to its end."""
        scenario, started = self.first, time.monotonic()
        verdict = Verdict(scenario, where=str(self.directory))
        write_plan(scenario, self.directory)
        with ExitStack() as stack:
            if scenario.victim == "disk":
                stack.enter_context(small_disk(self.directory / "disk"))
            else:
                self.run_directory.parent.mkdir()
            try:
                self._play(scenario, verdict)
            except AssertionError as error:
                verdict.problems.append(str(error))
            verdict.problems += self.left_behind()
        verdict.seconds = time.monotonic() - started
        return verdict

    def _play(self, scenario: Scenario, verdict: Verdict) -> None:
        with self.start() as run:
            try:
                await_moment(run, scenario)
                verdict.done = harm(scenario, self.directory, self.run_directory, alive(run), self.world.health_s)
            except NotDone:
                verdict.problems.append(f"the run was over before the fault:\n{tail(run.output)}")
            code = self.end_of(run)
            self.judge(run, verdict, code)
        if code != 0 and not verdict.problems:
            repair(scenario, self.run_directory)
            self._resume(verdict)

    def _resume(self, verdict: Verdict) -> None:
        # When it died before its first event there is nothing to resume.
        arguments = ["--resume"] if self.events() else []
        with self.start(*arguments) as run:
            code = self.end_of(run)
            if code != 0:
                verdict.problems.append(f"the resumed run ended with {code}:\n{tail(run.output)}")
            self.judge(run, verdict, code)

    def events(self) -> list[Event]:
        from headway.events import read

        path = self.run_directory / "events.jsonl"
        return read(path) if path.exists() else []

    def end_of(self, run: HeadwayProcess) -> int:
        """Its exit code; a run that goes on for too long has failed by that."""
        deadline = time.monotonic() + self.world.run_s
        while run.process.poll() is None:
            run.descendants()
            assert time.monotonic() < deadline, f"it did not end within {self.world.run_s:g} s:\n{tail(run.output)}"
            time.sleep(0.02)
        return run.process.returncode

    def judge(self, run: HeadwayProcess, verdict: Verdict, code: int) -> None:
        """What the log and the files say, and how it ended."""
        scenario, events = verdict.scenario, self.events()
        verdict.lost = sorted({event["worker"] for event in events if event.kind == "worker_lost"})
        verdict.continued_s = [event["seconds"] for event in events if event.kind == "continued"]
        if events:
            verdict.problems += problems_of(
                self.config, events, self.run_directory, self.world.vocab_sizes[scenario.engine]
            )
        if "Traceback" in run.output:
            verdict.problems.append(f"a stack trace is for bugs:\n{tail(run.output)}")
        if code == 0:
            verdict.outcome = "resumed" if verdict.outcome else "finished"
            has_one_outcome = scenario.eta == 0 and scenario.engine == "embedded" and scenario.ranks == 1
            verdict.problems += problems_of_the_end(self.config, events, self.world.digest if has_one_outcome else "")
        elif code > 0:
            verdict.outcome, verdict.cause = "ended", run.output.strip().splitlines()[-1] if run.output.strip() else ""
            if not verdict.cause.startswith("error: ") or not names_cause(scenario, verdict.cause):
                verdict.problems.append(f"it ended without naming the cause:\n{tail(run.output)}")
        else:
            verdict.outcome = "killed"
            if scenario.victim not in ("controller", "record", "checkpoint"):
                verdict.problems.append(f"the controller ended by signal {-code}")

    def left_behind(self) -> list[str]:
        """Processes of the run that are still there after a while."""
        deadline = time.monotonic() + _PROCESS_S
        while left := processes_in(self.directory):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        found = []
        for process in left:
            with suppress(psutil.NoSuchProcess):
                found.append(f"left behind: {' '.join(process.cmdline())[:200]}")
                process.kill()
        return found


def alive(run: HeadwayProcess) -> Callable[[], bool]:
    return lambda: run.process.poll() is None


def await_moment(run: HeadwayProcess, scenario: Scenario) -> None:
    """Until the log has so many events, not counting looks."""
    size = -1
    while True:
        found = run.events_path.stat().st_size if run.events_path.exists() else 0
        if found != size:
            size = found
            run.descendants()
            if sum(event.kind != "stats" for event in run.events()) >= scenario.num_events:
                break
        if run.process.poll() is not None:
            raise NotDone
        time.sleep(0.002)
    time.sleep(scenario.delay_s)


def tail(output: str, lines: int = 12) -> str:
    return "\n".join(f"    {line}" for line in output.strip().splitlines()[-lines:])


def spread(seconds: list[float]) -> str:
    """Median and maximum."""
    return f"median {statistics.median(seconds):.3f} s, max {max(seconds):.3f} s" if seconds else "none"
