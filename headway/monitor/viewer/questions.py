"""Questions that are asked of every run, each answered as a table: a note, headings, and rows that link to groups."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headway.monitor.reader import Prompted
from headway.monitor.viewer.index import STATES, OpenRun
from headway.record.run import GroupState
from headway.types import DropReason, Trajectory

Answer = dict[str, Any]
MOST_ROWS = 100
TEXT_CHARACTERS = 400
SCANNED_STEPS = 50
"""The last steps in which tokens are looked for: each is a read of the record."""


def _answer(note: str, headings: list[str], rows: list[dict[str, Any]]) -> Answer:
    return {"note": note, "headings": headings, "rows": rows[:MOST_ROWS]}


def _rewards(group: GroupState) -> list[float]:
    return [reward for reward in group.rewards if reward is not None]


def _texts(run: OpenRun, group: int, trajectory: int = 0) -> list[str]:
    """The end of a group's prompt, and the start of one of its completions."""
    found = run.reader.group(group)
    return [found.prompt[-TEXT_CHARACTERS:], found.texts.get(trajectory, "")[:TEXT_CHARACTERS]]


def _by_prompt(run: OpenRun) -> dict[int, list[GroupState]]:
    """The trained groups of each prompt, in order of admission."""
    found: dict[int, list[GroupState]] = defaultdict(list)
    for group in run.run.groups:
        if group.is_trained(run.run.num_trained):
            found[group.prompt].append(group)
    return found


def then_and_now(run: OpenRun) -> Answer:
    """The first and the last completion of prompts that were answered more than once, the largest gain first."""
    pairs = [(seen[-1].reward - seen[0].reward, seen[0], seen[-1]) for seen in _seen_again(run)]
    pairs.sort(key=lambda pair: (-pair[0], pair[1].row))
    rows = []
    for gain, first, last in pairs[:MOST_ROWS]:
        cells = [first.kind, first.row, last.prompt(run), gain, first.version, first.text(run), last.version]
        rows.append({**last.link, "cells": [*cells, last.text(run)]})
    headings = ["of", "row", "prompt", "gain in reward", "at version", "it wrote", "at version", "and now"]
    return _answer(f"{len(pairs)} prompts were answered more than once; the largest gains first.", headings, rows)


def wrong_to_right(run: OpenRun) -> Answer:
    """Prompts first answered with the least reward and later with the most that the run paid, in order of version."""
    everything = list(_seen_again(run))
    rewards = [one.reward for seen in everything for one in seen]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    found = []
    for seen in everything:
        right = next((one for one in seen[1:] if one.reward == high), None)
        if seen[0].reward == low < high and right is not None:
            found.append((seen[0], right))
    found.sort(key=lambda pair: (pair[1].version, pair[1].row))
    rows: list[dict[str, Any]] = []
    for first, right in found[:MOST_ROWS]:
        cells = [first.kind, first.row, right.prompt(run), first.version, first.text(run), right.version]
        cells.append(right.text(run))
        rows.append({**right.link, "cells": cells})
    note = f"{len(found)} prompts earned {low:g} at first and {high:g} later, in order of the version that solved them."
    if not everything:
        note = "No prompt was answered twice: it takes an evaluation ([evaluate] and task.eval), or a second epoch."
    headings = ["of", "row", "prompt", "wrong at version", "it wrote", "right at version", "then it wrote"]
    return _answer(note, headings, rows)


@dataclass(frozen=True)
class Seen:
    """One prompt at one time: a held-out problem in an evaluation, or a trained group."""

    row: int
    version: int
    reward: float
    group: int
    evaluation: int | None = None

    @property
    def kind(self) -> str:
        return "trained" if self.evaluation is None else "held out"

    @property
    def link(self) -> dict[str, int]:
        place = {} if self.evaluation is None else {"evaluation": self.evaluation}
        return {"group": self.group, **place}

    def prompt(self, run: OpenRun) -> str:
        return self._read(run).prompt[-TEXT_CHARACTERS:]

    def text(self, run: OpenRun) -> str:
        return self._read(run).texts.get(0, "")[:TEXT_CHARACTERS]

    def _read(self, run: OpenRun) -> Prompted:
        if self.evaluation is None:
            return run.reader.group(self.group)
        return run.reader.prompted(run.reader.problem(self.evaluation, self.group))


