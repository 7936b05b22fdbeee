"""Signals: while nothing can be saved yet, and where they are not to be heard. `test_resume.py` has those of a run."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from system import TASK, make_config, run_inline

from headway.control.interrupts import Stopping, stoppable
from headway.errors import RunFailed

SIGNALLED = """

def rows_of_an_impatient_person():
    os.kill(os.getpid(), {number})
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_5_a_signal_while_the_rows_are_read_ends_at_once_and_writes_nothing(
    tmp_path: Path, tiny_model: str, number: signal.Signals
) -> None:
    (tmp_path / "task.py").write_text(TASK + SIGNALLED.format(number=int(number)))
    handler = signal.signal(number, signal.SIG_DFL)
    config = make_config(tmp_path, tiny_model, task={"train": f"{tmp_path}/task.py:rows_of_an_impatient_person"})
    try:
        with pytest.raises(
            RunFailed, match=r"^stopped while the model and the prompts were read; the run directory is"
        ):
            run_inline(config)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, handler)
    assert not Path(config.run.dir).exists()


def test_5_a_run_under_nohup_outlives_its_terminal_and_still_hears_the_other_signals() -> None:
    asked = []

    def stop() -> bool:
        asked.append(1)
        return True

    async def run() -> None:
        stopping = Stopping()
        stopping.stop = stop
        with stoppable(stopping):
            for number in (signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(run())
        assert asked == [1] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
