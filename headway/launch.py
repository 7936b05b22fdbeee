"""Builds everything, starts it, stops it in order.

`prepare` reads and checks all there is to check before anything heavy starts; the verbs below it start the workers
they need through a runtime and end them, whatever happens. A run directory holds: config.json, events.jsonl, record/,
checkpoint/a and /b, weights/, logs/, tensorboard/, model/, summary.json, report.png,
code/ of `headway.train` in Python, and eval/problems.jsonl of `headway eval`.
"""

import asyncio
import json
import os
import platform
import re
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.config import SINGLE_TURN, Config
from headway.control.interrupts import Stopping, interruptible, stoppable
from headway.control.run_directory import BEST_MODEL, MODEL, check, claim, fingerprint, identity, model_checksum, plain
from headway.control.staleness import StalenessControl, resolve_window
from headway.control.workers import Fleet, make_private, open_runtime, start_trainer
from headway.errors import CAUSE, ConfigError, HeadwayError, RunFailed, translated
from headway.model.memory import check_fit
from headway.model.tokenizer import load_tokenizer, stop_tokens
from headway.monitor.metrics import Metrics, check_tools
from headway.monitor.report import Summary, write_report
from headway.monitor.view import View
from headway.record.events import Ended, ResumeStarted, RunStarted, Warned
from headway.record.log import EVENTS_NAME, writing
from headway.record.phases import phase
from headway.record.run import Run
from headway.record.shards import RunLog
from headway.runtime.ray import check_ray
from headway.tasks.datasets import check_there
from headway.tasks.prompts import MixedStream, PromptStream, load_all, stream_of
from headway.types import (
    Admission,
    Batch,
    Group,
    Ints,
    Prompt,
    Sampling,
    StepReport,
    truncates,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from headway.control.controller import Tasks
    from headway.rollout.evaluate import Evaluation

_PROBE_TOKENS = 48


@dataclass(frozen=True)
class Prepared:
    """A config whose every reference has been followed and checked."""

    config: Config
    model_config: "PreTrainedConfig"
    context: int
    longest: int
    prompts: list[Prompt]
    held_out: list[Prompt]
    held_out_rows: str  # fingerprint of all held-out rows, those beyond evaluate.limit included
    sampling: Sampling
    eval_sampling: Sampling
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.time)  # when start-up began

    @property
    def stream(self) -> PromptStream | MixedStream:
        return stream_of(self.prompts, self.config.named_tasks, self.config.run.seed)

    def staleness(self) -> StalenessControl:
        batch, section = self.config.trainer.batch_groups, self.config.staleness
        return StalenessControl(batch, section.max_staleness, resolve_window(section.window, batch))


def prepare(config: Config, to_train: bool = True) -> Prepared:
    """Follow every reference of the config; the first thing that cannot work is one sentence."""
    _check_path(config.model.path)
    tasks = config.named_tasks.values()
    if to_train and not any(task.weight > 0 for task in tasks):
        raise ConfigError("all tasks have weight = 0, so none gives training prompts; raise one's")
    for task in tasks:
        for reference in (task.train, task.eval):
            check_there(reference)
    from headway.model.loading import (  # takes seconds, which a wrong path need not wait for
        check_weights,
        end_tokens,
        load_config,
        model_shape,
    )
    from headway.rollout.worker import check_chat, check_workflow

    if config.run.runtime == "ray":
        check_ray()
    check_devices(config)
    _check_vllm(config.engine.vllm_python)
    check_workflow(config.rollout)
    check_tools(config.metrics)
    model_config = load_config(config.model.path)
    check_weights(config.model.path, model_config)
    tokenizer = load_tokenizer(config.model.path)
    if to_train:
        _check_besides(config, tokenizer.get_vocab())
    context = config.engine.max_context or model_config.max_position_embeddings
    if context > model_config.max_position_embeddings:
        limit = model_config.max_position_embeddings
        raise ConfigError(f"engine.max_context = {context} is more than the model's {limit}; lower it")
    loaded = load_all(config.named_tasks, tokenizer, context - 1)
    prompts, held_out = loaded.train, _limited(loaded.held_out, config.evaluate.limit)
    check_chat(config.rollout, [*prompts, *held_out])
    longest_prompt = max(len(prompt.tokens) for prompt in [*prompts, *held_out])
    longest = min(context, longest_prompt + config.sampling.max_tokens)
    if config.rollout.workflow != SINGLE_TURN:  # its sequences may grow; rollout workers hold them to the budget
        longest = max(longest, min(context, config.trainer.token_budget))
    _check_sizes(config, context, longest)
    check_fit(config, model_shape(model_config), bool(model_config.tie_word_embeddings), context)
    _check_vocabulary(config.model.path, model_config.vocab_size, [*prompts, *held_out])
    stops = end_tokens(config.model.path, model_config) | {tokenizer.eos_token_id}
    stops |= stop_tokens(config.sampling.stop_tokens, tokenizer, model_config.vocab_size)
    sampling, eval_sampling = _samplings(config, tuple(sorted(stops)))
    notes = [*loaded.notes]
    if truncates(sampling):
        notes.append("top-k or top-p truncates sampling, while log-probs are of the full distribution")
    rows = fingerprint(loaded.held_out)
    return Prepared(config, model_config, context, longest, prompts, held_out, rows, sampling, eval_sampling, notes)


