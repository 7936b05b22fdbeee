"""Plays the scenarios of a run: begins it, does the harm, sees it recover or end and resumes it, and judges it."""

import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from system import HeadwayProcess, events_of, headway, run_inline, write_config

from chaos.faults import (
    INSIDE,
    MARK,
    SIGNALS,
    NotDone,
    harm,
    lost_worker,
    names_cause,
    processes_in,
    repair,
    small_disk,
    unused,
)
from chaos.scenario import BATCH_GROUPS, FAULTS_PER_RUN, NUM_STEPS, STEPS_PER_FAULT, Run, Scenario, has_one_outcome
from chaos.verdict import problems_of, problems_of_a_stop, problems_of_the_end
from headway.config import Config, load
from headway.record.events import Event
from headway.record.log import read
from headway.record.run import fold

TASK = """
import json, os, time
from pathlib import Path

HERE = Path(__file__).parent

def rows():
    return [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(5) for b in range(5)]

def held_out():
    return [{"prompt": f"{a}+{a}=", "answer": str(2 * a % 10), "is_held_out": True} for a in range(6)]

def verify(task, text):
    if "is_held_out" in task:
        (HERE / "evaluating").touch()
    if (HERE / "outage").exists():
        raise ConnectionError("the judge is away")
    time.sleep(float((HERE / "pace").read_text() or 0))
    try:
        if json.loads((HERE / "harm-now").read_text())["worker"] == "verifier":
            os.rename(HERE / "harm-now", HERE / "harm-done")
            return float("nan")
    except FileNotFoundError:
        pass
    return float(task["answer"] in text) + 0.01 * min(len(text), 9)
"""

_USUAL_S, _WAITING_S = 0.02, 1.0
"""How long a verifier takes: usually, and while the run shall not get further before the next fault."""
_LEFT_S = 30.0  # for the last processes of a run to go
_WELL_AFTER = 2  # versions that are trained after a fault


@dataclass(frozen=True)
class World:
    """What scenarios are played in."""

    home: Path
    models: dict[str, str]  # by kind of engine
    vocab_sizes: dict[str, int]
    health_s: float  # after which a silent worker counts as lost
    usual_deadline_s: float  # of any call but a vLLM run's
    digest: str = ""  # of the weights that every undisturbed run at η = 0 comes to
    ray_address: str = ""
    vllm_python: str = ""

    def deadline_s(self, run: Run) -> float:
        """Of any call; to start a vLLM server is one, and takes as long as to start several workers."""
        return self.usual_deadline_s * (3 if run.engine == "vllm" else 1)

    def recovery_s(self, run: Run) -> float:
        """How long a run may take to be well again, or to end."""
        return 60.0 + 4 * self.deadline_s(run)


