"""Real vLLM servers for tests: the CPU build in an environment of its own, on models of a few layers.

`make test-slow` installs that environment and names its interpreter in HEADWAY_VLLM_PYTHON. Models have heads of 32:
vLLM's attention on a CPU does not run those of 16.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from headway.config import EngineSection
from headway.engine.vllm.engine import VllmEngine
from headway.engine.vllm.messages import PROCESSED
from headway.engine.vllm.model_copy import write_model
from headway.engine.vllm.process import environment
from headway.types import Chunk, Completion, Request

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0  # of a start, on a machine that has much else to do
CONTEXT = 512
MODEL = "qwen3-tied"  # two layers, heads of 32, a tied head
ARGS = "--enforce-eager --block-size 32"  # a start in half a minute; prompts shared by 32 tokens


def vllm_python() -> str:
    """The interpreter of the environment with vLLM; tests are skipped where there is none."""
    named = os.environ.get("HEADWAY_VLLM_PYTHON")
    if named is None and not (ROOT / ".venv-vllm/installed").is_file():
        pytest.skip("needs vLLM in an environment of its own: make .venv-vllm/installed")
    return str(Path(named or ROOT / ".venv-vllm/bin/python").absolute())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """On a loop of its own, with a deadline, so that a hang is a failure with a name."""
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running_server(model: str, directory: Path, *arguments: str) -> Iterator[str]:
    """A server as a user starts one, on an untied copy of the model; its URL."""
    write_model(model, "float32", directory / "served")
    port, log = free_port(), directory / "server.log"
    command = [vllm_python(), "-m", "vllm.entrypoints.cli.main", "serve", str(directory / "served")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-num-seqs", "16"]
    command += ["--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(1 << 24), *ARGS.split(), *arguments]
    scratch = directory / "scratch"
    scratch.mkdir()
    with log.open("wb") as output:
        guardian = subprocess.Popen(
            [sys.executable, "-m", "headway.runtime.guardian", str(os.getpid()), str(scratch), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment("cpu", str(scratch)) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", guardian, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait(30)


def wait_until_healthy(url: str, guardian: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert guardian.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"not ready within {DEADLINE_S:g} s:\n{log.read_text()[-3000:]}")


@asynccontextmanager
async def opened(
    model: str, url: str = "", mode: str = PROCESSED, lora_rank: int = 0, **settings: Any
) -> AsyncIterator[VllmEngine]:
    """An engine on the server at `url`, or with a server of its own."""
    own = {} if url else {"vllm_python": vllm_python(), "vllm_args": ARGS, "kv_tokens": 16384}
    section = EngineSection(**{"kind": "vllm", "urls": url, "max_num_seqs": 16, "chunk_tokens": 8, **own, **settings})
    engine = VllmEngine(model, "float32", section, url, mode, DEADLINE_S, lora_rank=lora_rank)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


class Watched:
    """A request being generated, and what came of it so far."""

    def __init__(self, engine: VllmEngine, request: Request) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine))

    async def _read(self, engine: VllmEngine) -> Completion:
        async for item in engine.generate(self.request):
            self.began.set()
            if isinstance(item, Completion):
                return item
            self.chunks.append(item)
        raise AssertionError("no completion came")


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