def _read(config: Config, view: View, to_train: bool = True) -> Prepared:
    sentence = "stopped while the model and the prompts were read; the run directory is as it was"
    with interruptible(sentence), phase(view.on_event, "reading the model and the prompts"):
        return prepare(config, to_train)


def _limited(held_out: list[Prompt], limit: int) -> list[Prompt]:
    """The first `limit` held-out prompts of each task."""
    seen: Counter[str] = Counter()
    kept = []
    for prompt in held_out:
        seen[prompt.source] += 1
        if seen[prompt.source] <= limit:
            kept.append(prompt)
    return kept


def _samplings(config: Config, stops: tuple[int, ...]) -> tuple[Sampling, Sampling]:
    """How training rollouts are sampled, and how evaluation is."""
    stop: dict[str, Any] = {"stop_tokens": stops, "stop_strings": tuple(config.sampling.stop_strings)}
    with translated(ValueError, ConfigError, f"[sampling]: {CAUSE}"):
        training = Sampling(**dict(config.sampling) | stop)
    return training, Sampling(config.evaluate.temperature, max_tokens=training.max_tokens, **stop)


def check_devices(config: Config) -> None:
    """That the devices named are there and can do what is asked of them; on other nodes only Ray and they can tell."""
    devices = config.engine.devices
    if {*devices, *config.trainer.devices} == {"cpu"}:
        return
    from headway.model.device import DTYPES, find_device

    for knob, names in (("engine.device", devices), ("trainer.device", config.trainer.devices)):
        for name in names if config.run.runtime != "ray" else ():
            find_device(knob, name, DTYPES[config.model.dtype])


def _check_vllm(python: str) -> None:
    if python:
        from headway.engine.vllm.process import check_interpreter

        check_interpreter(python)


def _check_path(path: str) -> None:
    """A path that leads nowhere is not looked for on the hub when it cannot be a name there."""
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path)
    if not is_name and not Path(path).is_dir():
        raise ConfigError(f"model.path = {path} does not exist; name a transformers directory or a hub model")


def _check_sizes(config: Config, context: int, longest: int) -> None:
    if config.trainer.token_budget < longest:
        raise ConfigError(
            f"trainer.token_budget = {config.trainer.token_budget} is smaller than one sequence of up to {longest} "
            "tokens (prompt and sampling.max_tokens); raise the budget or lower max_tokens"
        )
    least = 2 * context
    if config.engine.kind == "embedded" and "cpu" in config.engine.devices:
        from headway.engine.embedded.slab_kv import least_tokens

        least = least_tokens(context)
    if 0 < config.engine.kv_tokens < least:
        raise ConfigError(
            f"engine.kv_tokens = {config.engine.kv_tokens} cannot hold two sequences of the context of {context} "
            f"tokens; raise kv_tokens to {least} or lower engine.max_context"
        )


def _check_besides(config: Config, ours: dict[str, int]) -> None:
    """The reference policy and the adapter that the trainer would load besides the model."""
    from headway.weights.lora import TENSORS

    path, reference, adapter = config.model.path, config.algorithm.reference, config.model.lora.adapter
    if reference and (theirs := load_tokenizer(reference).get_vocab()) != ours:
        raise ConfigError(
            f"the reference {reference} has another vocabulary ({len(theirs)} tokens) than {path} ({len(ours)}); "
            "name a model of the same tokenizer in algorithm.reference"
        )
    if adapter and not (Path(adapter) / TENSORS).is_file():
        raise ConfigError(f"model.lora.adapter = {adapter} is no adapter in peft's format: it holds no {TENSORS}")


def _check_vocabulary(path: str, vocab_size: int, prompts: list[Prompt]) -> None:
    largest = max(int(prompt.tokens.max()) for prompt in prompts)
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer in {path} gives token {largest}, and its model knows {vocab_size} tokens; "
            "use the model's own tokenizer"
        )


