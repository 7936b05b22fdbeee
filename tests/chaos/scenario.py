"""Which fault hits whom, when, in what kind of run: everything of a scenario is drawn from its seed and number alone."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

NUM_STEPS, BATCH_GROUPS = 6, 3

LOCAL: dict[str, str] = {
    "engine": "kill hang slow corrupt partition deaf cut",
    "rollout": "kill hang slow partition cut",
    "reward": "kill hang slow partition cut",
    "verifier": "kill hang corrupt",
    "trainer": "kill hang slow partition cut full",
    "rank": "kill hang",
    "controller": "kill hang slow",
    "weights": "corrupt cut",
    "checkpoint": "corrupt torn",
    "record": "torn",
    "disk": "full",
}
"""Who can be hit, and by what: a process stops (kill), stands still (hang, slow), answers nonsense (corrupt), its
channels lose all bytes (partition; deaf: all but the controller's) or break (cut); a file is damaged or half-written."""

RAY: dict[str, str] = {
    "engine": "kill hang corrupt partition",
    "rollout": "kill hang",
    "reward": "kill slow",
    "trainer": "kill hang partition",
    "weights": "corrupt cut",
    "driver": "kill",
    "keeper": "kill",
    "controller": "kill",
}

VLLM: dict[str, str] = {
    "engine": "kill corrupt deaf",
    "server": "kill hang slow",
    "rollout": "kill hang",
    "reward": "kill",
    "trainer": "kill",
    "weights": "corrupt",
    "controller": "kill",
}

VLLM_ON_RAY: dict[str, str] = {
    "engine": "kill",
    "server": "kill",
    "rollout": "kill",
    "trainer": "kill",
    "controller": "kill",
}

LOTS: dict[tuple[str, str], tuple[int, dict[str, str]]] = {
    ("local", "embedded"): (14, LOCAL),
    ("ray", "embedded"): (3, RAY),
    ("local", "vllm"): (2, VLLM),
    ("ray", "vllm"): (1, VLLM_ON_RAY),
}
"""Each kind of run: how many of twenty scenarios are of it, and what befalls it."""

_ROUND = [lot for lot, (share, _) in LOTS.items() for _ in range(share)]


@dataclass(frozen=True)
class Scenario:
    """One fault in one run."""

    seed: int
    number: int
    runtime: str
    engine: str
    victim: str
    fault: str
    at: float  # when, as a share of the run's expected events
    delay_s: float  # and how long after that event
    eta: int
    engines: int
    rollouts: int
    ranks: int
    transport: str
    kv_on_swap: str
    checkpoint_every: int
    draw: int  # for whatever the fault itself has to choose

    @property
    def kind(self) -> tuple[str, str, str, str]:
        return self.runtime, self.engine, self.victim, self.fault

    @property
    def name(self) -> str:
        return f"{self.runtime}/{self.engine}: {self.victim} {self.fault}"

    @property
    def num_events(self) -> int:
        """After how many events, looks not counted, it happens."""
        a_step = 2 * BATCH_GROUPS + 2 + self.engines
        return 1 + int(self.at * NUM_STEPS * a_step)

    @property
    def command(self) -> str:
        return f"make chaos CHAOS='--seed {self.seed} --scenario {self.number}'"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def draw(seed: int, number: int) -> Scenario:
    """The scenario of that number; it depends on nothing else."""
    turn, place = divmod(number, len(_ROUND))
    runtime, engine = lot = _shuffled(_ROUND, f"{seed} round {turn}")[place]
    share, faults = LOTS[lot]
    before = turn * share + _shuffled(_ROUND, f"{seed} round {turn}")[:place].count(lot)
    kinds = [(victim, fault) for victim, listed in faults.items() for fault in listed.split()]
    again, index = divmod(before, len(kinds))
    victim, fault = _shuffled(kinds, f"{seed} {lot} {again}")[index]
    rng = random.Random(f"{seed} scenario {number}")
    return Scenario(
        seed=seed,
        number=number,
        runtime=runtime,
        engine=engine,
        victim=victim,
        fault=fault,
        at=rng.uniform(0.0, 0.8),
        delay_s=rng.uniform(0.0, 0.05),
        eta=rng.choice((0, 1, 2)),
        engines=1 if engine == "vllm" else rng.choice((1, 2)),
        rollouts=rng.choice((1, 1, 2)),
        ranks=2 if victim == "rank" else 1,
        transport=_transport(rng, runtime, engine, victim, fault),
        kv_on_swap=rng.choice(("recompute", "keep", "drain")),
        checkpoint_every=rng.choice((1, 2, 3)),
        draw=rng.randrange(1 << 30),
    )


def _transport(rng: random.Random, runtime: str, engine: str, victim: str, fault: str) -> str:
    drawn = rng.choice(("auto", "stream", "disk"))
    if (victim, fault) == ("weights", "cut"):  # of a stream
        return "stream"
    # A file that must be seen by every node is a matter of how they are set up.
    return "auto" if runtime == "ray" or engine == "vllm" else drawn


def _shuffled(items: list[Any], seed: str) -> list[Any]:
    return random.Random(seed).sample(items, len(items))


def scenarios(seed: int, count: int, runnable: set[tuple[str, str]], only: str = "") -> list[Scenario]:
    """The first `count` that can run here and whose name contains every word of `only`."""
    found: list[Scenario] = []
    for scenario in _endless(seed):
        if len(found) == count:
            break
        if (scenario.runtime, scenario.engine) in runnable and all(word in scenario.name for word in only.split()):
            found.append(scenario)
        if scenario.number > 1000 + 100 * count:
            break  # nothing is of that name
    return found


def _endless(seed: int) -> Iterator[Scenario]:
    number = 0
    while True:
        yield draw(seed, number)
        number += 1


def in_runs(drawn: list[Scenario], most: int = 6) -> list[list[Scenario]]:
    """Who shares a run: one scenario each; on vLLM, whose servers take long to start, several one after the other.

    A controller that is killed ends the run it was in, so it comes last."""
    runs: list[list[Scenario]] = []
    for lot in LOTS:
        own = [scenario for scenario in drawn if (scenario.runtime, scenario.engine) == lot]
        size = most if lot[1] == "vllm" else 1
        parts = [own[start : start + size] for start in range(0, len(own), size)]
        runs += [sorted(part, key=lambda one: (one.victim == "controller", one.number)) for part in parts]
    return sorted(runs, key=lambda run: run[0].number)
