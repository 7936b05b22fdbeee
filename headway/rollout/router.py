"""Which engine serves a group, as one rollout worker sees the engines, and how many of its requests are there at once.

A group stays on one engine, where its prompt's keys and values are computed once, until that engine is lost; then all
of the group goes on at another one. The choice is the engine with the fewest sequences: this worker's own, counted
exactly, and those of the other workers, as the engines' last looks told.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headway.codec import noun
from headway.engine.protocol import Engine
from headway.errors import DeadlineExceeded
from headway.types import RequestKey


@noun
class Shunned:
    """An engine that a rollout worker asks no more, and why; `life` tells its processes apart."""

    engine: str
    life: int
    reason: str


@noun
class Continued:
    """A request that went on elsewhere: with how many tokens of before, and how long it was nowhere."""

    engine: str
    tokens: int
    seconds: float


@noun
class RolloutStats:
    """What a rollout worker found out about engines; `continued` since the last look."""

    shunned: tuple[Shunned, ...]
    continued: tuple[Continued, ...]


class Gate:
    """Lets so many in at once, the others in their order; 0 is no limit."""

    def __init__(self) -> None:
        self.limit = 0
        self._num_inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def passed(self, urgent: bool) -> AsyncIterator[None]:
        """Inside, once there is room; the urgent do not wait."""
        if not urgent and (self._waiting or not self._has_room):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._leave()  # let in as it went away
                raise
        else:
            self._num_inside += 1
        try:
            yield
        finally:
            self._leave()

    @property
    def _has_room(self) -> bool:
        return not self.limit or self._num_inside < self.limit

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self._let_in()

    def _leave(self) -> None:
        self._num_inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._has_room:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_inside += 1
                turn.set_result(None)


@dataclass(eq=False)
class Post:
    """One life of one engine, as this worker sees it."""

    name: str
    life: int
    engine: Engine
    num_own: int = 0  # unfinished trajectories of this worker
    num_others: int = 0  # sequences of other workers
    gate: Gate = field(default_factory=Gate)
    trouble: str = ""  # why nothing is sent there any more
    distrusted: bool = False  # it answered nonsense: nothing it sampled for unfinished requests is kept
    leaving: bool = False  # asked to leave: gives back what it has sampled
    attempts: dict[str, "tuple[RequestKey, asyncio.Task[object]]"] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        return not self.trouble and not self.leaving

    def withdraw(self, reason: str, distrusted: bool = False) -> None:
        """Ask it no more; what runs there is given up and goes on elsewhere."""
        self.trouble, self.distrusted = self.trouble or reason, self.distrusted or distrusted
        self.gate.set_limit(0)
        for _, attempt in self.attempts.values():
            attempt.cancel()


class Router:
    """The engines that serve, for one rollout worker."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._posts: dict[str, Post] = {}
        self._changed = asyncio.Event()

    def set_engines(self, engines: Mapping[str, Engine], lives: Mapping[str, int], leaving: tuple[str, ...]) -> None:
        """Take over who serves now; an engine of the same life keeps what is known of it."""
        for name, post in list(self._posts.items()):
            if name not in engines or lives[name] != post.life:
                self._posts.pop(name).withdraw("it is gone")
        for name, engine in engines.items():
            post = self._posts.setdefault(name, Post(name, lives[name], engine))
            if name in leaving and not post.leaving:
                post.leaving = True
                post.gate.set_limit(0)
        self._changed.set()

    def set_loads(self, loads: Mapping[str, int], limits: Mapping[str, int]) -> None:
        """All workers' sequences by engine, as last seen, and how many this worker may have at each (0: no limit)."""
        for name, post in self._posts.items():
            post.num_others = max(0, loads.get(name, 0) - post.num_own)
            post.gate.set_limit(limits.get(name, 0) if post.serves else 0)

    @property
    def leaving(self) -> list[Post]:
        return [post for post in self._posts.values() if post.leaving]

    @property
    def shunned(self) -> tuple[Shunned, ...]:
        posts = self._posts.values()
        return tuple(Shunned(post.name, post.life, post.trouble) for post in posts if post.trouble)

    def least_loaded(self, group: int) -> Post | None:
        """The engine with the fewest sequences; among equals by turns, as groups are numbered."""
        posts = list(self._posts.values())
        first = group % max(1, len(posts))
        serving = [post for post in posts[first:] + posts[:first] if post.serves]
        return min(serving, key=lambda post: post.num_own + post.num_others, default=None)

    async def find(self, group: int) -> Post:
        """As `least_loaded`; while no engine serves, waits for one to come back."""
        try:
            async with asyncio.timeout(self._deadline_s):
                while (post := self.least_loaded(group)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            told = "; ".join(f"{post.name}: {post.trouble or 'it leaves'}" for post in self._posts.values())
            raise DeadlineExceeded(
                f"no engine served group {group} within {self._deadline_s:g} s ({told or 'none was there'})"
            ) from None
        return post


class Placement:
    """Where the trajectories of one group are generated: together, on one engine, until it serves no more."""

    def __init__(self, router: Router, group: int, size: int) -> None:
        self._router, self._group, self._num_left = router, group, size
        self._post: Post | None = None
        # Counted now, not when the first request is sent: the next group may be placed before that.
        self._move(router.least_loaded(group))

    async def post(self) -> Post:
        if self._post is None or not self._post.serves:
            found = await self._router.find(self._group)
            if self._post is None or not self._post.serves:  # else another of the group was faster
                self._move(found)
        assert self._post is not None
        return self._post

    def _move(self, post: Post | None) -> None:
        if self._post is not None:
            self._post.num_own -= self._num_left
        self._post = post
        if post is not None:
            post.num_own += self._num_left

    def done(self) -> None:
        """One trajectory has ended."""
        self._num_left -= 1
        if self._post is not None:
            self._post.num_own -= 1