def _seen_again(run: OpenRun) -> Iterator[list[Seen]]:
    """Each prompt that was answered more than once, in order of version."""
    problems: dict[int, list[Seen]] = defaultdict(list)
    for number, event in enumerate(run.evaluations):
        for problem, reward in run.scores(number).items():
            problems[problem].append(Seen(problem, event.version, reward, problem, number))
    yield from (seen for seen in problems.values() if len(seen) > 1)
    for prompt, groups in _by_prompt(run).items():
        paid = [(group, rewards) for group in groups if (rewards := _rewards(group))]
        if len(paid) > 1:
            yield [Seen(prompt, group.version, sum(r) / len(r), group.id) for group, r in paid]


def _constant(run: OpenRun, best: bool) -> Answer:
    rewards = run.table["reward"]
    known = rewards[~np.isnan(rewards)]
    wanted = (float(known.max()) if best else float(known.min())) if len(known) else 0.0
    rows: list[dict[str, Any]] = []
    for prompt, seen in _by_prompt(run).items():
        paid = [reward for group in seen for reward in _rewards(group)]
        if paid and all(reward == wanted for reward in paid):
            rows.append({"group": seen[-1].id, "cells": [prompt, len(seen), len(paid)]})
    rows.sort(key=lambda row: -row["cells"][1])
    for row in rows[:MOST_ROWS]:
        row["cells"] += _texts(run, row["group"])
    note = f"{len(rows)} prompts of training whose completions all earned {wanted:g}: equal rewards teach nothing."
    return _answer(note, ["row", "groups", "completions", "prompt", "one of the last completions"], rows)


def _extreme(run: OpenRun, column: str, note: str) -> Answer:
    table = run.table
    rows = []
    for row in np.argsort(-table[column], kind="stable")[:MOST_ROWS].tolist():
        group, index = int(table["group"][row]), int(table["trajectory"][row])
        figures = [group, index, float(table[column][row]), float(table["reward"][row])]
        cells = [None if figure != figure else figure for figure in figures] + [STATES[table["state"][row]]]
        rows.append({"group": group, "trajectory": index, "cells": cells + _texts(run, group, index)})
    title = {"length": "tokens"}.get(column, column)
    return _answer(note, ["group", "trajectory", title, "reward", "state", "prompt", "completion"], rows)


