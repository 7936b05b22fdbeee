"""Which fault hits whom, when, in what kind of run: all of it is drawn from a seed and a number alone.

Starting a run costs far more than a fault does, so a run suffers several, one after the other, and each is a scenario
with a verdict of its own. Scenario n is the fault n % 4 of run n // 4.
"""

import random
from dataclasses import dataclass
from typing import Any

FAULTS_PER_RUN = 4
STEPS_PER_FAULT = 30
NUM_STEPS = FAULTS_PER_RUN * STEPS_PER_FAULT
OTHER_OUTCOME = {"outage", "poison", "fatal", "memory"}
"""Faults after which other groups are trained, or other micro-batches: also at η = 0, other weights are the end."""
BATCH_GROUPS = 3

LOCAL: dict[str, str] = {
    "engine": "kill hang slow corrupt partition deaf cut join kill-starting kill-evaluating kill-ending kill-resuming",
    "rollout": "kill hang slow partition cut kill-starting kill-evaluating",
    "reward": "kill hang slow partition cut outage kill-starting kill-ending",
    "verifier": "kill hang corrupt kill-evaluating",
    "request": "poison",
    "workflow": "fatal",
    "trainer": "kill hang slow partition cut full memory kill-starting kill-saving kill-ending kill-resuming",
    "rank": "kill hang kill-saving",
    "controller": "kill hang slow interrupt terminate hangup"
    " kill-starting kill-saving kill-evaluating kill-ending kill-resuming",
    "weights": "corrupt cut",
    "checkpoint": "corrupt torn",
    "record": "torn",
    "disk": "full",
}
"""Who can be hit, and by what: a process ends (kill), stands still (hang, slow), answers nonsense (corrupt), its
channels lose all bytes (partition; deaf: all but the controller's) or break (cut); a file is damaged (corrupt), ends
early (torn), cannot be written (full). An engine joins late and another is lost (join); every verdict fails for a while
(outage); one request has log-probs that are no numbers on every engine (poison); one group ends the process of every
rollout worker that runs it (fatal); training runs out of memory, and a process is killed when it has gone on (memory).
A kill may come at a moment: while the run starts, resumes, saves a checkpoint, evaluates or ends."""

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
    ("local", "embedded"): (7, LOCAL),
    ("ray", "embedded"): (2, RAY),
    ("local", "vllm"): (1, VLLM),
    ("ray", "vllm"): (0, VLLM_ON_RAY),
}
"""Each kind of run: how many runs of ten are of it, and what befalls it; of those on vLLM every third is on Ray."""

_TEN = [lot for lot, (share, _) in LOTS.items() for _ in range(share)]


@dataclass(frozen=True)
class Run:
    """A kind of run, and its size."""

    seed: int
    number: int
    runtime: str
    engine: str
    eta: int
    engines: int
    rollouts: int
    ranks: int
    transport: str
    kv_on_swap: str
    checkpoint_every: int
    has_small_disk: bool
    evaluates: bool


@dataclass(frozen=True)
class Scenario:
    """One fault in a run."""

    run: Run
    number: int
    victim: str
    fault: str
    after: int  # number of events, health checks not counted, from when the run is well again
    delay_s: float  # and then so long
    draw: int  # for whatever the fault itself has to choose

    @property
    def kind(self) -> tuple[str, str, str, str]:
        return self.run.runtime, self.run.engine, self.victim, self.fault

    @property
    def is_last(self) -> bool:
        return self.number % FAULTS_PER_RUN == FAULTS_PER_RUN - 1

    @property
    def way(self) -> str:
        """The fault, without its moment."""
        return self.fault.split("-")[0]

    @property
    def moment(self) -> str:
        """What the run is doing when the fault comes, if that is not a matter of chance."""
        return self.fault.partition("-")[2]

    @property
    def name(self) -> str:
        return f"{self.run.runtime}/{self.run.engine}: {self.victim} {self.fault}"

    @property
    def command(self) -> str:
        return f"make chaos CHAOS='--seed {self.run.seed} --scenario {self.number}'"


def has_one_outcome(scenarios: list[Scenario]) -> bool:
    """Whether the run comes to the weights that every undisturbed run at η = 0 comes to."""
    run = scenarios[0].run
    is_plain = OTHER_OUTCOME.isdisjoint(one.fault for one in scenarios)
    return is_plain and run.eta == 0 and run.engine == "embedded" and run.ranks == 1


