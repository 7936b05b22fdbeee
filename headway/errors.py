"""Errors written for users: one sentence that says what happened, where, and what to do.

Everything raised on purpose derives from `HeadwayError`; the command line prints its sentence without a stack trace.
Any other exception is a bug and keeps its trace. Each type crosses process boundaries by name (`runtime/`).
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_NOT_OWN = (
    os.path.dirname(__file__),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)


class HeadwayError(Exception):
    """Base of every error whose message is written for the user."""


class ConfigError(HeadwayError):
    """A setting, a file or a data row that cannot work, found before anything heavy started."""


class WorkerDied(HeadwayError):
    """A worker process ended while a caller still needed it; `worker` is its name, if the runtime knows it."""

    def __init__(self, sentence: str = "", worker: str = "") -> None:
        super().__init__(sentence)
        self.worker = worker


class DeadlineExceeded(HeadwayError):
    """An operation exceeded its deadline; the message names the operation."""


class RequestRefused(HeadwayError):
    """An engine cannot serve this request at all (for example, it exceeds the context)."""


class WeightMismatch(HeadwayError):
    """Weights that arrived are not the weights that were published."""


class WeightsUnreachable(HeadwayError):
    """Published weights could not be fetched from any of their places; a partial fetch is discarded."""


class OutOfMemory(HeadwayError):
    """One of several trainer ranks ran out of GPU memory; smaller micro-batches may fit."""


class SaveFailed(HeadwayError):
    """A checkpoint or a model could not be written; what was there before is still there."""


class InvariantBroken(HeadwayError):
    """One of Headway's invariants was violated; the run stops rather than train on wrong data."""


class RunFailed(HeadwayError):
    """The run ended early, with its cause."""


BY_NAME = {HeadwayError.__name__: HeadwayError} | {cls.__name__: cls for cls in HeadwayError.__subclasses__()}


CAUSE = "\0"
"""Stands in the sentence of `translated` for what the foreign error says, `KIND` for its kind (`kind_of`)."""
KIND = "\1"


@contextmanager
def translated(
    kinds: type[BaseException] | tuple[type[BaseException], ...], to: Callable[[str], Exception], sentence: str
) -> Iterator[None]:
    """Raise `to(sentence)` where a foreign error of these kinds is raised inside, with that error as its cause."""
    try:
        yield
    except kinds as error:
        raise to(sentence.replace(KIND, kind_of(error)).replace(CAUSE, first_line(error))) from error


def first_line(error: BaseException) -> str:
    """What a foreign error says; a first line that ends in a colon is worth nothing without the second."""
    said = (getattr(error, "strerror", None) or str(error)).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in said[: 1 + said[0].rstrip().endswith(":")])


def kind_of(error: BaseException) -> str:
    """The type of an error, and the last line of the user's own code on the way: KeyError at task.py:12."""
    place, own = error.__traceback__, None
    while place is not None:
        own = own if place.tb_frame.f_code.co_filename.startswith(_NOT_OWN) else place
        place = place.tb_next
    where = f" at {os.path.basename(own.tb_frame.f_code.co_filename)}:{own.tb_lineno}" if own else ""
    return f"{type(error).__name__}{where}"


_LONGEST_SENTENCE = 1000
"""Characters of what user code says: it goes into the event log, for each trajectory that fails."""


def describe(error: BaseException) -> str:
    """Type, place and message of an error on one line: KeyError at task.py:12: 'answer'."""
    said = ""
    with suppress(Exception):  # it may be of a class of the user's
        said = " ".join(str(error)[:_LONGEST_SENTENCE].split())
    return kind_of(error) + (f": {said}" if said else "")
