"""Errors that are for people: one sentence that says what happened, where, and what to do.

Everything raised on purpose derives from `HeadwayError`; the command line prints its sentence without a stack trace.
Any other exception is a bug and keeps its trace. Each type crosses process boundaries by name (`runtime/`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HeadwayError(Exception):
    """Base of every error whose message is written for the user."""


class ConfigError(HeadwayError):
    """A setting, a file or a data row that cannot work, found before anything heavy started."""


class WorkerDied(HeadwayError):
    """A worker process ended while somebody still needed it; `worker` is its name where the runtime says it."""

    def __init__(self, sentence: str = "", worker: str = "") -> None:
        super().__init__(sentence)
        self.worker = worker


class DeadlineExceeded(HeadwayError):
    """Something that was awaited took longer than its deadline; the message names it."""


class RequestRefused(HeadwayError):
    """An engine cannot serve this request at all (for example, it exceeds the context)."""


class WeightMismatch(HeadwayError):
    """Weights that arrived are not the weights that were published."""


class WeightsUnreachable(HeadwayError):
    """Published weights could not be fetched from any of the places they lie in; what was fetched is not used."""


class OutOfMemory(HeadwayError):
    """One of several trainer ranks ran out of GPU memory; smaller micro-batches may fit."""


class SaveFailed(HeadwayError):
    """A checkpoint or a model could not be written; what was there before is still there."""


class InvariantBroken(HeadwayError):
    """A promise Headway makes about its own data did not hold; the run stops rather than train on it."""


class RunFailed(HeadwayError):
    """The run ended early, with its cause."""


BY_NAME: dict[str, type[HeadwayError]] = {
    cls.__name__: cls
    for cls in (
        HeadwayError,
        ConfigError,
        WorkerDied,
        DeadlineExceeded,
        RequestRefused,
        WeightMismatch,
        WeightsUnreachable,
        OutOfMemory,
        SaveFailed,
        InvariantBroken,
        RunFailed,
    )
}


CAUSE = "\0"
"""Stands in the sentence of `translated` for what the foreign error says, `KIND` for its type."""
KIND = "\1"


@contextmanager
def translated(
    kinds: type[BaseException] | tuple[type[BaseException], ...], to: Callable[[str], Exception], sentence: str
) -> Iterator[None]:
    """Raise `to(sentence)` where a foreign error of these kinds is raised inside, with that error as its cause."""
    try:
        yield
    except kinds as error:
        lines = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()
        said = sentence.replace(KIND, type(error).__name__).replace(CAUSE, lines[0] if lines else "")
        raise to(said) from error