@dataclass
class Verdict:
    scenario: Scenario
    problems: list[str] = field(default_factory=list)
    done: str = ""  # what was done to the run
    when: float = 0.0
    outcome: str = ""  # recovered; finished, before anybody noticed; or ended or killed, and resumed
    cause: str = ""
    seconds: float = 0.0
    lost: list[str] = field(default_factory=list)
    continued_s: list[float] = field(default_factory=list)  # from the fault to its requests running elsewhere
    where: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For the record, which is of no machine in particular."""
        runtime, engine, victim, fault = self.scenario.kind
        told = asdict(self.scenario.run) | {"number": self.scenario.number, "after": self.scenario.after}
        told |= {"runtime": runtime, "engine": engine, "victim": victim, "fault": fault, "passed": self.passed}
        told |= {
            "outcome": self.outcome,
            "cause": self._plain(self.cause),
            "problems": list(map(self._plain, self.problems)),
        }
        told |= {"seconds": round(self.seconds, 1), "lost": self.lost, "repeat": self.scenario.command}
        return told | {"continued_s": [round(seconds, 3) for seconds in self.continued_s]}

    def _plain(self, sentence: str) -> str:
        return sentence.replace(self.where, "RUN") if self.where else sentence


def sections(run: Run, world: World, directory: Path) -> dict[str, dict[str, Any]]:
    task = directory / "task.py"
    held_out = f"{task}:held_out" if run.evaluates else ""
    engine: dict[str, Any] = {"count": run.engines, "kv_on_swap": run.kv_on_swap, "chunk_tokens": 4}
    if run.engine == "vllm":
        from vllm_servers import ARGS

        engine |= {"kind": "vllm", "vllm_python": world.vllm_python, "vllm_args": ARGS}
        engine |= {"max_num_seqs": 8, "kv_tokens": 4096, "max_context": 64}
    found: dict[str, dict[str, Any]] = {
        "run": {
            "dir": str(directory / "disk" / "run"),
            "steps": NUM_STEPS,
            "runtime": run.runtime,
            "deterministic": run.engine != "vllm",
            "deadline_s": world.deadline_s(run),
        },
        "task": {"train": f"{task}:rows", "eval": held_out, "verifier": f"{task}:verify"},
        "sampling": {"max_tokens": 24},
        "rollout": {"group_size": 3, "workers": run.rollouts},
        "engine": engine,
        "supervise": {"health_s": world.health_s, "backoff_s": 0.1, "max_failures": 8},
        "staleness": {"max_staleness": run.eta},
        "trainer": {"batch_groups": BATCH_GROUPS, "ranks": run.ranks, "token_budget": 256, "threads": 1},
        "weights": {"transport": run.transport},
        "checkpoint": {"every": run.checkpoint_every},
        "evaluate": {"every": 3 if run.evaluates else 0},
        "metrics": {"tensorboard": False, "stats_every_s": 0.2},
    }
    if run.runtime == "ray":
        from ray_cluster import PLACES

        places = {kind: PLACES[kind] for kind in ("engine", "trainer", "rollout", "reward")}
        found["ray"] = {"address": world.ray_address, **places}
    return found


def undisturbed_digest(home: Path, model: str) -> str:
    """Of the weights that a run comes to at η = 0, whatever its engines and workers."""
    home.mkdir()
    (home / "task.py").write_text(TASK)
    (home / "pace").write_text("0")
    plain = Run(0, 0, "inline", "embedded", 0, 1, 1, 1, "auto", "recompute", 50, False, False)
    config = load(write_config(home, model, **sections(plain, World(home, {}, {}, 30.0, 600.0), home)))
    run_inline(config)
    return fold(events_of(config)).digests[NUM_STEPS]


def is_down(worker: str, events: list[Event]) -> bool:
    """Whether a worker was lost and is not back."""
    fates = [event.kind for event in events if getattr(event, "worker", None) == worker]
    return bool(fates) and fates[-1] == "worker_lost"


class Play:
    """One run, and the scenarios that befall it."""

    def __init__(self, scenarios: list[Scenario], world: World) -> None:
        self.scenarios, self.world, self.run = scenarios, world, scenarios[0].run
        self.directory = world.home / f"{scenarios[0].number:04d}"
        self.directory.mkdir()
        (self.directory / "task.py").write_text(TASK)
        (self.directory / "chaos").touch()  # whereby those who can harm themselves know that they may
        # Short: with a longer name, the sockets would be made elsewhere.
        self.scratch = world.home / f"t{scenarios[0].number:04d}"
        self.scratch.mkdir()
        self._shared_memory = set(os.listdir("/dev/shm"))
        self.pace(_USUAL_S)
        self.path = write_config(self.directory, world.models[self.run.engine], **self._sections())
        self.config: Config = load(self.path)
        self.run_directory = Path(self.config.run.dir)
        self.process: HeadwayProcess | None = None

    def _sections(self) -> dict[str, dict[str, Any]]:
        return sections(self.run, self.world, self.directory)

    def pace(self, seconds: float) -> None:
        (self.directory / "pace.new").write_text(f"{seconds}")
        (self.directory / "pace.new").rename(self.directory / "pace")

    def verdicts(self, tell: Callable[[Verdict], None]) -> list[Scenario]:
        """Play one scenario after the other, and the run to its end; those not played, if it came to one before."""
        last = Verdict(self.scenarios[0])
        with ExitStack() as stack:
            if self.run.has_small_disk:
                stack.enter_context(small_disk(self.directory / "disk"))
            else:
                (self.directory / "disk").mkdir()
            stack.callback(self._leave)
            for turn, scenario in enumerate(self.scenarios):
                started, first = time.monotonic(), len(self.events())
                last = Verdict(scenario, where=str(self.directory))
                is_last = turn == len(self.scenarios) - 1
                try:
                    self._play(scenario, last, first)
                    if last.passed and last.outcome != "finished" and is_last:
                        self._to_the_end(last, first)
                except AssertionError as error:
                    last.problems.append(str(error))
                if not last.passed:
                    self._leave()
                    self.left_behind()
                    self._keep()
                last.seconds = time.monotonic() - started
                tell(last)
                if not last.passed or last.outcome == "finished":
                    return self.scenarios[turn + 1 :]
        return []

    def _leave(self) -> None:
        if self.process is not None:
            self.process.__exit__()
            self.process = None

    def _keep(self) -> None:
        """What lies on a disk that is about to go, for a later look."""
        if self.run.has_small_disk and self.run_directory.exists():
            shutil.copytree(self.run_directory, self.directory / "run")

    # One scenario

    def _play(self, scenario: Scenario, verdict: Verdict, first: int) -> None:
        if self.process is None:
            self._start()
            is_new = True
        else:
            is_new = False
        try:
            if scenario.moment == "resuming" or (scenario.moment == "starting" and not is_new):
                self._await_moment(first, scenario)
                self._leave()
                verdict.problems += self.left_behind()
                self._start()
            elif scenario.moment != "starting":
                self._await_moment(first, scenario)
            if scenario.moment == "ending" and scenario.is_last:
                self.pace(0)
            # One that was lost already is not lost again when a fault hits it on its way out, or back.
            was_down = is_down(lost_worker(scenario), self.events())
            verdict.when = time.time()
            verdict.done = harm(scenario, self.directory, self.run_directory, self._alive, self.world.health_s)
        except NotDone:
            raise AssertionError(f"the run was over before the fault:\n{tail(self._output)}") from None
        before = fold(self.events()).num_trained
        ended = not self._await_recovery(scenario, first, before, not was_down)
        repair(scenario, self.run_directory)
        self._judge(verdict, first)
        if ended:
            self._judge_end(verdict)
            verdict.problems += self.left_behind()
        if ended and verdict.passed and verdict.outcome != "finished":
            self._start()
            before = fold(self.events()).num_trained
            if not self._await_recovery(scenario, len(self.events()), before, noticed=False) and self._code:
                verdict.problems.append(f"the resumed run ended ({self._code}):\n{tail(self._output)}")
            self._judge(verdict, first)
            verdict.outcome = f"{verdict.outcome}, resumed"

    def _start(self) -> None:
        self._leave()
        path = os.pathsep.join([str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
        # When it ended before its first event there is nothing to resume.
        arguments = ["--resume"] if self.events() else []
        env = {"PYTHONPATH": path, "TMPDIR": str(self.scratch), MARK: str(self.directory)}
        self.process = HeadwayProcess(
            "train", self.path, *arguments, run=self.run_directory, cwd=self.directory, env=env
        )

    def _alive(self) -> bool:
        assert self.process is not None
        return self.process.process.poll() is None

    @property
    def _code(self) -> int | None:
        assert self.process is not None
        return self.process.process.poll()

    @property
    def _output(self) -> str:
        assert self.process is not None
        return self.process.output

    def events(self) -> list[Event]:
        path = self.run_directory / "events.jsonl"
        return read(path) if path.exists() else []

    def _changes(self, seconds: float, what: str, every_s: float = 0.05) -> Iterator[list[Event]]:
        """The log's events whenever it has grown, until the run ends."""
        assert self.process is not None
        deadline, size = time.monotonic() + seconds, -1
        while self._alive():
            path = self.process.events_path
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                size = found
                self.process.descendants()
                yield self.events()
            assert time.monotonic() < deadline, f"no {what} within {seconds:g} s:\n{tail(self._output)}"
            time.sleep(every_s)

    def _await_moment(self, first: int, scenario: Scenario) -> None:
        """A number of events after the last fault; at the beginning of a run, while it is still starting perhaps."""
        for events in self._changes(self.world.recovery_s(self.run), "moment for the fault", 0.005):
            if sum(event.kind != "stats" for event in events[first:]) >= scenario.after and events:
                time.sleep(scenario.delay_s)
                return
        raise NotDone

    def _await_recovery(self, scenario: Scenario, first: int, before: int, noticed: bool = True) -> bool:
        """Until the run has noticed and trains again; False if it ended instead."""
        victim = lost_worker(scenario) if noticed else ""
        share = STEPS_PER_FAULT * (scenario.number % FAULTS_PER_RUN + 1)
        for events in self._changes(self.world.recovery_s(self.run), f"recovery after {scenario.name}"):
            version = fold(events).num_trained
            self.pace(_WAITING_S if version > share - 10 else _USUAL_S)
            has_noticed = not victim or any(
                event.kind == "worker_lost" and event.worker == victim for event in events[first:]
            )
            if has_noticed and version >= before + _WELL_AFTER:
                return True
        return False

    # Judgement

    def _judge(self, verdict: Verdict, first: int) -> None:
        """What the log and the files say now."""
        events = self.events()
        verdict.lost = sorted({event.worker for event in events[first:] if event.kind == "worker_lost"})
        if verdict.scenario.victim in ("engine", "server"):
            moments = [event.time for event in events[first:] if event.kind == "retried"]
            verdict.continued_s = [moment - verdict.when for moment in moments if moment > verdict.when]
        verdict.outcome = verdict.outcome or "recovered"
        if events:
            vocab_size = self.world.vocab_sizes[self.run.engine]
            verdict.problems += problems_of(self.config, events, self.run_directory, vocab_size)
        if "Traceback" in self._output:
            verdict.problems.append(f"a stack trace is for bugs:\n{tail(self._output, 40)}")

    def _judge_end(self, verdict: Verdict) -> None:
        """A run that a fault has ended says why; one whose controller was killed cannot."""
        assert self.process is not None
        code, scenario = self.process.process.wait(), verdict.scenario
        if code < 0:
            verdict.outcome = "killed"
            if scenario.victim != "controller" and "killed controller" not in verdict.done:
                verdict.problems.append(f"the controller ended by signal {-code}")
            return
        if code == 0:
            # It went on so well without the victim that it was done before it noticed.
            verdict.outcome = "finished"
            verdict.problems += self._problems_of_the_end()
            return
        verdict.outcome, verdict.cause = "ended", self._cause()
        lasting = self._lasting(scenario)
        if not any(names_cause(one, verdict.cause) for one in (scenario, *lasting)):
            verdict.problems.append(f"it ended ({code}) without naming the cause:\n{tail(self._output)}")

        if scenario.fault in SIGNALS:
            verdict.problems += problems_of_a_stop(self.events(), self.run_directory, scenario.draw % 3 == 0)

    def _problems_of_the_end(self) -> list[str]:
        found = problems_of_the_end(self.config, self.events(), self._digest)
        report = headway("report", self.run_directory)
        if report.returncode:
            found.append(f"headway report cannot read what is left:\n{tail(report.stdout + report.stderr)}")
        return found

    def _cause(self) -> str:
        lines = [line for line in self._output.splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else ""

    def _lasting(self, scenario: Scenario) -> list[Scenario]:
        """Earlier faults that may end the run only now: a disk stays full for a while, and an engine that was not
        there yet receives its first weights, and spoils them, when it is."""
        before = [one for one in self.scenarios if one.number < scenario.number]
        return [one for one in before if one.fault == "full" or (one.victim, one.fault) == ("weights", "corrupt")]

    def _to_the_end(self, verdict: Verdict, first: int) -> None:
        code = self._await_end()
        if code != 0 and any(names_cause(one, self._cause()) for one in self._lasting(verdict.scenario)):
            self._start()
            code = self._await_end()
        if code != 0:
            verdict.problems.append(f"the run did not come to its end:\n{tail(self._output)}")
        self._judge(verdict, first)
        verdict.problems += self.left_behind()
        verdict.problems += self._problems_of_the_end()

    def _await_end(self) -> int:
        assert self.process is not None
        self.pace(0)
        for _ in self._changes(self.world.recovery_s(self.run) + NUM_STEPS, "end"):
            pass
        return self.process.process.wait()

    @property
    def _digest(self) -> str:
        """Of the weights that this run must come to, if there is one outcome."""
        return self.world.digest if has_one_outcome(self.scenarios) else ""

    def left_behind(self) -> list[str]:
        """What is still there a while after the run has ended: processes, which are killed, temporary files, memory."""
        deadline = time.monotonic() + _LEFT_S
        while (left := self._left()) != ([], []) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes, files = left
        found = [f"left behind: {file}" for file in files]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                found.append(f"left behind: {' '.join(process.cmdline())[:200]}")
                process.kill()
        return found

    def _left(self) -> tuple[list[psutil.Process], list[str]]:
        segments = sorted(set(os.listdir("/dev/shm")) - self._shared_memory) if self.run.runtime == "local" else []
        if self.run.engine != "vllm":  # semaphores are a server's, of the run that is played at the same time
            segments = [name for name in segments if not name.startswith("sem.")]
        # A process killed before it had a worker leaves its directory of sockets to the next incarnation of the run.
        was_killed = self.process is None or self._code == -signal.SIGKILL
        # vLLM's compiled kernels stay for the next server.
        scratch = [str(path) for path in self.scratch.iterdir() if not path.name.startswith("torchinductor_")]
        files = [*([] if was_killed else scratch), *unused(segments)]
        return processes_in(self.directory), files


def tail(output: str, lines: int = 12) -> str:
    return "\n".join(f"    {line}" for line in output.strip().splitlines()[-lines:])


def spread(seconds: list[float]) -> str:
    """Median and maximum."""
    return f"median {statistics.median(seconds):.3f} s, max {max(seconds):.3f} s" if seconds else "none"
