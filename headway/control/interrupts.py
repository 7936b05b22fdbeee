"""What SIGINT, SIGTERM and SIGHUP do to a command: they end it in order, and none of them is a traceback."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.errors import RunFailed

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """How a run that a thread trains is asked to stop: `ask` does what Ctrl-C does in the main thread."""

    def __init__(self) -> None:
        self._ask: Callable[[], object] = lambda: None
        self.stop: Callable[[], bool] = lambda: False  # whether the run then ends by itself

    def connect(self, loop: asyncio.AbstractEventLoop, interrupt: Callable[[], object]) -> None:
        self._ask = lambda: loop.call_soon_threadsafe(interrupt)

    def ask(self) -> None:
        self._ask()


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """For what computes without a turn of the event loop: a signal ends it at once, with this sentence."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with _handled(lambda number: signal.signal(number, interrupt), lambda number: None):
        try:
            yield
        except KeyboardInterrupt:
            raise RunFailed(sentence) from None


@contextmanager
def stoppable(stopping: Stopping) -> Iterator[None]:
    """The first signal asks the run to end in order, each later one cancels what goes on."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    is_first = True

    def interrupt() -> None:
        nonlocal is_first
        if not is_first or not stopping.stop():
            task.cancel()
        is_first = False

    stopping.connect(loop, interrupt)
    with _handled(lambda number: loop.add_signal_handler(number, interrupt), loop.remove_signal_handler):
        yield


@contextmanager
def _handled(add: Callable[[int], object], remove: Callable[[int], object]) -> Iterator[None]:
    """Handlers of all three signals; afterwards they are those of before."""
    numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()  # Python allows no others
    handlers = {number: signal.getsignal(number) for number in numbers}
    if handlers.get(signal.SIGHUP) is signal.SIG_IGN:  # nohup: the run is to outlive its terminal
        del handlers[signal.SIGHUP]
    for number in handlers:
        add(number)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            remove(number)
            signal.signal(number, handler or signal.SIG_DFL)
