"""An engine and a trainer on one GPU: NVIDIA's multi-process service, so that both compute at the same time.

By themselves two processes get the GPU by turns, a slice of time each. Under the service their kernels run side by
side: where one leaves multiprocessors or bandwidth unused, the other takes them. docs/performance.md has what that
brings. The service is this run's own, in a private directory, and ends with it.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from headway.config import Config
from headway.runtime.process_tree import set_death_signal

CONTROL = "nvidia-cuda-mps-control"
_PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_START_S, _STOP_S = 10.0, 10.0


def shares_gpu(config: Config) -> bool:
    """Whether several processes of the run compute on one GPU."""
    devices = [*config.engine.placement.values(), *config.trainer.placement.values()]
    gpus = [{"cuda": "cuda:0"}.get(device, device) for device in devices if device != "cpu"]
    return config.run.runtime != "inline" and len(set(gpus)) < len(gpus)


@contextlib.contextmanager
def side_by_side(config: Config) -> Iterator[None]:
    """While it lasts, processes started from here that share a GPU compute on it at the same time.

    Where there is no service, or one is there already, nothing is started; processes then take turns, or share that.
    """
    if not shares_gpu(config) or shutil.which(CONTROL) is None or _PLACES[0] in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="headway-mps-") as directory:
        places = {name: f"{directory}/{name.split('_')[2].lower()}" for name in _PLACES}
        for place in places.values():
            Path(place).mkdir(mode=0o700)
        service = _start(places)
        os.environ.update(places if service is not None else {})
        try:
            yield
        finally:
            for name in _PLACES:
                os.environ.pop(name, None)
            if service is not None:
                _stop(service, places)


def _start(places: dict[str, str]) -> "subprocess.Popen[bytes] | None":
    """The service in the foreground, as a child that does not outlive this process; None if it does not come up."""
    environment = {**os.environ, **places}
    service = subprocess.Popen(
        [CONTROL, "-f"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(set_death_signal, signal.SIGTERM, os.getpid()),
    )
    until = time.monotonic() + _START_S
    while service.poll() is None and time.monotonic() < until:
        if (Path(places[_PLACES[0]]) / "control").exists():
            return service
        time.sleep(0.05)
    service.kill()
    service.wait()
    logging.getLogger(__name__).warning("%s did not start; engine and trainer take turns on their GPU", CONTROL)
    return None


def _stop(service: "subprocess.Popen[bytes]", places: dict[str, str]) -> None:
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        subprocess.run(
            [CONTROL], input=b"quit -t 1\n", env={**os.environ, **places}, timeout=_STOP_S, capture_output=True
        )
    with contextlib.suppress(subprocess.TimeoutExpired):
        service.wait(_STOP_S)
    if service.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(service.pid, signal.SIGKILL)
        service.wait()
