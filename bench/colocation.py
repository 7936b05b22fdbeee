"""An engine and a trainer on one GPU: what each keeps of its speed when the other works too, by arrangement.

Two processes, as `headway train` has them: one decodes a full batch without end, one trains the same batch again and
again. Each is measured alone, both together, and each alone again. A sum of the two shares above 1 is what sharing the
GPU at the same time gains over taking turns. Arrangements: time slicing, which is what two processes get by themselves,
and the multi-process service (MPS), plain, with the trainer below the engine in priority, and with limits on the
multiprocessors either may use.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common import RESULTS_DIR, Arm, Message, Record, serve_arm, versions
from shapes import SHAPES, LongTailed, model_directory, trained_groups, vocabulary_of

if TYPE_CHECKING:
    from rich.console import Console

LOAD_DEADLINE_S, RUN_DEADLINE_S = 240.0, 120.0
PROMPT_LENGTH = 512


def _share(percent: int) -> dict[str, str]:
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}


BELOW = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
ARRANGEMENTS: dict[str, tuple[bool, dict[str, str], dict[str, str]]] = {
    # whether under MPS, what the engine's environment has, what the trainer's has
    "time slicing": (False, {}, {}),
    "MPS": (True, {}, {}),
    "MPS, trainer below": (True, {}, BELOW),
    "MPS, trainer on 85%": (True, {}, _share(85)),
    "MPS, trainer on 70%": (True, {}, _share(70)),
    "MPS, trainer on 50%": (True, {}, _share(50)),
    "MPS, engine on 50%": (True, _share(50), {}),
    "MPS, engine on 30%, trainer on 70%": (True, _share(30), _share(70)),
}


@contextmanager
def service(needed: bool, directory: Path) -> Iterator[dict[str, str]]:
    """A daemon of its own, if one is needed, and the environment of its clients."""
    if not needed:
        yield {}
        return
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(directory / "log")}
    for place in places.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **places}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=30)
    try:
        yield places
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, timeout=30)


def load_engine(spec: Message) -> tuple[Message, Callable[[Message], Message]]:
    from swap import make_core, submit

    model = Path(spec["model"])
    options = argparse.Namespace(**spec, output_length=spec["longest"], dtype="bfloat16")
    core = make_core(options, model, spec["requests"] * (spec["prompt_length"] + spec["longest"]))
    submit(core, options, vocabulary_of(model), 0)
    while core.stats().num_generated < 64 * spec["requests"]:  # graphs are captured, kernels compiled
        core.step()

    def handle(message: Message) -> Message:
        before, started = core.stats().num_generated, time.perf_counter()
        while time.perf_counter() - started < message["seconds"]:
            core.step()
        tokens = core.stats().num_generated - before
        return {"per_s": tokens / (time.perf_counter() - started)}

    return {}, handle


def load_trainer(spec: Message) -> tuple[Message, Callable[[Message], Message]]:
    from headway.algorithm import AlgorithmSection
    from headway.config import ModelSection, TrainerSection
    from headway.training.trainer import Trainer
    from headway.types import Batch

    section = TrainerSection(device=spec["device"], token_budget=spec["token_budget"], lr=1e-6)
    model = ModelSection(path=spec["model"], dtype="bfloat16" if spec["device"] == "cuda" else "float32")
    trainer = Trainer(model, section, AlgorithmSection(), None)
    lengths = LongTailed(spec["mean"], spec["token_budget"] - PROMPT_LENGTH)
    groups = trained_groups(lengths.lengths(spec["groups"], 8), PROMPT_LENGTH, vocabulary_of(Path(spec["model"])))
    tokens = sum(group.num_sampled for group in groups)

    def step() -> None:
        report = trainer.train(Batch(trainer.version, tuple(groups)))
        assert not report.skipped, report.skipped

    step()

    def handle(message: Message) -> Message:
        started, num_steps = time.perf_counter(), 0
        while time.perf_counter() - started < message["seconds"]:
            step()
            num_steps += 1
        return {"per_s": num_steps * tokens / (time.perf_counter() - started)}

    return {"tokens": tokens}, handle


def arms_of(spec: Message, places: dict[str, str], extra: tuple[dict[str, str], dict[str, str]]) -> dict[str, Arm]:
    import json

    made = {}
    for name, environment in zip(("engine", "trainer"), extra, strict=True):
        command = [sys.executable, __file__, "--arm", json.dumps({**spec, "arm": name})]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        made[name] = Arm(name, command, {**places, **environment, **path}, Path(spec["logs"]) / f"{name}.log")
    return made


def measure(spec: Message, name: str, directory: Path) -> Message:
    under_mps, *extra = ARRANGEMENTS[name]
    with service(under_mps, directory / "mps") as places, ThreadPoolExecutor() as threads:
        arms = arms_of(spec, places, (extra[0], extra[1]))
        try:
            for arm in arms.values():
                arm.answer(LOAD_DEADLINE_S)

            def alone() -> dict[str, float]:
                return {k: arm.ask({"seconds": spec["seconds"]}, RUN_DEADLINE_S)["per_s"] for k, arm in arms.items()}

            before = alone()
            asked = {
                k: threads.submit(arm.ask, {"seconds": 2 * spec["seconds"]}, RUN_DEADLINE_S) for k, arm in arms.items()
            }
            together = {k: answer.result()["per_s"] for k, answer in asked.items()}
            after = alone()
        finally:
            for arm in arms.values():
                arm.close()
    shares = {k: together[k] / ((before[k] + after[k]) / 2) for k in arms}
    return {"alone": [before, after], "together": together, "shares": shares, "sum": sum(shares.values())}


def show(found: dict[str, Message], console: "Console") -> None:
    from rich.table import Table

    table = Table("arrangement", "engine keeps", "trainer keeps", "sum", "engine tokens/s", "trainer tokens/s")
    for name, item in found.items():
        shares, together = item["shares"], item["together"]
        table.add_row(
            name,
            f"{shares['engine']:.0%}",
            f"{shares['trainer']:.0%}",
            f"{item['sum']:.2f}",
            f"{together['engine']:,.0f}",
            f"{together['trainer']:,.0f}",
        )
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench colocation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="shape of the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--arrangements", nargs="+", choices=ARRANGEMENTS, default=list(ARRANGEMENTS))
    parser.add_argument("--requests", type=int, default=384, help="sequences decoded together")
    parser.add_argument("--prompt-length", type=int, default=PROMPT_LENGTH, help="tokens they begin with")
    parser.add_argument("--longest", type=int, default=5568, help="most tokens of a sequence")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 that are trained together")
    parser.add_argument("--mean", type=float, default=2048, help="mean length of what is trained")
    parser.add_argument("--token-budget", type=int, default=16896, help="most tokens of a micro-batch")
    parser.add_argument("--seconds", type=float, default=6, help="of each alone; twice that together")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "colocation.json", help="where the record goes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--arm"]:
        import json

        spec = json.loads(arguments[1])
        load = {"engine": load_engine, "trainer": load_trainer}[spec.pop("arm")]
        return serve_arm(lambda: load(spec))
    from rich.console import Console

    console, options, record = Console(), parse(arguments), Record("colocation", arguments)
    found: dict[str, Message] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = model_directory(options.shape, directory, options.device)
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        for name in options.arrangements:
            with console.status(name):
                found[name] = measure({**settings, "model": str(model), "logs": str(directory)}, name, directory)
            console.print(f"{name}: {found[name]['shares']}", highlight=False)
            record.write(options.out, versions=versions("torch", "triton"), settings=settings, repetitions=found)
    show(found, console)
    console.print(f"written to {options.out}", highlight=False)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