def probe(prompts: list[Prompt], longest: int = _PROBE_TOKENS) -> tuple[Ints, ...]:
    """A few fixed token sequences, none above `longest`, for engine and trainer to score after every swap."""
    length = min(_PROBE_TOKENS, longest)
    tokens = np.concatenate([prompt.tokens for prompt in prompts[:64]])
    pieces = [tokens[start : start + length] for start in range(0, 4 * length, length)]
    usable = tuple(piece for piece in pieces if len(piece) >= 2)
    return usable or (np.repeat(tokens[:1], 2),)


# Training


async def train(
    config: Config,
    resume: bool,
    view: View,
    overwrite: bool = False,
    stopping: Stopping | None = None,
    started: float | None = None,
) -> Summary:
    """A whole run, from nothing or from where it was interrupted; start-up is counted from `started`, or from now."""
    started, stopping = started or time.time(), stopping or Stopping()
    directory = Path(config.run.dir)
    check(directory, config, resume, overwrite)
    prepared = replace(_read(config, view), started=started)
    for note in prepared.notes:
        view.message(note)
    rows = prepared.prompts, prepared.held_out_rows
    if not resume:
        claim(directory, config, *rows, resume, overwrite)
    make_private(directory)
    log = RunLog(directory, config.run.deadline_s)
    metrics: Metrics | None = None
    try:
        # Again, under the log's lock: another process may have been faster.
        run = claim(directory, config, *rows, resume, False) if resume else Run.read(directory)
        if run.began and not resume:
            raise ConfigError(f"{directory} already holds a run; choose another run.dir")
        if run.status == "finished" and run.num_trained >= config.run.steps:
            view.on_event(Warned(message=f"{directory} is finished; nothing to resume"))
            return write_report(directory)
        metrics = Metrics(directory, config.metrics, run, view.message)
        view.follow(run)
        for listener in (run.on_event, view.on_event, metrics.on_event):
            log.subscribe(listener)
        with stoppable(stopping):
            return await _train_and_report(prepared, log, run, directory, stopping)
    finally:
        if metrics is not None:
            metrics.close()
        log.close()


async def _train_and_report(prepared: Prepared, log: RunLog, run: Run, directory: Path, stopping: Stopping) -> Summary:
    try:
        await _run_to_the_end(prepared, log, run, directory, stopping)
    except RunFailed:
        log.close()
        with suppress(HeadwayError):
            write_report(directory)
        raise
    log.close()
    return write_report(directory)


async def _run_to_the_end(prepared: Prepared, log: RunLog, run: Run, directory: Path, stopping: Stopping) -> None:
    """Start, resume if there is something to resume, run; the log's last event says how it ended."""
    from headway.control.controller import Controller
    from headway.control.resume import change_config, progress_from

    _begin(prepared, log, run, directory)
    status, cause = "failed", ""
    try:
        if run.is_resumed:
            await change_config(prepared.config, log, run, directory)
        async with open_runtime(prepared.config, directory) as runtime:
            staleness = prepared.staleness()
            fleet = Fleet(runtime, prepared.config, staleness.worst_staleness)
            progress = progress_from(staleness, prepared.config.staleness, log, run)
            controller = Controller(prepared.config, fleet, _tasks(prepared), progress, log, directory)
            stopping.stop = controller.stop
            await controller.run()
        if controller.is_stopped:
            raise asyncio.CancelledError
        run.finish()
        status = "finished"
    except asyncio.CancelledError:
        status, cause = "stopped", "interrupted from outside"
        raise RunFailed(_stopped(directory, run, prepared.config.run.steps)) from None
    except BaseException as error:
        cause = str(error) or type(error).__name__
        raise
    finally:
        log.append(Ended(status=status, cause=cause, tokens=run.tokens.counts()))


def _stopped(directory: Path, run: Run, num_steps: int) -> str:
    """What is on disk after an interrupt, and what `--resume` will do."""
    version = run.checkpoints[0][0] if run.checkpoints else 0
    retrains = run.num_trained - version
    first = f", retraining {retrains} recorded steps first" if retrains else ""
    model = f"; {saved_models(directory)}" if (directory / MODEL).exists() else ""
    if run.num_trained >= num_steps:
        return (
            f"stopped after the last of {num_steps} steps; `--resume` evaluates the model of {directory}{first}{model}"
        )
    return f"stopped after {run.num_trained} steps; `--resume` goes on from {directory}{first}{model}"


def saved_models(directory: Path) -> str:
    """Where the latest model is, and the one with the best evaluation."""
    best = f", the best evaluated one in {directory / BEST_MODEL}" if (directory / BEST_MODEL).exists() else ""
    return f"the model is in {directory / MODEL}{best}"


