"""Accounts for every generated token: trained, waiting, in flight, dropped or lost."""

from collections import Counter

from headway.errors import InvariantBroken
from headway.record.events import Dropped, Finished, Resumed, Stats, TokenCounts, Trained


class TokenAccount:
    """Generated tokens by fate: generated = trained + waiting + in flight + dropped + lost, at every moment.

    Tokens that the engines counted and that are in no finished or dropped group are in flight: while the run goes on
    they are being generated, or were lost with a worker; when the run has finished or was resumed they are lost; when
    it ended early they stay unfinished. Tokens sampled after an engine's last stats event count when the next one or
    their group comes; those that an engine took with it when it died, and no rollout worker had received, are unknown.
    """

    def __init__(self) -> None:
        self.finished = 0  # in trajectories of finished groups
        self.trained = 0
        self.waiting = 0  # of finished groups that were neither trained nor dropped
        self.lost = 0
        self.recomputed = 0  # tokens whose keys and values were computed again; work, not a fate
        self.dropped: Counter[str] = Counter()
        self.lost_engines = False  # then what they sampled after their last stats event was never counted
        self._dropped_finished = 0  # the part of `dropped` that is also in `finished`
        self._counted = 0  # by engines, in this incarnation of the run
        self._settled = 0  # finished, dropped or lost, in this incarnation
        self._earlier = 0  # generated in earlier incarnations

    @property
    def in_flight(self) -> int:
        return max(0, self._counted - self._settled)

    @property
    def generated(self) -> int:
        return self._earlier + self._settled + self.in_flight

    def on_stats(self, event: Stats) -> None:
        self._counted += event.generated
        self.recomputed += event.recomputed

    def on_finished(self, event: Finished, tokens: int) -> None:
        self.finished += tokens
        self.waiting += tokens
        self._settled += tokens
        for failure in event.failures:
            self.dropped[f"trajectory: {failure.cause}"] += failure.tokens
            self._settled += failure.tokens

    def on_trained(self, event: Trained, tokens: int) -> None:
        """`tokens` are those of its groups, which the event's own count must equal."""
        self.trained += event.tokens
        self.waiting -= tokens

    def on_dropped(self, event: Dropped, finished: int, all_finished: bool) -> None:
        """`finished` are the tokens of those groups that had finished; of the others the event alone knows."""
        self.drop_finished(event.reason, finished)
        if not all_finished:
            unfinished = max(0, event.tokens - finished)
            self.dropped[event.reason] += unfinished
            self._settled += unfinished

    def drop_finished(self, reason: str, tokens: int) -> None:
        self.dropped[reason] += tokens
        self.waiting -= tokens
        self._dropped_finished += tokens

    def on_resumed(self, event: Resumed) -> None:
        self._lose(max(self.in_flight, event.lost_tokens))
        self._earlier += self._settled
        self._settled = self._counted = 0
        self.lost_engines = False

    def finish(self) -> None:
        """The run has finished: tokens in no group are lost."""
        self._lose(self.in_flight)

    def _lose(self, tokens: int) -> None:
        self.lost += tokens
        self._settled += tokens

    def check(self, finished: bool) -> None:
        """Raise unless every token has exactly one fate; `finished`: the run has come to its end."""
        parts = {"trained": self.trained, "waiting": self.waiting, "dropped": self._dropped_finished}
        if self.finished != sum(parts.values()):
            listed = ", ".join(f"{tokens} {fate}" for fate, tokens in parts.items())
            raise InvariantBroken(f"token accounting does not add up: {self.finished} tokens finished, but {listed}")
        missing = self._settled - self._counted
        if finished and self._counted and not self.lost_engines and missing > 0:
            raise InvariantBroken(
                f"token accounting does not add up: groups hold {missing} tokens that no engine generated"
            )

    def counts(self) -> TokenCounts:
        return TokenCounts(
            generated=self.generated,
            trained=self.trained,
            waiting=self.waiting,
            in_flight=self.in_flight,
            dropped=dict(sorted(self.dropped.items())),
            lost=self.lost,
            recomputed=self.recomputed,
        )
