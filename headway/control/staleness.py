"""The admission rule and the take order, as arithmetic: together they bound how old training data can be.

Invariants that live here:
  1. Single admission authority: Eq. 3, `admitted − dropped < (i + η + 1)·B`, holds at every admission, where i is the
     lowest version confirmed loaded by every engine that may serve the group.
  2. Conservation: every admitted group leaves exactly once, trained or dropped;
     `admitted = trained + dropped + in flight`.

The counter alone bounds nothing for a straggler, so groups are taken from a window of W groups anchored at the oldest
untaken one: counting from it in admission order, taken groups included and dropped ones not, only the first W may be
taken. At most W − 1 newer groups can then be trained before any group, and no group is trained at a staleness above

    η + ⌈(W − 1)/B⌉.

By Eq. 3, of the groups older than a group g admitted at version i, at most (i + η + 1)·B − 1 are ever trained. If g is
trained at version v, v·B groups were trained before it, each older than g or among the W − 1 that passed it. η is the
bound in force when g was admitted: it may change from one admission to the next, up to `max_staleness`. Where that is 0
the staleness is 0 with any window: Eq. 3 admits no group that a step could train in place of one left behind.
"""

import math
from collections.abc import Iterable, Set
from typing import Self

from headway.errors import InvariantBroken


def resolve_window(configured: int, batch_groups: int) -> int | None:
    """The window as the config writes it (0 is one batch, −1 is unlimited) as a number of groups, None if unlimited."""
    if configured < 0:
        return None
    return configured or batch_groups


class StalenessControl:
    """Decides which group may be admitted and which may be taken, and keeps the ledger of all of them."""

    def __init__(self, batch_groups: int, max_staleness: int, window: int | None) -> None:
        if batch_groups < 1 or max_staleness < 0 or (window is not None and window < 1):
            given = f"batch_groups = {batch_groups}, max_staleness = {max_staleness}, window = {window}"
            raise ValueError(f"a batch and a window need a group, a staleness bound is 0 or more, not {given}")
        self.batch_groups = batch_groups
        self.max_staleness = max_staleness
        self.eta = max_staleness  # in force: what the next admission is decided with
        self.window = window
        self.num_admitted = 0
        self.num_dropped = 0
        self.num_trained = 0
        self._untaken: set[int] = set()
        self._taken: set[int] = set()
        # The window is [_oldest, _end); it holds _num_inside groups that are not dropped. Both ends only ever advance,
        # which is what makes every operation constant time on average.
        self._oldest = 0
        self._end = 0
        self._num_inside = 0
        self._dropped_ahead: set[int] = set()  # dropped groups that _oldest has not passed

    @classmethod
    def restore(
        cls,
        batch_groups: int,
        max_staleness: int,
        window: int | None,
        *,
        num_admitted: int,
        trained: Set[int],
        dropped: Set[int],
        taken: Set[int] = frozenset(),
    ) -> Self:
        """The state a record describes; a group in none of the three sets is untaken, whether finished or not."""
        control = cls(batch_groups, max_staleness, window)
        left = trained | dropped | taken
        if len(left) != len(trained) + len(dropped) + len(taken):
            raise InvariantBroken("the record lists a group under more than one of trained, dropped and taken")
        if left and (min(left) < 0 or max(left) >= num_admitted):
            raise InvariantBroken(f"the record lists a group that is not among the {num_admitted} it admitted")
        control.num_admitted = num_admitted
        control.num_trained = len(trained)
        control.num_dropped = len(dropped)
        control._untaken = set(range(num_admitted)) - left
        control._taken = set(taken)
        control._dropped_ahead = set(dropped)
        control._slide()
        control.check_ledger()
        return control

    @property
    def worst_staleness(self) -> int | None:
        """The largest staleness that can occur; None when an unlimited window leaves it without a bound."""
        if self.max_staleness == 0:
            return 0
        if self.window is None:
            return None
        return self.max_staleness + math.ceil((self.window - 1) / self.batch_groups)

    @property
    def num_untaken(self) -> int:
        """Groups admitted and not yet taken, finished or not."""
        return len(self._untaken)

    @property
    def num_taken(self) -> int:
        """Groups taken and not yet trained or dropped."""
        return len(self._taken)

    def may_admit(self, version: int) -> bool:
        """Eq. 3; `version` is the lowest one confirmed loaded by every engine that may serve the group."""
        return self.num_admitted - self.num_dropped < (version + self.eta + 1) * self.batch_groups

    def adapt(self, eta: int) -> None:
        """Decide admissions with another η from now on; groups that were admitted keep theirs."""
        if not 0 <= eta <= self.max_staleness:
            raise ValueError(f"η = {eta} lies outside 0 to max_staleness = {self.max_staleness}")
        self.eta = eta

    def admit(self, version: int) -> int:
        """Admit one group and return its id; ids are contiguous from 0."""
        if not self.may_admit(version):
            raise InvariantBroken(f"group {self.num_admitted} may not be admitted at version {version} (Eq. 3)")
        group = self.num_admitted
        self.num_admitted += 1
        self._untaken.add(group)
        self._slide()
        return group

    def is_untaken(self, group: int) -> bool:
        return group in self._untaken

    def may_take(self, group: int) -> bool:
        """Whether the group is untaken and inside the window; if it is, so is every older untaken group."""
        return group in self._untaken and group < self._end

    def take(self, group: int) -> None:
        if not self.may_take(group):
            state = "lies outside the window" if group in self._untaken else "is not there to be taken"
            raise InvariantBroken(f"group {group} {state}")
        self._untaken.remove(group)
        self._taken.add(group)
        self._slide()

    def trained(self, groups: Iterable[int]) -> None:
        """The taken groups of one training step became a version; the bound needs exactly B of them."""
        ids = set(groups)
        if len(ids) != self.batch_groups:
            raise InvariantBroken(f"a training step trains {self.batch_groups} groups, not {len(ids)}")
        if not ids <= self._taken:
            raise InvariantBroken(f"groups {sorted(ids - self._taken)} were trained without being taken, or twice")
        self._taken -= ids
        self.num_trained += len(ids)

    def drop(self, group: int) -> None:
        """A group leaves untrained, whether untaken or taken by a training step that was skipped."""
        if group in self._untaken:
            self._untaken.remove(group)
        elif group in self._taken:
            self._taken.remove(group)
        else:
            raise InvariantBroken(f"group {group} is dropped, but it is not in flight")
        self.num_dropped += 1
        if group >= self._oldest:
            self._dropped_ahead.add(group)
            self._num_inside -= group < self._end
        self._slide()

    def check_ledger(self) -> None:
        """Raise unless admitted = trained + dropped + in flight."""
        in_flight = len(self._untaken | self._taken)
        if self.num_admitted != self.num_trained + self.num_dropped + in_flight:
            parts = f"{self.num_trained} trained + {self.num_dropped} dropped + {in_flight} in flight"
            raise InvariantBroken(f"the ledger does not add up: {self.num_admitted} admitted, but {parts}")

    def _slide(self) -> None:
        """Move the window's start to the oldest untaken group, then its end as far as W allows."""
        while self._oldest < self.num_admitted and self._oldest not in self._untaken:
            if self._oldest in self._dropped_ahead:
                self._dropped_ahead.remove(self._oldest)
            elif self._oldest < self._end:
                self._num_inside -= 1
            self._oldest += 1
        self._end = max(self._end, self._oldest)
        limit = self.num_admitted if self.window is None else self.window
        while self._end < self.num_admitted and self._num_inside < limit:
            self._num_inside += self._end not in self._dropped_ahead
            self._end += 1