def _begin(prepared: Prepared, log: RunLog, run: Run, directory: Path) -> None:
    """The first event of this process."""
    startup_s = time.time() - prepared.started
    if run.began:
        log.append(ResumeStarted(incarnation=len(run.clock.incarnations), hardware=hardware(), startup_s=startup_s))
        return
    recorded = plain(prepared.config)
    with writing(directory / "config.json"):
        (directory / "config.json").write_text(json.dumps(recorded, indent=2))
    log.append(
        RunStarted(
            config=recorded,
            hardware=hardware(),
            num_prompts=len(prepared.prompts),
            worst_staleness=prepared.staleness().worst_staleness,
            config_hash=identity(prepared.config),
            startup_s=startup_s,
            rows=fingerprint(prepared.prompts),
            held_out_rows=prepared.held_out_rows,
            model=model_checksum(prepared.config.model.path, directory),
        )
    )


def _tasks(prepared: Prepared) -> "Tasks":
    from headway.control.controller import Tasks

    return Tasks(
        prompts=prepared.prompts,
        stream=prepared.stream,
        held_out=prepared.held_out,
        probe=probe(prepared.prompts, prepared.longest),
        sampling=prepared.sampling,
        eval_sampling=prepared.eval_sampling,
    )


def hardware() -> dict[str, Any]:
    return {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}


# The other verbs


async def rollout_only(config: Config, num_groups: int, view: View) -> list[Group]:
    """The generating half alone: groups of the model as it is."""
    from headway.control.generation import open_generation

    prepared = _read(config, view)
    stream = prepared.stream
    room = asyncio.Semaphore(2 * config.engine.max_num_seqs * config.engine.count)
    num_done = 0
    async with open_generation(config, view.on_event) as pool:
        with phase(view.on_event, f"generating {num_groups} groups") as progress:

            async def one(number: int) -> Group:
                nonlocal num_done
                admission = Admission(number, stream[number], config.rollout.group_size, 0, 0, prepared.sampling)
                async with room:
                    group = await pool.run(admission)
                num_done += 1
                progress(num_done, num_groups)
                return group

            return list(await asyncio.gather(*(one(number) for number in range(num_groups))))


async def train_from(config: Config, groups: list[Group], view: View) -> list[dict[str, float]]:
    """The training half alone: whole batches of the given groups, in order; the model goes to the run directory."""
    batch_groups = config.trainer.batch_groups
    directory = Path(config.run.dir)
    ordered = sorted((group for group in groups if group.trajectories), key=lambda group: group.id)
    if len(ordered) < batch_groups:
        found = f"{len(ordered)} groups with trajectories do not fill one batch"
        raise ConfigError(f"{found} of trainer.batch_groups = {batch_groups}; give more groups or lower it")
    if (directory / EVENTS_NAME).exists():
        raise ConfigError(f"{directory} already holds a run, whose model would be replaced; choose another run.dir")
    num_steps = min(config.run.steps, len(ordered) // batch_groups)
    async with open_runtime(config, directory) as runtime:
        with phase(view.on_event, "starting the trainer"):
            trainer = await start_trainer(runtime, config, None)
        reports: list[StepReport] = []
        with phase(view.on_event, f"training {num_steps} steps") as progress:
            for step in range(num_steps):
                taken = ordered[step * batch_groups : (step + 1) * batch_groups]
                report = await trainer.train(Batch(len([r for r in reports if not r.skipped]), tuple(taken)))
                reports.append(report)
                progress(step + 1, num_steps)
        await trainer.save_model(str(directory / "model"))
    return [{"version": report.version, **report.metrics} for report in reports]


async def evaluate_only(config: Config, view: View) -> "Evaluation":
    """Held-out accuracy of the model as it is."""
    from headway.control.generation import open_generation
    from headway.rollout.evaluate import ProblemRecords, evaluate

    prepared = _read(config, view, to_train=False)
    if not prepared.held_out:
        raise ConfigError("task.eval names no held-out rows; set it to evaluate")
    async with open_generation(config, view.on_event) as pool:
        with phase(view.on_event, "evaluating") as progress:
            concurrency = config.engine.max_num_seqs * config.engine.count
            prompts, section = prepared.held_out, config.evaluate
            how_many = concurrency, progress, section.samples, section.pass_at
            with closing(ProblemRecords(problems_path(config), load_tokenizer(config.model.path))) as records:
                return await evaluate(pool.run, prompts, prepared.eval_sampling, 0, *how_many, records.write)


def problems_path(config: Config) -> Path:
    """Where `headway eval` records every problem."""
    return Path(config.run.dir) / "eval" / "problems.jsonl"
