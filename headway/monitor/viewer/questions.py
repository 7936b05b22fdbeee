"""Questions that are asked of every run, each answered as a table: a note, headings, and rows that link to groups."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from headway.monitor.viewer.index import STATES, GroupFacts
from headway.monitor.viewer.opened import OpenRun

Answer = dict[str, Any]
MOST_ROWS = 100
TEXT_CHARACTERS = 400


def _answer(note: str, headings: list[str], rows: list[dict[str, Any]]) -> Answer:
    return {"note": note, "headings": headings, "rows": rows[:MOST_ROWS]}


def _trained(run: OpenRun) -> list[tuple[int, GroupFacts]]:
    return [(group, facts) for group, facts in enumerate(run.index.groups) if facts.step is not None]


def _rewards(facts: GroupFacts) -> list[float]:
    return [reward for reward in (facts.finished.rewards if facts.finished else ()) if reward is not None]


def _first_text(run: OpenRun, group: int) -> str:
    found = run.group(group)
    return run.completion(found.trajectories[0])[:TEXT_CHARACTERS] if found and found.trajectories else ""


def _by_prompt(run: OpenRun) -> dict[int, list[tuple[int, GroupFacts]]]:
    found: dict[int, list[tuple[int, GroupFacts]]] = defaultdict(list)
    for group, facts in _trained(run):
        found[facts.prompt].append((group, facts))
    return found


def then_and_now(run: OpenRun) -> Answer:
    """The first and the last completion of prompts that were seen more than once, the largest gain first."""
    pairs = []
    for prompt, seen in _by_prompt(run).items():
        first, last = seen[0], seen[-1]
        one, other = _rewards(first[1]), _rewards(last[1])
        if len(seen) > 1 and one and other:
            pairs.append((sum(other) / len(other) - sum(one) / len(one), prompt, first, last))
    rows = []
    for gain, prompt, first, last in sorted(pairs, key=lambda pair: -pair[0])[:MOST_ROWS]:
        texts = [_first_text(run, group) for group, _ in (first, last)]
        rows.append({"group": last[0], "cells": [prompt, gain, first[1].step, texts[0], last[1].step, texts[1]]})
    headings = ["row", "gain in mean reward", "first step", "it wrote", "last step", "and now"]
    return _answer("Prompts that were trained more than once.", headings, rows)


def wrong_to_right(run: OpenRun) -> Answer:
    """Prompts whose first group earned the least and a later one the most that the run ever paid."""
    rewards = run.index.table["reward"]
    known = rewards[~np.isnan(rewards)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    rows: list[dict[str, Any]] = []
    for prompt, seen in _by_prompt(run).items():
        if len(seen) < 2 or low == high or max(_rewards(seen[0][1]), default=high) > low:
            continue
        right = next(((g, f) for g, f in seen[1:] if max(_rewards(f), default=low) == high), None)
        if right is not None:
            cells = [prompt, seen[0][1].step, _first_text(run, seen[0][0]), right[1].step, _first_text(run, right[0])]
            rows.append({"group": right[0], "cells": cells})
    rows.sort(key=lambda row: row["cells"][3])
    note = f"Prompts whose first group earned {low:g} throughout and that later earned {high:g}, in order of that step."
    return _answer(note, ["row", "first step", "it wrote", "solved at step", "then it wrote"], rows)


def never_solved(run: OpenRun) -> Answer:
    return _constant(run, best=False)


def always_solved(run: OpenRun) -> Answer:
    return _constant(run, best=True)


def _constant(run: OpenRun, best: bool) -> Answer:
    rewards = run.index.table["reward"]
    known = rewards[~np.isnan(rewards)]
    wanted = (float(known.max()) if best else float(known.min())) if len(known) else 0.0
    rows: list[dict[str, Any]] = []
    for prompt, seen in _by_prompt(run).items():
        paid = [reward for _, facts in seen for reward in _rewards(facts)]
        if paid and all(reward == wanted for reward in paid):
            cells = [prompt, len(seen), len(paid), _first_text(run, seen[-1][0]) if len(rows) < MOST_ROWS else ""]
            rows.append({"group": seen[-1][0], "cells": cells})
    rows.sort(key=lambda row: -row["cells"][1])
    note = f"Prompts all of whose completions earned {wanted:g}: {len(rows)}. They teach nothing."
    return _answer(note, ["row", "groups", "completions", "the last one"], rows)


def _extreme(run: OpenRun, column: str, note: str) -> Answer:
    table = run.index.table
    rows = []
    for row in np.argsort(-table[column], kind="stable")[:MOST_ROWS].tolist():
        group, index = int(table["group"][row]), int(table["trajectory"][row])
        cells = [group, index, float(table[column][row]), float(table["reward"][row]), STATES[table["state"][row]]]
        rows.append({"group": group, "trajectory": index, "cells": [None if cell != cell else cell for cell in cells]})
    return _answer(note, ["group", "#", column, "reward", "state"], rows)


def longest(run: OpenRun) -> Answer:
    return _extreme(run, "length", "The longest trajectories, in sampled tokens.")


def stalest(run: OpenRun) -> Answer:
    return _extreme(run, "staleness", "The trajectories trained with the oldest tokens, in versions.")


def why_dropped(run: OpenRun) -> Answer:
    rows = [
        {"group": group, "cells": [group, facts.prompt, facts.reason, _why(run, facts)]}
        for group, facts in enumerate(run.index.groups)
        if facts.state == "dropped"
    ]
    counts = ", ".join(f"{count} × {reason}" for reason, count in run.index.dropped.most_common()) or "none"
    return _answer(f"Groups dropped: {counts}.", ["group", "row", "reason", "first failure"], rows)


def _why(run: OpenRun, facts: GroupFacts) -> str:
    return facts.finished.failures[0].reason if facts.finished and facts.finished.failures else ""


QUESTIONS: dict[str, tuple[str, Callable[[OpenRun], Answer]]] = {
    "then_and_now": ("What did it write first, and what now?", then_and_now),
    "wrong_to_right": ("Which prompts went from wrong to right?", wrong_to_right),
    "never_solved": ("Never solved", never_solved),
    "always_solved": ("Always solved", always_solved),
    "longest": ("Longest", longest),
    "stalest": ("Stalest", stalest),
    "why_dropped": ("Why were groups dropped?", why_dropped),
}
