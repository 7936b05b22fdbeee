"""Events for phases of work such as reading the model, starting workers, retraining and evaluation."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.record.events import Event, Phase

PROGRESS_EVERY_S = 0.5


@contextmanager
def phase(emit: Callable[[Event], object], name: str) -> Iterator[Callable[[int, int], None]]:
    """Emit a phase's start, progress and end; call the yielded function with (done, total), at any rate.

    `emit` is `log.append`, or the view's `on_event` where there is no log.

        with phase(log.append, "starting workers") as progress:
            progress(1, 3)
    """
    started = announced = time.monotonic()

    def say(state: str, done: int = 0, total: int = 0) -> None:
        seconds = time.monotonic() - started
        emit(Phase(time=time.time(), name=name, state=state, done=done, total=total, seconds=seconds))

    def progress(done: int, total: int) -> None:
        nonlocal announced
        if time.monotonic() - announced >= PROGRESS_EVERY_S:
            announced = time.monotonic()
            say("progress", done, total)

    say("started")
    try:
        yield progress
    except BaseException:
        say("failed")
        raise
    say("finished")
