"""Event types of the run log: one frozen class each, documented where it is defined.

An event is made without `seq` and `time`; the log stamps both when it appends. On disk an event is one JSON object on
a line: `kind` (the class name in snake case), `seq`, `time`, and the fields of that kind. A number that is not finite
is written as null, so a field that may be one allows None. To add a kind, add a class here; `Run` (run.py) folds it.

    log.append(Admitted(group=7, prompt=3, eta=4, version=2))
"""

import re
from typing import Any

import msgspec

from headway.types import Group, StopReason

FORMAT = 2
"""The version of this vocabulary, written into `run_started`: a log of another version is refused in one sentence."""


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


class Event(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, tag_field="kind", tag=_snake_case
):
    """Base of all events. The log sets both fields: `seq` counts from 0 without gaps, `time` is in unix seconds."""

    seq: int = -1
    time: float = 0.0

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class RunStarted(Event, frozen=True, kw_only=True):
    """The first event of every run."""

    format: int = FORMAT
    config: dict[str, Any]  # all of it, as `Config.model_dump` gives it
    config_hash: str  # of the knobs that give the record its meaning
    hardware: dict[str, Any]
    num_prompts: int
    rows: str = ""  # fingerprint of the training rows, in order; empty: not taken
    held_out_rows: str = ""  # the same of the held-out rows
    model: str = ""  # checksum of places in the weights that the run begins with; empty: not taken
    worst_staleness: int | None  # None: without bound
    startup_s: float = 0.0  # imports, reading the model and the prompts; of `headway train`, since its process began


class ResumeStarted(Event, frozen=True, kw_only=True):
    """A new process opened the log: the next incarnation of the run begins. Retraining follows, then `resumed`."""

    incarnation: int  # of the run; the first, which has no such event, is 0
    hardware: dict[str, Any]
    startup_s: float = 0.0  # as in `run_started`


class Resumed(Event, frozen=True, kw_only=True):
    """A new incarnation of the run has retrained what the record holds and continues from there."""

    version: int
    checkpoint_version: int  # the steps since were trained again
    num_regenerated: int  # admitted groups without a finished event, whose generation restarts
    lost_tokens: int  # sampled for groups that had not finished


class ConfigChanged(Event, frozen=True, kw_only=True):
    """A resume with other knobs, which hold for the training steps after this version; replay honours them."""

    version: int
    changes: dict[str, tuple[Any, Any]]  # "trainer.lr": (before, after)


class Phase(Event, frozen=True, kw_only=True):
    """Work before, between or after training steps, such as starting workers: its start, its progress, its end."""

    name: str
    state: str  # started, progress, finished, failed
    done: int = 0
    total: int = 0  # 0: unknown
    seconds: float = 0.0  # since it started


class Warned(Event, frozen=True, kw_only=True):
    """A warning for the user that changes no state, such as a damaged checkpoint that was skipped."""

    message: str


class Admitted(Event, frozen=True, kw_only=True):
    """A group may be generated. Ids count from 0; one generated again after a resume is not admitted again."""

    group: int
    prompt: int  # row
    eta: int
    version: int  # the lowest confirmed by every engine that may serve it
    repeats: int | None = None  # the requeued group whose prompt this is; None: the stream's next prompt


class Requeued(Event, frozen=True, kw_only=True):
    """Groups dropped in an outage of the verifier or the workflow: their prompts are admitted again under new ids."""

    groups: tuple[int, ...]
    reason: str


