"""`make chaos`, or `python -m chaos`: plays scenarios, prints a table, keeps a record. Exit code 1 if any failed."""

import argparse
import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chaos.faults import INSIDE, can_mount
from chaos.play import Play, Verdict, World, spread, undisturbed_digest
from chaos.scenario import LOTS, Scenario, draw, draw_runs, has_one_outcome

ROOT = Path(__file__).resolve().parents[2]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many scenarios")
    parser.add_argument("--seed", type=int, default=0, help="what everything is drawn from")
    parser.add_argument("--only", default="", help="only those named with all these words: 'ray engine kill | outage'")
    parser.add_argument("--first", type=int, default=0, help="leave out scenarios before this number")
    parser.add_argument("--scenario", type=int, help="play the one of this number, after those before it in its run")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side; Ray's and vLLM's take turns")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no further run after so long; 0 begins all")
    parser.add_argument("--out", type=Path, help="where the record goes, as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the directories of all runs, not only failed ones")
    parser.add_argument("--health", type=float, default=0.0, help="seconds of silence that are a loss; 0 measures")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds that any call may take; 0 measures")
    return parser.parse_args()


def runnable() -> set[tuple[str, str]]:
    """The kinds of runs that this machine can do."""
    found = set(LOTS)
    if importlib.util.find_spec("ray") is None:
        say("Ray is not installed: no scenarios on it")
        found -= {lot for lot in found if lot[0] == "ray"}
    if not os.environ.get("HEADWAY_VLLM_PYTHON"):
        say("HEADWAY_VLLM_PYTHON names no interpreter: no scenarios on vLLM")
        found -= {lot for lot in found if lot[1] == "vllm"}
    return found


def make_world(home: Path, runs: list[list[Scenario]], told: argparse.Namespace) -> World:
    from conftest import build_variant

    from headway.model.loading import load_config

    models = {"embedded": str(home / "model")}
    build_variant(home / "model", "llama")
    if any(run[0].run.engine == "vllm" for run in runs):
        models["vllm"] = str(home / "model-vllm")
        build_variant(home / "model-vllm", "qwen3-tied")
    vocab_sizes = {kind: load_config(path).vocab_size for kind, path in models.items()}
    digest = undisturbed_digest(home / "undisturbed", models["embedded"]) if any(map(has_one_outcome, runs)) else ""
    started = time.monotonic()
    os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", "import headway.training.trainer")
    # Everything here waits for imports: how long they take now says how long silence has to be to mean something.
    pace_s = time.monotonic() - started
    health_s = told.health or max(3.0, pace_s)
    deadline_s = told.deadline or max(30.0, 12 * pace_s)
    address = ""
    if any(run[0].run.runtime == "ray" for run in runs):
        # Before the cluster starts: its workers get their environment from its nodes.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
        import ray_cluster

        address = ray_cluster.cluster().address
    say(f"a silent worker is lost after {health_s:.1f} s, a call after {deadline_s:.0f} s; runs lie in {home}")
    python = os.environ.get("HEADWAY_VLLM_PYTHON", "")
    return World(home, models, vocab_sizes, health_s, deadline_s, digest, address, python)


def make_record(told: argparse.Namespace) -> Any:
    """As benchmarks keep it."""
    sys.path.append(str(ROOT / "bench"))
    from common import Record

    record = Record("chaos", [])
    only = f" --only {shlex.quote(told.only)}" if told.only else ""
    record.fields["command"] = f'make chaos CHAOS="--seed {told.seed} --count {told.count}{only}"'
    return record


