"""Tasks of `reasoning-gym`: prompts by the thousand, made from a seed, each scored by its task's own rules.

A file of yours gives the rows, and `verify` here scores them:

    from headway.tasks.verifiers import gym
    def rows(): return gym.rows("chain_sum", size=2000, seed=1)

The answer is the marked one (`headway.tasks.verifiers.answers`), else the last line of the text.

0.0 to 1.0: what the task's own `score_answer` says, in a process that is killed at a deadline (then 0.0), changes no
file and reaches no network. Some tasks evaluate what they are given as Python: here they get the value of plain
expressions, and no code is run (`headway.tasks.verifiers.expressions`). 0.0, too, where scoring raises on the
text but not on the reference answer. An error: the row names no task, or its own answer cannot be scored.
"""

import sys
from functools import lru_cache
from typing import Any

from headway.errors import ConfigError, translated
from headway.tasks.verifiers import Row, verifier
from headway.tasks.verifiers.answers import find_answer
from headway.tasks.verifiers.bounded import Bounded
from headway.tasks.verifiers.expressions import evaluate, guard_sympy

_LONGEST = 20_000


def names() -> list[str]:
    """The tasks there are, but for `composite`, which is made of others by its settings."""
    return sorted(_package().factory.DATASETS.keys() - {"composite"})


def rows(task: str, size: int = 1000, seed: int = 0, **settings: Any) -> list[Row]:
    """`size` prompts of a task; `settings` are the task's own."""
    dataset = _dataset(task, size, seed, tuple(sorted(settings.items())))
    place = {"task": task, "size": size, "seed": seed, "settings": settings}
    return [
        {"prompt": entry["question"], "answer": str(entry["answer"]), "gym": {**place, "index": index}}
        for index, entry in enumerate(dataset[index] for index in range(size))
    ]


def check_row(row: Row) -> str:
    place = row["gym"]
    if not isinstance(place, dict) or not {"task", "size", "seed", "settings", "index"} <= place.keys():
        return "the row's field gym is not what headway.tasks.verifiers.gym:rows makes"
    return "" if place["task"] in _package().factory.DATASETS else f"reasoning-gym has no task {place['task']!r}"


def warm_up() -> None:
    _package()


@verifier(needs=("gym",), check_row=check_row, warm_up=warm_up)
def verify(row: Row, text: str) -> float:
    """What the task says of the text's answer, from 0.0 to 1.0."""
    place, said = row["gym"], answer_in(text)
    if said is None or len(said) > _LONGEST:
        return 0.0
    which = (place[key] for key in ("task", "size", "seed", "settings", "index"))
    return float(_SCORE.within_limits(*which, said, otherwise=0.0))


def answer_in(text: str) -> str | None:
    place = find_answer(text)
    if place is not None:
        return text[place.start : place.end].strip()
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else None


def _score(task: str, size: int, seed: int, settings: dict[str, Any], index: int, said: str) -> float:
    dataset = _dataset(task, size, seed, tuple(sorted(settings.items())))
    vars(sys.modules[type(dataset).__module__])["eval"] = evaluate
    guard_sympy()
    entry = dataset[index]
    try:
        return min(1.0, max(0.0, float(dataset.score_answer(said, entry))))
    except Exception:
        dataset.score_answer(str(entry["answer"]), entry)  # raises for a row that cannot be scored at all
        return 0.0


@lru_cache(maxsize=256)
def _dataset(task: str, size: int, seed: int, settings: tuple[tuple[str, Any], ...]) -> Any:
    package = _package()
    if task not in package.factory.DATASETS:
        raise ConfigError(f"reasoning-gym has no task {task!r}; headway.tasks.verifiers.gym:names lists those it has")
    return package.create_dataset(task, size=size, seed=seed, **dict(settings))


def _package() -> Any:
    with translated(ImportError, ConfigError, "the tasks of reasoning-gym need the package; install headway-rl[gym]"):
        import reasoning_gym
    return reasoning_gym


_SCORE = Bounded(_score, deadline_s=5.0, prepare=warm_up)