def down_weighted(run: OpenRun) -> Answer:
    """The trained tokens whose applied importance weight is smallest, in the last steps; masked ones have none."""
    found: list[tuple[float, int, list[int], int]] = []  # weight, step, source, which of its trained tokens
    recorded = [step.event.version for step in run.run.steps if step.event.tokens_at is not None][-SCANNED_STEPS:]
    for step in recorded:
        tokens = run.reader.trained_tokens(step)
        assert tokens is not None
        weights, ends = np.where(tokens.weights > 0, tokens.weights, np.inf), np.cumsum(tokens.counts)
        for token in np.argsort(weights, kind="stable")[: MOST_ROWS // 2].tolist():
            sample = int(np.searchsorted(ends, token, side="right"))
            source = tokens.sources[3 * sample : 3 * sample + 3].tolist()
            found.append((float(weights[token]), step, source, token - int(ends[sample] - tokens.counts[sample])))
    rows = []
    for weight, step, (number, index, part), place in sorted(found)[:MOST_ROWS]:
        group = run.reader.load(number)
        assert group is not None
        (trajectory,) = (one for one in group.trajectories if one.index == index)
        sequence = trajectory.sequences[part]
        position = int(np.flatnonzero(sequence.loss_mask)[place])
        token = sum(len(one.tokens) for one in trajectory.sequences[:part]) + position
        text, before = (
            run.reader.texts.text(sequence.tokens[a : position + b].tolist()) for a, b in ((position, 1), (0, 0))
        )
        cells = [weight, text, before[-40:], step, number, index, int(sequence.versions[position])]
        rows.append({"group": number, "trajectory": index, "token": token, "cells": cells})
    note = (
        f"The smallest importance weights π_prox/π_behav of the last {len(recorded)} steps: what the policy left since."
    )
    return _answer(note, ["weight", "token", "text before", "step", "group", "trajectory", "version"], rows)


def swaps(run: OpenRun) -> Answer:
    """Completions that new weights interrupted, the newest first, with the token at which each swap took effect."""
    rows: list[dict[str, Any]] = []
    spanning = [group.id for group in run.run.groups if group.oldest != group.newest]
    for number in reversed(spanning):
        group = run.reader.load(number)
        for trajectory in group.trajectories if group else ():
            rows += _swaps_of(run, number, trajectory)
        if len(rows) >= MOST_ROWS:
            break
    headings = ["group", "trajectory", "versions", "tokens before", "text before", "text after"]
    note = f"{len(spanning)} groups have tokens of several versions, the newest first. A row links to the swap."
    return _answer(note, headings, rows)


def _swaps_of(run: OpenRun, group: int, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    start = 0
    for sequence in trajectory.sequences:
        places = np.flatnonzero(sequence.versions >= 0)
        versions = sequence.versions[places]
        for place in (np.flatnonzero(np.diff(versions)) + 1).tolist():
            before, after = (
                run.reader.texts.text(part.tolist()) for part in np.split(sequence.tokens[places], [place])
            )
            change = f"{versions[place - 1]} → {versions[place]}"
            link = {"group": group, "trajectory": trajectory.index, "token": start + int(places[place])}
            yield {**link, "cells": [group, trajectory.index, change, place, before[-40:], after[:40]]}
        start += len(sequence.tokens)


def why_dropped(run: OpenRun) -> Answer:
    groups = [run.run.groups[number] for number in run.run.dropped]
    rows = [
        {"group": one.id, "cells": [one.id, one.prompt, one.dropped, one.failures[0].reason if one.failures else ""]}
        for one in groups
    ]
    counts = Counter(run.run.dropped.values()).most_common()
    told = "; ".join(f"{count} × {reason}: {DROPPED_BECAUSE[DropReason(reason)]}" for reason, count in counts)
    return _answer(f"Groups dropped: {told or 'none'}.", ["group", "row", "reason", "first failure"], rows)


DROPPED_BECAUSE = {
    DropReason.FAILED: "no trajectory survived its workflow or its verifier",
    DropReason.SKIPPED: "the training step that took them was skipped: not finite, or everything masked",
    DropReason.TOO_OLD: "a token was older than the version they were admitted at",
    DropReason.ZERO_VARIANCE: "all rewards are equal, and algorithm.drop_zero_variance replaces such groups",
    DropReason.SUCCESS_RATE: "too few or too many succeeded (algorithm.success_low and success_high)",
    DropReason.RESTING: "the last group of the prompt was replaced, and algorithm.rest_epochs passes over it",
}


_LONGEST = "The longest trajectories, in sampled tokens."
_STALEST = "The trajectories trained with the oldest tokens, in versions."
QUESTIONS: dict[str, tuple[str, Callable[[OpenRun], Answer]]] = {
    "then_and_now": ("What did it write first, and what now?", then_and_now),
    "wrong_to_right": ("Which prompts went from wrong to right?", wrong_to_right),
    "swaps": ("Where did weights swap?", swaps),
    "never_solved": ("Which prompts were never solved?", partial(_constant, best=False)),
    "always_solved": ("Which were always solved?", partial(_constant, best=True)),
    "longest": ("Longest completions", partial(_extreme, column="length", note=_LONGEST)),
    "stalest": ("Stalest completions", partial(_extreme, column="staleness", note=_STALEST)),
    "down_weighted": ("Most down-weighted tokens", down_weighted),
    "why_dropped": ("Why were groups dropped?", why_dropped),
}
