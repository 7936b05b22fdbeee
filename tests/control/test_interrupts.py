"""Signals: while nothing can be saved yet, and where they are not to be heard. `test_resume.py` has those of a run."""

import asyncio
import io
import os
import signal
from pathlib import Path

import pytest
from system import DEADLINE_S, TASK, check_finished, check_record, events_of, make_config, run_inline

from headway import launch
from headway.control.interrupts import Stopping, stoppable
from headway.errors import RunFailed
from headway.monitor.view import PlainView
from headway.record.events import Event

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


def test_5_an_interrupt_while_a_resume_changes_knobs_ends_it_in_order(tmp_path: Path, tiny_model: str) -> None:
    run_inline(make_config(tmp_path, tiny_model, run={"steps": 2}, task={"eval": ""}))
    stopping = Stopping()

    class Impatient(PlainView):
        def on_event(self, event: Event) -> None:
            super().on_event(event)
            if event.kind == "phase" and getattr(event, "name", "") == "retraining with the knobs of the record":
                stopping.ask()

    config = make_config(tmp_path, tiny_model, run={"steps": 3}, task={"eval": ""}, trainer={"lr": 1e-3})
    train = launch.train(config, True, Impatient(io.StringIO()), stopping=stopping)
    with pytest.raises(RunFailed, match=r"^stopped after 2 steps; `--resume` goes on from"):
        asyncio.run(asyncio.wait_for(train, DEADLINE_S))
    assert check_record(config, events_of(config)).status == "stopped"
    run_inline(config, resume=True)
    check_finished(config, events_of(config))


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
