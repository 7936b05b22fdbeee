"""Starting a vLLM server and ending it: its arguments, its environment, interpreters and servers that will not do.

No vLLM is needed: a small program stands for its interpreter. What real servers do is in test_vllm_process.py.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from vllm_wire import run, until

from headway.config import EngineSection
from headway.engine.vllm.engine import VllmEngine
from headway.engine.vllm.messages import PROCESSED, RAW
from headway.engine.vllm.model_copy import ServedModel
from headway.engine.vllm.process import Server, arguments, check_interpreter, environment
from headway.errors import ConfigError, DeadlineExceeded, WorkerDied


def served(context: int = 512) -> ServedModel:
    return ServedModel(True, 52, context, 1024, np.zeros(2, np.int32), np.zeros(2, np.float32), "")


def test_knobs_become_arguments_of_the_server_and_the_users_own_come_last() -> None:
    section = EngineSection(
        kind="vllm", vllm_python="p", max_context=256, max_num_seqs=9, kv_tokens=4096, vllm_args="--a 'b c'"
    )
    words = arguments(section, (0, 32, 0), served(), "bfloat16", PROCESSED, 0.8)
    assert dict(zip(words[:12:2], words[1:12:2], strict=True)) == {
        "--dtype": "bfloat16",
        "--max-model-len": "257",
        "--max-num-seqs": "9",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--kv-cache-memory-bytes": str(4096 * 1024),
    }
    whole_prompts = "--no-enable-chunked-prefill"
    assert words[12:] == ["--disable-uvicorn-access-log", "--enable-scale-out", whole_prompts, "--a", "b c"]
    assert "--stream-interval" not in words, "a request says it"
    words = arguments(section, (0, 26, 0), served(), "bfloat16", RAW, 0.8)
    assert "--enable-scale-out" not in words and words[words.index("--stream-interval") + 1] == "32"
    whole = EngineSection(kind="vllm", vllm_python="p", device="cuda:1")
    words = arguments(whole, (0, 32, 0), served(), "bfloat16", RAW, 0.3)
    assert words[words.index("--max-model-len") + 1] == "512"
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.3" and "--kv-cache-memory-bytes" not in words
    assert whole_prompts not in words


def test_the_servers_environment_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    cpu, second, any_gpu = (environment(device, "/scratch") for device in ("cpu", "cuda:1", "cuda"))
    assert "PYTHONPATH" not in cpu and cpu["VLLM_RPC_BASE_PATH"] == "/scratch" and cpu["VLLM_SERVER_DEV_MODE"] == "1"
    assert [values["CUDA_VISIBLE_DEVICES"] for values in (cpu, second, any_gpu)] == ["", "7", "4,7"]
    assert cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and "VLLM_CPU_OMP_THREADS_BIND" not in second


def test_an_interpreter_without_vllm_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.vllm_python = /no/python cannot be executed; name an"):
        check_interpreter("/no/python")
    with pytest.raises(ConfigError, match=r"has no vLLM; install it there, as docs/vllm.md says$"):
        check_interpreter(sys.executable)


FAKE_PROGRAM = """#!{python}
import os, sys, time
if "-c" in sys.argv:
    print("{version}")
elif os.fork() == 0:
    os.setsid()
    time.sleep(600)
else:
    {then}
"""


def program(directory: Path, then: str, version: str = "0.32.0+cpu") -> str:
    """Stands for vLLM's interpreter; what it starts leaves its process group."""
    path = directory / "python"
    path.write_text(FAKE_PROGRAM.format(python=sys.executable, then=then, version=version))
    path.chmod(0o755)
    return str(path)


def test_a_server_that_ends_before_it_is_ready_shows_its_first_error(tmp_path: Path, tiny_model: str) -> None:
    words = (
        "(EngineCore pid=1) ERROR 11-15 19:41:22 [core.py:1] ValueError: no memory for keys and values\\n"
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above."
    )
    python = program(tmp_path, f'print("{words}"); time.sleep(0.2); sys.exit(1)')
    section = EngineSection(kind="vllm", vllm_python=python)
    engine = VllmEngine(tiny_model, "float32", section, "", PROCESSED, 20.0)
    with pytest.raises(ConfigError) as error:
        run(engine.open())
    assert str(error.value) == (
        "the vLLM server ended (exit code 1); it said: ValueError: no memory for keys and values; it was not ready "
        "yet: check engine.vllm_args and the log"
    )
    assert not engine._connection.files.root.exists()


