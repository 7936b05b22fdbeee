"""Errors that are for people: one sentence that says what happened, where, and what to do.

Everything raised on purpose derives from `HeadwayError`; the command line prints its sentence without a stack trace.
Any other exception is a bug and keeps its trace. Each type crosses process boundaries by name (`runtime/`).
"""


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
        InvariantBroken,
        RunFailed,
    )
}