def draw_run(seed: int, number: int) -> list[Scenario]:
    """The scenarios of one run."""
    lot = lot_of(seed, number)
    # Every fault of the lot comes up once before any comes a second time.
    place = FAULTS_PER_RUN * sum(lot_of(seed, earlier) == lot for earlier in range(number))
    hits = sorted((_hit(seed, lot, place + turn) for turn in range(FAULTS_PER_RUN)), key=_turn)
    rng = random.Random(f"{seed} run {number}")
    run = Run(
        seed=seed,
        number=number,
        runtime=lot[0],
        engine=lot[1],
        eta=rng.choice((0, 1, 2)),
        engines=1 if lot[1] == "vllm" else rng.choice((1, 2)),
        rollouts=rng.choice((1, 2)),
        ranks=2 if any(victim == "rank" for victim, _ in hits) else 1,
        transport=_transport(rng, lot, hits),
        kv_on_swap=rng.choice(("recompute", "keep", "drain")),
        checkpoint_every=rng.choice((1, 2, 5)),
        has_small_disk=("disk", "full") in hits,
        evaluates=any(fault.endswith("-evaluating") for _, fault in hits),
    )
    return [_scenario(rng, run, turn, *hit) for turn, hit in enumerate(hits)]


def _scenario(rng: random.Random, run: Run, turn: int, victim: str, fault: str) -> Scenario:
    after, delay_s, draw = rng.randrange(0, 60), rng.uniform(0.0, 0.05), rng.randrange(1 << 30)
    # One first fault in four hits a run that is still starting.
    after = 0 if turn == 0 and draw % 4 == 0 else after
    return Scenario(
        run,
        number=run.number * FAULTS_PER_RUN + turn,
        victim=victim,
        fault=fault,
        after=after,
        delay_s=delay_s,
        draw=draw,
    )


def lot_of(seed: int, number: int) -> tuple[str, str]:
    ten, place = divmod(number, len(_TEN))
    lot = _shuffled(_TEN, f"{seed} ten {ten}")[place]
    return ("ray", "vllm") if lot == ("local", "vllm") and ten % 3 == 2 else lot


def _hit(seed: int, lot: tuple[str, str], place: int) -> tuple[str, str]:
    kinds = [(victim, fault) for victim, faults in LOTS[lot][1].items() for fault in faults.split()]
    again, index = divmod(place, len(kinds))
    return _shuffled(kinds, f"{seed} {lot} {again}")[index]


def _turn(hit: tuple[str, str]) -> int:
    """A kill during the start comes first where it can, one at the end last."""
    moment = hit[1].partition("-")[2]
    return {"starting": 0, "ending": 2}.get(moment, 1)


def _transport(rng: random.Random, lot: tuple[str, str], hits: list[tuple[str, str]]) -> str:
    drawn = rng.choice(("auto", "stream", "disk"))
    if ("weights", "cut") in hits:
        return "stream"
    # Where nodes differ, a file that all of them see is a matter of how they are set up.
    return drawn if lot == ("local", "embedded") else "auto"


def _shuffled(items: list[Any], seed: str) -> list[Any]:
    return random.Random(seed).sample(items, len(items))


def draw(seed: int, number: int) -> list[Scenario]:
    """What has to be played to repeat the scenario of that number: it, after those before it in its run."""
    run, turn = divmod(number, FAULTS_PER_RUN)
    return draw_run(seed, run)[: turn + 1]


def draw_runs(
    seed: int, num: int, runnable: set[tuple[str, str]], only: str = "", first: int = 0
) -> list[list[Scenario]]:
    """The next `num` scenarios that can be played here, by run; of those whose names have every word of `only`, or of
    one of the alternatives that it names with `|` between them."""
    ways = [way.split() for way in only.split("|")]
    runs: list[list[Scenario]] = []
    for scenarios in (draw_run(seed, number) for number in range(first // FAULTS_PER_RUN, first + 1000 + 10 * num)):
        later = [one for one in scenarios if one.number >= first]
        fitting = [one for one in later if any(all(word in one.name for word in way) for way in ways)]
        if (scenarios[0].run.runtime, scenarios[0].run.engine) in runnable and fitting:
            runs.append(fitting[: num - sum(map(len, runs))])
        if sum(map(len, runs)) == num:
            break
    return runs