class Runner:
    """Plays runs side by side and says how far it is."""

    def __init__(self, world: World, total: int, told: argparse.Namespace) -> None:
        self._world, self._total, self._keep, self._out = world, total, told.keep, told.out
        self._record = make_record(told) if told.out else None
        self._end = time.monotonic() + 60 * told.minutes if told.minutes else float("inf")
        self._one_at_a_time = {"ray": threading.Lock(), "vllm": threading.Lock()}
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self.verdicts: list[Verdict] = []

    def play(self, scenarios: list[Scenario]) -> None:
        run = scenarios[0].run
        with ExitStack() as turn:
            for kind in (run.runtime, run.engine):
                if kind in self._one_at_a_time:
                    turn.enter_context(self._one_at_a_time[kind])
            while scenarios and time.monotonic() < self._end:
                play = Play(scenarios, self._world)
                scenarios = play.verdicts(self._tell)
                failed = {verdict.where for verdict in self.verdicts if not verdict.passed}
                if not self._keep and str(play.directory) not in failed:
                    shutil.rmtree(play.directory, ignore_errors=True)

    def _tell(self, verdict: Verdict) -> None:
        with self._lock:
            self.verdicts.append(verdict)
            num, scenario = len(self.verdicts), verdict.scenario
            left_s = (time.monotonic() - self._started) / num * (self._total - num)
            lost = f"lost {' '.join(verdict.lost)}" if verdict.lost else ""
            how = ", ".join(filter(None, [verdict.outcome, verdict.cause[:100], lost]))
            word = "ok    " if verdict.passed else "FAILED"
            what = f"{scenario.number}, {scenario.name}, {verdict.seconds:.1f} s: {how}"
            say(f"[{num:3d}/{self._total}] {word} {what}; {left_s / 60:.0f} min left")
            for problem in verdict.problems:
                say(f"    {problem}")
            if not verdict.passed:
                say(f"    {verdict.done}; what it left: {verdict.where}\n    to repeat it: {scenario.command}")
            if self._record is not None:
                limits = {"health_s": round(self._world.health_s, 1), "deadline_s": self._world.usual_deadline_s}
                self._record.write(self._out, settings=limits, repetitions=[one.to_dict() for one in self.verdicts])


def table(verdicts: list[Verdict]) -> str:
    """A line for each kind of scenario."""
    rows: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        rows[verdict.scenario.kind].append(verdict)
    head = f"{'runtime':8}{'engine':10}{'process':12}{'fault':11}"
    lines = [f"{head}{'played':>7}{'passed':>7}{'recovered':>10}{'resumed':>8}"]
    for kind in sorted(rows):
        own = rows[kind]
        passed, recovered = sum(one.passed for one in own), sum(one.outcome in ("recovered", "finished") for one in own)
        resumed = sum("resumed" in one.outcome for one in own)
        runtime, engine, victim, fault = kind
        lines.append(f"{runtime:8}{engine:10}{victim:12}{fault:11}{len(own):7}{passed:7}{recovered:10}{resumed:8}")
    for what, fitting in (
        ("with another engine at hand", [one for one in verdicts if one.scenario.run.engines > 1]),
        ("with none, until it is back", [one for one in verdicts if one.scenario.run.engines == 1]),
    ):
        for fault in sorted({one.scenario.fault for one in fitting if one.continued_s}):
            seconds = [some for one in fitting if one.scenario.fault == fault for some in one.continued_s]
            how = f"from the {fault} of an engine to its requests running elsewhere, {what}"
            lines.append(f"{how} ({len(seconds)}): {spread(seconds)}")
    return "\n".join(lines)


def main() -> int:
    told = arguments()
    if told.scenario is None:
        runs = draw_runs(told.seed, told.count, runnable(), told.only, told.first)
    else:
        runs = [draw(told.seed, told.scenario)]
        if (runs[0][0].run.runtime, runs[0][0].run.engine) not in runnable():
            return 1
    home = Path(tempfile.mkdtemp(prefix="hc-", dir="/tmp"))
    if not can_mount(home):
        say("only root can make a small disk: none gets full")
        runs = [run for run in runs if not run[0].run.has_small_disk]
    world = make_world(home, runs, told)
    runner = Runner(world, sum(map(len, runs)), told)
    with ThreadPoolExecutor(told.jobs) as pool:
        for done in [pool.submit(runner.play, run) for run in runs]:
            done.result()
    say(table(runner.verdicts))
    failed = [verdict for verdict in runner.verdicts if not verdict.passed]
    for verdict in failed:
        say(f"failed: {verdict.scenario.name}; to repeat it: {verdict.scenario.command}")
    say(f"make chaos: {len(runner.verdicts) - len(failed)} of {len(runner.verdicts)} scenarios passed")
    if not failed and not told.keep:
        shutil.rmtree(home, ignore_errors=True)
    return 1 if failed or not runner.verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
