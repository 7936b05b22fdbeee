"""The Python API: `headway.train`, `headway.load_run` and `headway.generate`, in scripts and in notebooks.

    import headway

    def rows():
        return [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10)]

    def verify(task, text):
        return float(text.strip() == str(task["answer"]))

    run = headway.train({"model": {"path": "my_model"}, "run": {"dir": "runs/sums", "steps": 20}},
                        task={"train": rows, "verifier": verify})
    print(run.summary.reward_last, run.metrics()["train/entropy"])

Functions and classes in a config are named to the worker processes by `tasks.source`: one of a file by its file, one
of a script or notebook by a copy of its source in the run directory's code/.
"""

import asyncio
import io
import json
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from headway.config import Config, EngineSection, ModelSection, load, section, validate
from headway.errors import CAUSE, ConfigError, translated
from headway.monitor.reader import RunReader
from headway.tasks.source import reference_of

T = TypeVar("T")
Messages = list[dict[str, Any]]

CODE_NAME = "code"
_ROWS = {"train", "eval"}


def train(
    config: Config | Mapping[str, Any] | str | Path,
    *,
    task: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> RunReader:
    """Train as `headway train` does, and return the finished run.

    `config` is a TOML file, its values as a dict by section, or a `Config`. `task` is added to its [task] section. In
    both, rows (`train`, `eval`) may be a list of dicts or a function that returns some, a `verifier` (or each of
    `verifiers`) a function, `rollout.workflow` a class. An interrupt stops the run in order, as Ctrl-C does.
    """
    from headway import launch
    from headway.control.interrupts import Stopping
    from headway.monitor.view import PlainView, View, open_view

    if isinstance(config, Config):
        config = config.model_dump()
    values = load(config).model_dump() if isinstance(config, str | Path) else {**config}
    if task is not None:
        values["task"] = {**values.get("task", {}), **task}
    made = validate(_by_reference(values), "config")
    view: View = open_view(sys.stdout) if progress else PlainView(_Nowhere())
    stopping = Stopping()
    try:
        _complete(lambda: launch.train(made, resume, view, overwrite, stopping), stopping.ask)
    finally:
        view.close()
    return load_run(made.run.dir)


def load_run(directory: str | Path) -> RunReader:
    """The run in a directory: finished, failed, or still going on."""
    return RunReader(directory)


def generate(
    model: str | Path | RunReader,
    prompts: Sequence[str | Messages],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
) -> list[str]:
    """One completion for each prompt, by the embedded engine in this process.

    `model` is a transformers directory, a hub name, or a run, whose trained model is taken. A prompt is a text, which
    `chat` puts into the chat template, or a list of chat messages. At temperature 0 sampling is greedy; otherwise
    `seed` makes it repeatable.
    """
    if isinstance(prompts, str):
        raise ConfigError("generate takes a list of prompts, not one text; write [prompt]")
    path = str(model.model_path if isinstance(model, RunReader) else model)
    kind = section(ModelSection, path=path, dtype=dtype).dtype
    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop_strings": tuple(stop)}
    return _complete(lambda: _generate(path, prompts, settings, seed, chat, device, kind))


async def _generate(
    path: str,
    prompts: Sequence[str | Messages],
    settings: dict[str, Any],
    seed: int,
    chat: bool,
    device: str,
    dtype: str,
) -> list[str]:
    from headway.engine.embedded.service import EmbeddedEngine
    from headway.engine.embedded.slab_kv import least_tokens
    from headway.model.loading import check_weights, end_tokens, load_config
    from headway.model.tokenizer import decode, encode_prompt, load_tokenizer
    from headway.types import Completion, Request, RequestKey, Sampling

    model_config = load_config(path)
    check_weights(path, model_config)
    tokenizer = load_tokenizer(path)
    encoded = [encode_prompt(tokenizer, prompt, chat or not isinstance(prompt, str)) for prompt in prompts]
    limit = model_config.max_position_embeddings
    if longest := max((len(tokens) for tokens in encoded if len(tokens) >= limit), default=0):
        raise ConfigError(f"a prompt has {longest} tokens, and the model's context is {limit}; shorten it")
    if not all(len(tokens) for tokens in encoded):
        raise ConfigError("a prompt is empty; give it a text")
    context = min(limit, max(map(len, encoded), default=1) + settings["max_tokens"] + 1)
    stops = end_tokens(path, model_config) | {tokenizer.eos_token_id}
    with translated(ValueError, ConfigError, CAUSE):
        sampling = Sampling(stop_tokens=tuple(sorted(stops)), **settings)
    seqs = min(len(prompts), 16 if device == "cpu" else 256) or 1
    kv_tokens = max(2, seqs) * least_tokens(context) // 2 if device == "cpu" else 0  # 0: what a GPU has free
    knobs = section(EngineSection, device=device, max_context=context, max_num_seqs=seqs, kv_tokens=kv_tokens)
    engine = EmbeddedEngine(path, dtype, knobs, False)

    async def complete(number: int) -> str:
        request = Request(RequestKey(number, 0, 0, "generate"), encoded[number], sampling, seed)
        async for item in engine.generate(request):
            if isinstance(item, Completion):
                return decode(tokenizer, item.tokens)
        raise AssertionError("a request ends with its completion")

    await engine.open()
    try:
        return list(await asyncio.gather(*(complete(number) for number in range(len(prompts)))))
    finally:
        await engine.close()


# What a config may hold in Python


def _by_reference(values: dict[str, Any]) -> dict[str, Any]:
    """The config with references in place of functions, classes and rows; these are written below run.dir."""
    directory = values.get("run", {}).get("dir", "")
    if not directory:
        raise ConfigError("run.dir is required: the directory of this run, such as runs/mine")
    folder = Path(directory) / CODE_NAME
    named = {name: _task(task, folder) for name, task in values.get("tasks", {}).items()}
    rollout = values.get("rollout", {})
    workflow = rollout.get("workflow")
    return {
        **values,
        **({"task": _task(values["task"], folder)} if "task" in values else {}),
        **({"tasks": named} if named else {}),
        **({"rollout": {**rollout, "workflow": reference_of(workflow, folder)}} if callable(workflow) else {}),
    }


def _task(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for knob, value in task.items():
        if knob in _ROWS and isinstance(value, Iterable) and not isinstance(value, str):
            found[knob] = _written(list(value), folder)
        elif knob == "verifiers":
            found[knob] = {name: reference_of(one, folder) if callable(one) else one for name, one in value.items()}
        else:
            found[knob] = reference_of(value, folder) if callable(value) else value
    return found


def _written(rows: list[Any], folder: Path) -> str:
    """Rows as a file that is named after its contents."""
    refused = f"a row of the task is no plain value that a file can hold ({CAUSE})"
    with translated((TypeError, ValueError), ConfigError, refused):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rows_{xxhash.xxh3_64_hexdigest(text.encode('utf-8', 'surrogatepass'))}.jsonl"
    path.write_text(text, encoding="utf-8")
    return str(path.resolve())


# Coroutines from synchronous code


class _Nowhere(io.StringIO):
    """A stream that keeps nothing."""

    def write(self, text: str, /) -> int:
        return len(text)


def _complete(make: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None] = lambda: None) -> T:
    """Run a coroutine to its end; where an event loop runs already, as in a notebook, in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    with ThreadPoolExecutor(1, "headway") as thread:
        future = thread.submit(lambda: asyncio.run(make()))
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                interrupt()
