"""Checks a run directory before a run: new, replaced or resumed, and which knobs a resume may change.

A resume refuses what changes the meaning of the record: model, data, sampling, the staleness bound and batch sizes.
Every other knob may change; the change is an event, which replay honours.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from headway.config import Config
from headway.errors import ConfigError
from headway.record.log import EVENTS_NAME, is_being_written
from headway.record.run import Run
from headway.tasks.prompts import MixedStream, PromptStream, stream_of
from headway.types import Prompt

_FIXED_SECTIONS = {"model", "task", "tasks", "sampling", "staleness"}
_FIXED_KNOBS = {
    *("run.seed", "run.deterministic", "engine.max_context", "trainer.batch_groups", "trainer.minibatches"),
    *(f"rollout.{knob}" for knob in ("group_size", "workflow", "settings", "max_turns", "max_episode_tokens")),
}
_OF_ARITHMETIC = {"trainer", "algorithm"}
MODEL, BEST_MODEL = "model", "model-best"
_RUN_FILES = (
    *("config.json", "record", "checkpoint", "weights", "logs", "tensorboard", "summary.json"),
    *("report.png", MODEL, BEST_MODEL, "replay"),
)
Changes = dict[str, tuple[Any, Any]]


def check(directory: Path, config: Config, resume: bool, overwrite: bool) -> Run:
    """The run that the directory holds, or an empty one; refuses a directory that cannot be used, and changes none."""
    _check_usable(directory)
    run = Run.read(directory) if (directory / EVENTS_NAME).exists() else Run()
    if resume and not run.began:
        raise ConfigError(f"{directory} holds no run to resume; leave --resume out to start one")
    if resume:
        _check_knobs(directory, config, run)
    elif run.began:
        _check_replaceable(directory, run, overwrite)
    return run


def claim(
    directory: Path, config: Config, prompts: list[Prompt], held_out_rows: str, resume: bool, overwrite: bool
) -> Run:
    """The run to resume, or an empty one; a run that never trained is replaced, others with `overwrite`."""
    run = check(directory, config, resume, overwrite)
    if resume:
        _check_rows(directory, prompts, held_out_rows, run)
        check_model(directory, config.model.path, run)
        _check_order(directory, stream_of(prompts, config.named_tasks, config.run.seed), run)
    elif run.began:
        for name in (*_RUN_FILES, EVENTS_NAME):
            path = directory / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return Run()
    return run


def _check_usable(directory: Path) -> None:
    """That files can be written there, or a directory be made; nothing is left behind."""
    place = directory
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to the run directory {directory}: {error.strerror}; check run.dir") from error


def _check_replaceable(directory: Path, run: Run, overwrite: bool) -> None:
    if is_being_written(directory / EVENTS_NAME):
        raise ConfigError(f"{directory} is in use by a run that goes on; choose another run.dir")
    if run.num_trained and not overwrite:
        raise ConfigError(
            f"{directory} already holds a run of {run.num_trained} steps; add --resume to go on with it, --overwrite "
            "to delete it, or choose another run.dir"
        )


def _check_knobs(directory: Path, config: Config, run: Run) -> None:
    refused = {key: pair for key, pair in changes(run.config, config).items() if is_fixed(key)}
    if refused:
        key, (old, new) = next(iter(refused.items()))
        others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ConfigError(
            f"{key} = {new!r} differs{others} from the {old!r} of the run in {directory}, whose record would lose its "
            f"meaning; resume with {key} = {old!r} or choose another run.dir"
        )


def _check_rows(directory: Path, prompts: list[Prompt], held_out_rows: str, run: Run) -> None:
    if run.num_prompts != len(prompts):
        raise ConfigError(
            f"the run in {directory} was begun with {run.num_prompts} prompts, and its tasks now have "
            f"{len(prompts)}; restore their rows or change run.dir"
        )
    edited = "rows" if run.rows and run.rows != fingerprint(prompts) else ""
    if run.held_out_rows not in ("", held_out_rows):
        edited = edited or "held-out rows"
    if edited:
        raise ConfigError(
            f"the {edited} of the run in {directory} were edited or reordered since it was begun; restore them or "
            "change run.dir"
        )


def check_model(directory: Path, path: str, run: Run) -> None:
    """Adapters, a reference policy and a replay need the weights that the run began with."""
    found = model_checksum(path, directory)
    if run.model and found and run.model != found:
        raise ConfigError(
            f"the weights in model.path = {path} have changed since the run in {directory} was begun; restore them or "
            "change run.dir"
        )


def _check_order(directory: Path, stream: PromptStream | MixedStream, run: Run) -> None:
    """That every group has the row that the stream gave it, or that of the group it repeats."""
    position = 0
    for number, group in enumerate(run.groups):
        row = stream[position].index if group.repeats is None else run.groups[group.repeats].prompt
        position += group.repeats is None
        if group.prompt != row:
            raise ConfigError(
                f"the event log of {directory} is damaged: group {number} was admitted with row {group.prompt}, and "
                f"the order of the rows gives it row {row}; restore {EVENTS_NAME} from a copy"
            )


def plain(config: Config) -> dict[str, Any]:
    """The config as its record holds it: dates and other values that JSON lacks are texts there."""
    return config.model_dump(mode="json")


def identity(config: Config) -> str:
    """A hash of the knobs that give the record its meaning."""
    fixed = sorted((key, repr(value)) for key, value in _flat(plain(config)) if is_fixed(key))
    return xxhash.xxh3_64_hexdigest(repr(fixed).encode())


def is_fixed(key: str) -> bool:
    return key.split(".")[0] in _FIXED_SECTIONS or key in _FIXED_KNOBS


def changes(recorded: dict[str, Any], config: Config) -> Changes:
    """Every knob that differs from the recorded one, with both values."""
    before, now = dict(_flat(recorded)), dict(_flat(plain(config)))
    keys = [key for key in {**before, **now} if key != "run.dir" and before.get(key) != now.get(key)]
    return {key: (before.get(key), now.get(key)) for key in keys}


def changes_arithmetic(found: Iterable[str]) -> bool:
    """Whether steps that were recorded before would be trained differently."""
    return any(key.split(".")[0] in _OF_ARITHMETIC for key in found)


def _flat(values: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for section, knobs in values.items():
        for knob, value in knobs.items():
            yield f"{section}.{knob}", value


def model_checksum(path: str, directory: Path) -> str:
    """Of the weights that a run begins with; empty where it replaces them itself, and for a name on the hub."""
    from headway.model.loading import sample_weights  # takes seconds, which a wrong path need not wait for

    return "" if Path(path).absolute() == (directory / MODEL).absolute() else sample_weights(path)


def fingerprint(prompts: list[Prompt]) -> str:
    """A checksum of all rows in order: their tokens, and what their verifier gets."""
    digest = xxhash.xxh3_64()
    for prompt in prompts:
        digest.update(prompt.tokens.tobytes())
        digest.update(repr(prompt.task).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
