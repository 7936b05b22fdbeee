"""How fast weights reach an engine by each transport, compared with memcpy, and what generation notices of it.

A trainer's process publishes weights; an engine's process receives them next to a set of the same size while a small
embedded engine goes on decoding there, as in a run: transfer and proof on one thread, decode steps on another. Measured
for each transport, in turns, and for a plain copy between the two sets: bytes a second of the transfer alone and of
transfer and proof together; tokens a second before and during; the longest that two decode steps lay apart; and the
pause in which the new set takes the place of the old. Files are read back from the page cache.
"""

import argparse
import base64
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS_DIR, Arm, Message, Record, serve_arm, spread, versions
from shapes import SHAPES, model_directory, prompt_tokens, vocabulary_of
from swap import make_core

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

TRANSPORTS = ("shared_memory", "stream", "disk")
MEMCPY = "memcpy"
MATRIX = (8960, 1536)  # a feed-forward layer of a model of 1.5 billion parameters
NUM_SETS = 6  # the trainer's weights and two buffers, the engine's two sets, and a file in memory
DEADLINE_S = 600.0


def make_tensors(num_parameters: int, device: str, value: float) -> "dict[str, Tensor]":
    """bf16 tensors as a decoder has them: one large embedding, matrices, and a vector with each."""
    import torch

    rows, width = MATRIX
    embedding = num_parameters // 6 // width
    num_matrices = max(1, round((num_parameters - embedding * width) / (rows * width)))
    shapes: dict[str, tuple[int, ...]] = {"embedding": (max(1, embedding), width)}
    for number in range(num_matrices):
        shapes |= {f"matrix-{number}": MATRIX, f"norm-{number}": (width,)}
    return {name: torch.full(shape, value, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


# The trainer's process


def load_trainer(spec: Message) -> tuple[Message, Callable[[Message], Message]]:
    import torch

    from headway import codec
    from headway.weights.publish import Publisher

    torch.set_num_threads(1)
    tensors = make_tensors(spec["parameters"], spec["device"], 0.0)
    publishers: dict[str, Any] = {}
    if spec["device"] != "cpu":
        from headway.weights.cuda import DevicePublisher

        publishers["cuda"] = DevicePublisher(torch.device(spec["device"]))
    host = Publisher(TRANSPORTS, directory=spec["directory"])

    def publish(message: Message) -> Message:
        """A version whose tensors all differ from the one before; its places, one at a time."""
        for tensor in tensors.values():
            tensor.fill_(float(message["version"]))
        started = time.perf_counter()
        updates = {name: publisher.publish(message["version"], tensors) for name, publisher in publishers.items()}
        on_device_s = time.perf_counter() - started
        update = host.publish(message["version"], tensors)
        publish_s = time.perf_counter() - started - on_device_s
        for place in update.places:
            updates[place.transport] = alone(update, place)
        shown = {name: base64.b64encode(codec.encode(one)).decode() for name, one in updates.items()}
        return {"updates": shown, "publish_s": publish_s, "num_bytes": update.num_bytes}

    return {"num_tensors": len(tensors)}, publish


def alone(update: Any, place: Any) -> Any:
    """The update as if this were the only place it lies in."""
    from dataclasses import replace

    return replace(update, transport=place.transport, location=place.location, host=place.host, elsewhere=())


# The engine's process


class Receiver:
    """A set of weights that updates are staged next to, and an engine that decodes meanwhile."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        import torch
        from torch import nn

        from headway.weights.shadow import ShadowWeights

        torch.set_num_threads(1)
        self.options, self.vocabulary = options, vocabulary_of(model)
        self.core = make_core(options, model)
        self.live = {
            name: nn.Parameter(tensor, requires_grad=False)
            for name, tensor in make_tensors(options.parameters, options.device, -1.0).items()
        }
        self.shadow = ShadowWeights(self.live, in_place=options.device != "cpu")
        self.num_asked = 0

    def decode(self, goes_on: Callable[[], bool]) -> Message:
        """A full batch, for as long as told: tokens a second, and the longest that two steps lay apart."""
        started = last = time.perf_counter()
        before, longest = self.core.stats().num_generated, 0.0
        while goes_on():
            self.fill()
            self.core.step()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        num_tokens = self.core.stats().num_generated - before
        return {"tokens_per_s": num_tokens / (last - started), "longest_step_ms": longest * 1e3}

    def fill(self) -> None:
        from headway.types import Request, RequestKey, Sampling

        stats = self.core.stats()
        for _ in range(self.options.requests - stats.running - stats.waiting):
            prompt = prompt_tokens(self.num_asked, self.options.prompt_length, self.vocabulary)
            sampling = Sampling(max_tokens=self.options.output_length)
            self.core.submit(Request(RequestKey(self.num_asked, 0), prompt, sampling, seed=0))
            self.num_asked += 1

    def stage(self, update: Any) -> None:
        import torch

        stream: Any = nullcontext() if self.options.device == "cpu" else torch.cuda.stream(torch.cuda.Stream())
        with stream:
            self.shadow.stage(update)

    def measure(self, update: Any) -> Message:
        from headway.weights.receive import receive

        staging_s, _ = timed(lambda: self.stage(update), self.options.device)
        into = {name: self.shadow.staged(parameter) for name, parameter in self.live.items()}
        transfer_s, _ = timed(lambda: receive(update, into), self.options.device)
        until = time.perf_counter() + self.options.seconds
        calm = self.decode(lambda: time.perf_counter() < until)
        busy, stage_s = self.decode_during(lambda: self.stage(update))
        pause_s, fingerprints = timed(self.shadow.swap, self.options.device)
        assert fingerprints == update.fingerprints
        return {
            "transfer_s": transfer_s,
            "staging_s": staging_s,
            "staging_while_decoding_s": stage_s,
            "pause_ms": pause_s * 1e3,
            "before": calm,
            "during": busy,
        }

    def decode_during(self, work: Callable[[], None]) -> tuple[Message, float]:
        """Decoding while another thread does the work, again and again for a while; the seconds of doing it once."""
        until = time.perf_counter() + self.options.seconds

        def repeat() -> list[float]:
            durations: list[float] = []
            while not durations or time.perf_counter() < until:
                durations.append(timed(work, self.options.device)[0])
            return durations

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(repeat)
            measured = self.decode(lambda: not working.done())
            return measured, statistics.median(working.result())

    def measure_copy(self) -> Message:
        """A plain copy from one set to the other, both resident: the limit of any transfer, and what it alone costs."""
        pairs = [(self.shadow.staged(parameter), parameter.data) for parameter in self.live.values()]

        def copy() -> None:
            for target, origin in pairs:
                target.copy_(origin)

        copy_s = min(timed(copy, self.options.device)[0] for _ in range(3))
        until = time.perf_counter() + self.options.seconds
        calm = self.decode(lambda: time.perf_counter() < until)
        busy, stage_s = self.decode_during(copy)
        return {"transfer_s": copy_s, "staging_while_decoding_s": stage_s, "before": calm, "during": busy}


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    import torch

    started = time.perf_counter()
    found = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def load_receiver(spec: Message) -> tuple[Message, Callable[[Message], Message]]:
    from headway import codec

    receiver = Receiver(argparse.Namespace(**spec), Path(spec["model"]))

    def receive_all(message: Message) -> Message:
        found: Message = {}
        for name, shown in message["updates"].items():
            update = codec.decode(base64.b64decode(shown))
            receiver.stage(update)  # so that all memory has been touched
            if MEMCPY not in found:
                found[MEMCPY] = receiver.measure_copy()
            found[name] = receiver.measure(update)
        return found

    return {}, receive_all


ARMS = {"trainer": load_trainer, "engine": load_receiver}


# The run


def start(name: str, spec: Message, scratch: Path, stack: ExitStack) -> Arm:
    command = [sys.executable, __file__, "--arm", name, json.dumps(spec)]
    arm = Arm(name, command, {"OMP_NUM_THREADS": "1"}, scratch / f"{name}.log")
    stack.callback(arm.close)
    arm.answer(DEADLINE_S)
    return arm


def run(options: argparse.Namespace, scratch: Path) -> tuple[list[Message], int]:
    """Rounds in which every transport has its turn; the first one warms up and is left out."""
    model = model_directory(options.shape, scratch, "cpu", options.dtype)
    spec = {key: value for key, value in vars(options).items() if key not in ("out", "directory")}
    directory = str(options.directory or scratch / "weights")
    rounds, num_bytes = [], 0
    with ExitStack() as stack:
        trainer = start("trainer", spec | {"directory": directory}, scratch, stack)
        engine = start("engine", spec | {"model": str(model)}, scratch, stack)
        for version in range(1, options.repetitions + 2):
            published = trainer.ask({"version": version}, DEADLINE_S)
            num_bytes = published.pop("num_bytes")
            measured = engine.ask({"updates": published.pop("updates")}, DEADLINE_S)
            rounds.append({"publish_s": published["publish_s"], "transports": measured})
    return rounds[1:], num_bytes


def figures_of(rounds: list[Message], num_bytes: int) -> Message:
    figures: Message = {}
    for name in rounds[0]["transports"]:
        turns = [one["transports"][name] for one in rounds]
        figures[name] = {
            "bytes_per_s": spread(num_bytes / turn["transfer_s"] for turn in turns),
            "staging_while_decoding_s": statistics.median(turn["staging_while_decoding_s"] for turn in turns),
        }
        limit = figures[MEMCPY]["bytes_per_s"]["best"]
        figures[name]["share_of_memcpy"] = figures[name]["bytes_per_s"]["best"] / limit
        if name != MEMCPY:
            figures[name]["bytes_per_s_proved"] = spread(num_bytes / turn["staging_s"] for turn in turns)
            figures[name]["pause_ms"] = spread(turn["pause_ms"] for turn in turns)
        for moment in ("before", "during"):
            figures[name][moment] = {
                key: statistics.median(turn[moment][key] for turn in turns) for key in turns[0][moment]
            }
    return figures


def show(figures: Message, num_bytes: int, console: "Console") -> None:
    from rich.table import Table

    table = Table(
        "transport",
        "GB/s",
        "of memcpy",
        "proved too",
        "s while decoding",
        "tokens/s before / during",
        "longest step ms",
        "pause ms median / max",
        title=f"{num_bytes / 1e9:.2f} GB of weights",
    )
    for name, found in figures.items():
        before, during, pause = found["before"], found["during"], found.get("pause_ms")
        table.add_row(
            name,
            f"{found['bytes_per_s']['best'] / 1e9:.2f}",
            f"{found['share_of_memcpy']:.0%}",
            f"{found['bytes_per_s_proved']['best'] / 1e9:.2f}" if pause else "",
            f"{found['staging_while_decoding_s']:.2f}",
            f"{before['tokens_per_s']:,.0f} / {during['tokens_per_s']:,.0f}",
            f"{before['longest_step_ms']:.1f} / {during['longest_step_ms']:.1f}",
            f"{pause['median']:.2f} / {pause['best']:.2f}" if pause else "",
        )
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench weights", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1.5e9, help="bf16 parameters that travel")
    parser.add_argument("--device", default="cpu", help="where trainer and engine hold them")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="shape of the model that decodes meanwhile")
    parser.add_argument("--dtype", default="bfloat16", help="type of that model")
    parser.add_argument("--requests", type=int, default=16, help="sequences it decodes together")
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--output-length", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.0, help="of decoding before each transfer")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each transport")
    parser.add_argument("--directory", type=Path, default=None, help="where files go; a temporary one when left out")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "weights.json", help="where the record goes")
    options = parser.parse_args(arguments)
    options.parameters = int(options.parameters)
    return options


def check_memory(num_parameters: int) -> None:
    from headway.errors import ConfigError

    needed = NUM_SETS * 2 * num_parameters
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), free)
    if needed > free:
        raise ConfigError(
            f"--parameters {num_parameters:g} needs about {needed / 1e9:.1f} GB in all, and {free / 1e9:.1f} GB are "
            "free; lower it"
        )


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options, record = Console(), parse(arguments), Record("weights", arguments)
    check_memory(options.parameters)
    with tempfile.TemporaryDirectory() as scratch:
        rounds, num_bytes = run(options, Path(scratch))
    figures = figures_of(rounds, num_bytes)
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "directory")}
    record.write(
        options.out,
        versions=versions("torch", "transformers", "xxhash"),
        settings=settings,
        num_bytes=num_bytes,
        repetitions=rounds,
        figures=figures,
    )
    show(figures, num_bytes, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        serve_arm(functools.partial(ARMS[sys.argv[2]], json.loads(sys.argv[3])))
    else:
        main(sys.argv[1:])
