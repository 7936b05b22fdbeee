"""Starts a vLLM server and watches it: its own interpreter, a private socket, no process left behind.

The server listens on a Unix-domain socket in a private directory, because the endpoints that load weights have no
authentication. A guardian (headway/runtime/guardian.py) is its parent process: it ends the server and all its processes
however this process ends. vLLM 0.32 does not: its engine core outlives a killed API server.
"""

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import headway
from headway.config import DEFAULT_KV_TOKENS, EngineSection
from headway.engine.vllm.model_copy import ServedModel
from headway.errors import ConfigError, DeadlineExceeded, WorkerDied, translated

_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from headway.runtime.guardian import main; main()"
_ASK_VERSION = "from importlib.metadata import version; print(version('vllm'))"
_ASK_S = 60.0
_CLOSE_S = 9.0
_SHORT = 80  # characters of a directory whose sockets' names still fit into 107
_NUM_LINES = 400
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
SCALE_OUT = (0, 32)
"""The version from which `--enable-scale-out` is known: tokens in and out, with the versions of the weights."""
_CAUSE = re.compile(r"(?:^|[\s'\"])((?:\w+\.)*\w*(?:Error|Exception)|error): (?P<said>\S.*)")
_PREFIX = re.compile(r"^(\([\w -]+ pid=\d+\) )?([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]+\] )?")


def check_interpreter(python: str) -> tuple[int, ...]:
    """The version of vLLM that an interpreter has installed; raise if it has none or cannot run."""
    if shutil.which(python) is None:
        raise ConfigError(f"engine.vllm_python = {python} cannot be executed; name an interpreter")
    command, clean = [python, "-c", _ASK_VERSION], _clean_environment()
    with translated(
        subprocess.TimeoutExpired, DeadlineExceeded, f"engine.vllm_python = {python} did not answer within {_ASK_S:g} s"
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, env=clean)
    if done.returncode != 0:
        raise ConfigError(f"engine.vllm_python = {python} has no vLLM; install it there, as docs/vllm.md says")
    return tuple(int(number) for number in re.findall(r"\d+", done.stdout)[:3])


def lora_arguments(rank: int) -> list[str]:
    """Arguments for adapters of this rank: the least that vLLM can be started with, for the live and a staged one."""
    largest = next(largest for largest in _ADAPTER_RANKS if largest >= rank)
    # Left to itself, vLLM 0.32 wraps the head too, and on a CPU ends when it scores a prompt in a batch of several.
    matrices = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    sizes = ("--max-loras", "2", "--max-lora-rank", str(largest))
    return ["--enable-lora", *sizes, "--lora-target-modules", *matrices]


def arguments(
    section: EngineSection,
    version: tuple[int, ...],
    served: ServedModel,
    dtype: str,
    mode: str,
    kv_share: float,
    lora_rank: int = 0,
) -> list[str]:
    """Arguments of `vllm serve` after the model and its address; the user's own come last, so they win."""
    context = section.max_context or served.context
    listed = {
        "--dtype": dtype,
        # One more than sequences may have, so that a whole one can be scored: vLLM insists on sampling a token.
        "--max-model-len": str(min(context + 1, served.context)),
        "--max-num-seqs": str(section.max_num_seqs),
        "--logprobs-mode": mode,
        "--generation-config": "vllm",
    }
    kv_tokens = section.kv_tokens or (DEFAULT_KV_TOKENS if section.device == "cpu" else 0)
    if kv_tokens:
        listed["--kv-cache-memory-bytes"] = str(kv_tokens * served.kv_bytes)
    else:
        listed["--gpu-memory-utilization"] = f"{kv_share:g}"
    if version < SCALE_OUT:
        # For the whole server, since a request of this version cannot set it: one event per token would be its limit.
        listed["--stream-interval"] = str(section.tokens_per_chunk)
    flags = [*lora_arguments(lora_rank)] if lora_rank else []
    flags += ["--disable-uvicorn-access-log", *["--enable-scale-out"] * (version >= SCALE_OUT)]
    if section.device == "cpu":
        # vLLM 0.32: a request with a seed whose prompt is computed in parts ends the server ("CPU Generator does not
        # use offset").
        flags.append("--no-enable-chunked-prefill")
    return [*(word for pair in listed.items() for word in pair), *flags, *shlex.split(section.vllm_args)]