def test_a_server_that_is_killed_before_it_is_ready_may_be_started_again(tmp_path: Path, tiny_model: str) -> None:
    """A worker's death, not a mistake in the config, which would end the run."""
    section = EngineSection(kind="vllm", vllm_python=program(tmp_path, "os.kill(os.getpid(), 9)"))
    engine = VllmEngine(tiny_model, "float32", section, "", PROCESSED, 20.0)
    with pytest.raises(WorkerDied, match=r"^the vLLM server ended \(signal 9\)$"):
        run(engine.open())


def test_a_version_without_spans_is_refused_before_a_server_starts(tmp_path: Path, tiny_model: str) -> None:
    started = tmp_path / "started"
    python = program(tmp_path, f"open({str(started)!r}, 'w')", version="0.26.0")
    section = EngineSection(kind="vllm", vllm_python=python, kv_on_swap="keep")
    engine = VllmEngine(tiny_model, "float32", section, "", PROCESSED, 20.0)
    with pytest.raises(ConfigError, match=r"^vLLM 0\.26\.0 does not report which weights sampled a token, and engine"):
        run(engine.open())
    assert not started.exists()


def test_a_server_that_is_never_ready_is_given_up_at_its_deadline(tmp_path: Path, tiny_model: str) -> None:
    section = EngineSection(kind="vllm", vllm_python=program(tmp_path, "time.sleep(600)"))
    engine = VllmEngine(tiny_model, "float32", section, "", PROCESSED, 1.5)
    with pytest.raises(DeadlineExceeded, match=r"the vLLM server was not ready within 1\.5 s; raise run\.deadline_s"):
        run(engine.open())


OWNER = """
import asyncio, sys
from pathlib import Path
from headway.engine.vllm.process import Server

async def main():
    server = await Server.start(sys.argv[1], Path(sys.argv[2]) / "served", [], "cpu")
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_an_owner_that_is_killed_takes_the_server_and_all_it_started_along(tmp_path: Path) -> None:
    python = program(tmp_path, "time.sleep(600)")
    copy = tmp_path / "copy"
    (copy / "served").mkdir(parents=True)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, python, str(copy)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"started\n"
    deadline = time.monotonic() + 20
    family: list[psutil.Process] = []
    while len(family) < 3:  # guardian, program, and the child that left its group
        assert time.monotonic() < deadline
        family = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    owner.wait()
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left and not copy.exists()


def test_a_server_whose_guardian_is_killed_leaves_nothing(tmp_path: Path) -> None:
    python, copy = tmp_path / "python", tmp_path / "copy"
    python.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    python.chmod(0o755)
    (copy / "served").mkdir(parents=True)

    async def scenario() -> None:
        server = await Server.start(str(python), copy / "served", [], "cpu")
        await until(lambda: len(psutil.Process().children(recursive=True)) >= 2)
        (guardian,) = psutil.Process().children()
        guardian.kill()
        assert "signal 9" in str(await server.ended) and server.was_killed
        assert not Path(server.socket).parent.exists()

    run(scenario())
    assert not copy.exists()


def test_a_closed_server_has_ended_and_left_nothing(tmp_path: Path) -> None:
    python = program(tmp_path, "time.sleep(600)")
    copy = tmp_path / "copy"
    (copy / "served").mkdir(parents=True)

    async def scenario() -> list[psutil.Process]:
        server = await Server.start(python, copy / "served", [], "cpu")
        await until(lambda: len(psutil.Process().children(recursive=True)) >= 3)
        family = psutil.Process().children(recursive=True)
        await server.close()
        assert server.ended.done() and "signal 15" in str(server.ended.result())
        return family

    _, left = psutil.wait_procs(run(scenario()), timeout=1)
    assert not left and not copy.exists()