class Place(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Position of one entry in the record: it starts at `offset`; size and checksum are of its codec bytes."""

    shard: str
    offset: int
    num_bytes: int
    checksum: str


class FailedTrajectory(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A trajectory without a reward: its place in the group, the reason, and the sampled tokens it wasted."""

    trajectory: int
    reason: str
    tokens: int

    @property
    def cause(self) -> str:
        """The kind of failure: the reason up to its first colon, for counting."""
        return self.reason.partition(":")[0].strip()[:40] or "unknown"

    @classmethod
    def of(cls, group: Group) -> "tuple[FailedTrajectory, ...]":
        return tuple(cls(failure.trajectory, failure.reason, failure.num_sampled) for failure in group.failures)


class Finished(Event, frozen=True, kw_only=True):
    """A group has all its trajectories and rewards, and its bytes are in the record."""

    group: int
    shard: str  # its `place`, field by field
    offset: int
    num_bytes: int
    checksum: str
    lengths: tuple[int, ...]  # sampled tokens of each trajectory
    rewards: tuple[float | None, ...]  # of each trajectory
    stops: tuple[StopReason | None, ...]  # of each trajectory: why its last completion stopped; None: it has none
    failures: tuple[FailedTrajectory, ...] = ()
    oldest: int | None  # versions of the oldest and newest sampled token; None: no token was sampled
    newest: int | None
    seconds: float  # since admission

    @property
    def place(self) -> Place:
        return Place(self.shard, self.offset, self.num_bytes, self.checksum)

    @property
    def tokens(self) -> int:
        """Tokens sampled for its trajectories."""
        return sum(self.lengths)

    @property
    def reward(self) -> float | None:
        """Mean reward of its trajectories."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else None


class Dropped(Event, frozen=True, kw_only=True):
    """Groups were dropped without being trained."""

    groups: tuple[int, ...]
    reason: str  # a DropReason
    tokens: int
    failures: tuple[FailedTrajectory, ...] = ()  # where all trajectories of a group failed


class Taken(Event, frozen=True, kw_only=True):
    """A batch leaves the buffer for the trainer."""

    version: int  # of the weights being trained
    groups: tuple[int, ...]  # in id order


class Trained(Event, frozen=True, kw_only=True):
    """A training step succeeded. A batch retrained after a resume is neither taken nor trained again in the log."""

    version: int  # the new one
    groups: tuple[int, ...]
    tokens: int  # sampled
    started: float
    seconds: float
    wait_s: float  # how long the trainer waited for this batch
    staleness_mean: float
    staleness_max: int
    reward: float | None
    metrics: dict[str, float | None]
    digest: str  # of all new weights
    weights_sample: tuple[float | None, ...] = ()  # master weights at fixed places
    tokens_at: Place | None = None  # what the loss saw of each token; None: not recorded


class EtaChanged(Event, frozen=True, kw_only=True):
    """The adaptive staleness bound changed for new admissions; the figures are means of recent steps."""

    version: int  # of the weights after the training step that decided it
    before: int
    after: int
    effective_sample_size: float
    behaviour_kl: float


class Retrained(Event, frozen=True, kw_only=True):
    """A recorded step, retrained where arithmetic is not repeatable, gave other weights, which now count."""

    version: int
    digest: str  # replaces the recorded one
    max_abs: float | None  # the largest difference between sampled master weights; None: no samples to compare
    relative_norm: float | None  # the norm of their difference, relative to the norm of the recorded ones


class Skipped(Event, frozen=True, kw_only=True):
    """A training step was skipped, not finite or with everything masked: the version stays, its groups are dropped."""

    version: int
    groups: tuple[int, ...]
    reason: str


class Swapped(Event, frozen=True, kw_only=True):
    """An engine runs a new version, verified."""

    version: int
    engine: str
    stage_s: float
    pause_ms: float
    interrupted: int  # sequences in flight at the swap
    recomputed: int  # tokens
    parity_max_abs: float | None  # largest log-prob difference to the trainer on the probe


class Stats(Event, frozen=True, kw_only=True):
    """What one engine did since its last stats event, and its state now. Counts are differences and never restart.

    Each engine's last one before `ended` is final. `admission_wait_s` and `trainer_wait_s` are the run's own, since
    the last stats event of any engine.
    """

    engine: str
    version: int
    seconds: float  # the time that the differences cover
    generated: int  # tokens, for training only
    prefilled: int
    recomputed: int
    preempted: int
    busy_s: float
    running: int  # sequences now
    waiting: int
    kv_used: int  # tokens now
    kv_total: int
    inflight: int  # groups now
    ready: int  # groups now
    admission_wait_s: float
    trainer_wait_s: float


class Evaluated(Event, frozen=True, kw_only=True):
    """Held-out accuracy over the problems with a verdict."""

    label: str  # before, step, after
    version: int  # the newest when it began
    version_last: int  # of the newest token sampled for it
    accuracy: float | None
    num: int  # problems with a verdict
    num_failed: int = 0  # problems without one
    mean_tokens: float
    seconds: float
    interval: tuple[float, float] | None = None  # 95%, of the accuracy
    pass_at: dict[str, float] = {}  # k to the estimate of pass@k
    tasks: dict[str, float | None] = {}  # of several tasks, each one's accuracy
    intervals: dict[str, tuple[float, float] | None] = {}  # and its interval
    groups_at: Place | None = None  # the problems with their completions, as a batch; None: not recorded


class Checkpointed(Event, frozen=True, kw_only=True):
    """A checkpoint is durable; it replaces what its slot held."""

    version: int
    slot: str  # a or b
    seconds: float
    stall_s: float = 0.0  # how long training had waited for the snapshot


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """A checkpoint could not be written; the slot's older one stays, and the next occasion tries again."""

    version: int
    slot: str
    cause: str


class WorkerLost(Event, frozen=True, kw_only=True):
    """A worker died, hung, was found faulty, or failed to start."""

    worker: str
    cause: str
    groups: tuple[int, ...]  # generation restarts elsewhere, under the same ids


class WorkerRestarted(Event, frozen=True, kw_only=True):
    """A new incarnation of a lost worker serves."""

    worker: str
    incarnation: int  # how often it was lost before
    seconds: float  # since the loss


class Retried(Event, frozen=True, kw_only=True):
    """Requests of a lost or leaving engine continue on other engines with the tokens received so far."""

    engine: str
    requests: int
    tokens: int
    seconds: float  # the longest time that one of them was on no engine


class EngineJoined(Event, frozen=True, kw_only=True):
    """An engine added during the run serves."""

    engine: str
    version: int  # verified


class EngineLeft(Event, frozen=True, kw_only=True):
    """An engine is gone and is not replaced."""

    engine: str
    cause: str


class EngineSlow(Event, frozen=True, kw_only=True):
    """An engine decodes far slower than the others."""

    engine: str
    tokens_per_s: float  # per running sequence
    others_per_s: float


class TokenCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Generated tokens by fate: generated = trained + waiting + in_flight + dropped + lost."""

    generated: int = 0
    trained: int = 0
    waiting: int = 0  # of finished groups that were neither trained nor dropped
    in_flight: int = 0  # of groups that have not finished
    dropped: dict[str, int] = {}  # by reason
    lost: int = 0  # with workers and processes
    recomputed: int = 0  # work done twice, not a fate


class Ended(Event, frozen=True, kw_only=True):
    """The last event of an incarnation of the run that could still write one."""

    status: str  # finished, failed, stopped
    cause: str
    tokens: TokenCounts


KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in Event.__subclasses__()}