def _clean_environment() -> dict[str, str]:
    """Our environment variables without those that point an interpreter to our packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def environment(device: str, scratch: str) -> dict[str, str]:
    """Environment variables of the server's processes."""
    values = _clean_environment()
    values |= {
        "VLLM_SERVER_DEV_MODE": "1",  # without it there are no endpoints for weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # nor for adapters
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_RPC_BASE_PATH": scratch,
        "TMPDIR": scratch,  # a server that is killed leaves files there
    }
    # Compiled kernels must outlive the server, or every start is slow.
    values.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    if device == "cpu":
        # Bound to all cores, as vLLM does by itself, several engines of one machine would share the first ones.
        values.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        values["CUDA_VISIBLE_DEVICES"] = ""
    elif device != "cuda":
        number = int(device.partition(":")[2])
        visible = [name for name in values.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        values["CUDA_VISIBLE_DEVICES"] = visible[number] if visible else str(number)
    return values


class Server:
    """A vLLM server process; its output goes to our stderr, its last lines are stored for error messages."""

    def __init__(self, process: asyncio.subprocess.Process, socket: str, directories: list[str]) -> None:
        self.socket = socket
        self._process, self._directories = process, directories
        self.was_killed = False
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self.ended = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, python: str, model: Path, arguments: list[str], device: str) -> "Server":
        """Start a server on the copy in `model`; the copy's parent directory is removed when it ends."""
        short = None if len(tempfile.gettempdir()) < _SHORT else "/tmp"
        scratch = tempfile.mkdtemp(prefix="headway-vllm-", dir=short)
        socket = f"{scratch}/s"
        root, directories = str(Path(headway.__file__).parent.parent), [scratch, str(model.parent)]
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--uds", socket, *arguments]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _BOOT, root, str(os.getpid()), ":".join(directories), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # the guardian must survive what kills its owner's group
            env=environment(device, scratch),
        )
        return cls(process, socket, directories)

    async def _watch(self) -> WorkerDied:
        """Forward the server's output until it exits; returns the exit as an error."""
        assert self._process.stdout is not None
        async for line in _lines_of(self._process.stdout):
            text = line.decode(errors="replace").rstrip()
            sys.stderr.write(f"{text}\n")
            if text:
                self._lines.append(text)
        code = await self._process.wait()
        for directory in self._directories:  # a guardian that was killed removed none
            shutil.rmtree(directory, ignore_errors=True)
        sys.stderr.flush()
        number = code - 128 if code > 128 else -code
        self.was_killed = number > 0
        how = f"signal {number}" if self.was_killed else f"exit code {code}"
        said = self.cause() or (self._lines[-1] if self._lines and not self.was_killed else "")
        return WorkerDied(f"the vLLM server ended ({how})" + (f"; it said: {said}" if said else ""))

    def cause(self) -> str:
        """The first error in the server's output; later ones are usually consequences."""
        lines = (_PREFIX.sub("", line).strip() for line in self._lines)
        found = next((found for line in lines if (found := _CAUSE.search(line))), None)
        return found.group(0).strip(" '\"")[:300] if found else ""

    def forget(self) -> None:
        """Discard the output so far: errors of start-up checks are no cause of a later exit."""
        self._lines.clear()

    async def close(self) -> None:
        """End the server and everything it started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(self.ended)


async def _lines_of(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; `readline` has a limit."""
    pending = b""
    while piece := await stream.read(1 << 16):
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            yield line
    if pending:
        yield pending
