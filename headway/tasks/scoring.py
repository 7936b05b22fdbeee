"""From the verifiers a task names to one function: (row, text) → a score and its named components.

A verifier is `(task, text) -> score`, synchronous or async. It returns one number, or a dict of named components; a
task may also name several verifiers. Components are weighted (1 unless `task.weights` says otherwise), summed, and
reported one by one, unweighted. Two more forms are accepted: a reward function with a `completions` parameter, as TRL
calls it (lists of one item; the row's fields as keyword arguments), and the URL of a service, which is sent
{"task": row, "text": text} and answers a number or {"score": …} or {"components": {…}}.
"""

import inspect
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.tasks import imports
from headway.tasks.verifiers import needs_of

if TYPE_CHECKING:  # a verifier's process imports no more than it needs: asyncio and urllib below
    from asyncio import AbstractEventLoop

    from headway.config import TaskSection

Row = dict[str, Any]
Scored = tuple[float, dict[str, float]]

_OWN_PARAMETERS = {"prompts", "completions"}
_HTTP_ATTEMPTS, _HTTP_PAUSE_S, _HTTP_TIMEOUT_S = 4, 0.25, 600.0


class NotAScore(Exception):
    """What a verifier returned is no finite number."""


def specification(tasks: "Mapping[str, TaskSection]") -> str:
    """All that scoring needs to know of a run's tasks, as one text: a verifier's bare reference where that is all."""
    if [*tasks] == [""] and not tasks[""].verifiers and not tasks[""].weights and tasks[""].prompt_field == "prompt":
        return tasks[""].verifier
    return json.dumps(
        {
            name: {"verifiers": _named(task), "weights": task.weights, "prompt_field": task.prompt_field}
            for name, task in tasks.items()
        }
    )


def title(spec: str) -> str:
    """The verifiers of a specification, for a sentence."""
    return ", ".join(sorted({reference for part in _parse(spec).values() for reference in part["verifiers"].values()}))


def _named(task: "TaskSection") -> dict[str, str]:
    """None where the workflow gives the rewards."""
    return task.verifiers or ({"": task.verifier} if task.verifier else {})


def _parse(spec: str) -> dict[str, dict[str, Any]]:
    if spec.startswith("{"):
        parsed: dict[str, dict[str, Any]] = json.loads(spec)
        return parsed
    return {"": {"verifiers": {"": spec} if spec else {}, "weights": {}, "prompt_field": "prompt"}}


def needs_of_task(task: "TaskSection") -> dict[str, str]:
    """The fields of a row that the task's verifiers read, each with the verifier that reads it."""
    found = {}
    for reference in _named(task).values():
        if not _is_url(reference):
            function = _load_callable(reference)
            needed = _required_columns(function) if _is_trl(function) else needs_of(function)
            found.update(dict.fromkeys(needed, reference))
    return found


def row_checks(task: "TaskSection") -> list[Callable[[Row], str]]:
    """Of the task's verifiers, those functions that say why a row could not be scored whatever the text."""
    functions = [_load_callable(reference) for reference in _named(task).values() if not _is_url(reference)]
    return [check for function in functions if (check := getattr(function, "check_row", None)) is not None]


class Scorer:
    """The verifiers of all tasks of a run, loaded."""

    def __init__(self, spec: str) -> None:
        self._tasks = {name: _TaskScorer(**part) for name, part in _parse(spec).items()}
        self._loop: AbstractEventLoop | None = None

    def score(self, source: str, row: Row, text: str) -> Scored:
        """The weighted sum and its components; raises what a verifier raises, and `NotAScore`."""
        scorer = self._tasks[source]
        values = scorer.call(row, text)
        if any(inspect.isawaitable(value) for value in values.values()):
            import asyncio

            # One loop for all calls: an async verifier may hold a client that belongs to it.
            self._loop = self._loop or asyncio.new_event_loop()
            values = self._loop.run_until_complete(_gather(values))
        return scorer.combine(values)


async def _gather(values: dict[str, Any]) -> dict[str, Any]:
    import asyncio

    async def result(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    return dict(zip(values, await asyncio.gather(*map(result, values.values())), strict=True))


class _TaskScorer:
    def __init__(self, verifiers: dict[str, str], weights: dict[str, float], prompt_field: str) -> None:
        self._functions = {name: _load(reference, prompt_field) for name, reference in verifiers.items()}
        self._weights = weights

    def call(self, row: Row, text: str) -> dict[str, Any]:
        return {name: function(row, text) for name, function in self._functions.items()}

    def combine(self, values: dict[str, Any]) -> Scored:
        components: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, Mapping):
                components.update(_numbers(value, prefix=f"{name}/" if name else ""))
            elif value is not None or name == "":
                components[name] = to_number(value)
        if not self._functions:
            raise NotAScore("nothing, because the task names no verifier")
        if not components:
            raise NotAScore("no component at all")
        unknown = sorted(self._weights.keys() - components.keys() - self._functions.keys())
        if unknown and not any(value is None for value in values.values()):
            raise NotAScore(f"components {sorted(components)}, and task.weights names {unknown[0]!r}")
        score = sum(value * self._weight(name) for name, value in components.items())
        if not math.isfinite(score):
            raise NotAScore(f"components whose weighted sum is {score}")
        return score, {name: value for name, value in components.items() if name}

    def _weight(self, name: str) -> float:
        """Of a component; one of a named verifier's is also weighted as that verifier is."""
        verifier, slash, _ = name.partition("/")
        return self._weights.get(name, 1.0) * (self._weights.get(verifier, 1.0) if slash else 1.0)


def _numbers(parts: Mapping[Any, Any], prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": to_number(value) for name, value in parts.items() if value is not None}


def to_number(value: Any) -> float:
    if hasattr(value, "item"):  # a number of numpy's or torch's, or an array of one
        with suppress(ValueError, RuntimeError):
            value = value.item()
    if isinstance(value, bool | int | float):
        with suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    what = float.__repr__(value) if isinstance(value, float) else f"a value of type {type(value).__name__}"
    raise NotAScore(what)


# Forms of verifiers


def _load(reference: str, prompt_field: str) -> Callable[[Row, str], Any]:
    if _is_url(reference):
        return partial(_ask_service, reference)
    function = _load_callable(reference)
    if (warm_up := getattr(function, "warm_up", None)) is not None:
        warm_up()
    if _is_trl(function):
        return partial(_call_trl, function, prompt_field)
    return function


def _is_url(reference: str) -> bool:
    return reference.startswith(("http://", "https://"))


def _load_callable(reference: str) -> Callable[..., Any]:
    function = imports.load(reference)
    if not callable(function):
        raise ConfigError(f"{reference}: a verifier is a function (task, text) -> score, not {_a(function)}")
    parameters = _parameters(function)
    if not _is_trl(function) and parameters is not None and not takes_two(parameters):
        raise ConfigError(
            f"{reference}: a verifier is a function (task, text) -> score, and this one takes "
            f"({', '.join(parameter.name for parameter in parameters)})"
        )
    return function  # type: ignore[no-any-return]


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    with suppress(TypeError, ValueError):  # some built-in functions have none
        return list(inspect.signature(function).parameters.values())
    return None


def takes_two(parameters: Iterable[inspect.Parameter]) -> bool:
    """Whether a function of these parameters can be called with two positional arguments."""
    with suppress(TypeError):
        inspect.Signature(list(parameters)).bind({}, "")
        return True
    return False


def _is_trl(function: Callable[..., Any]) -> bool:
    return any(parameter.name == "completions" for parameter in _parameters(function) or [])


def _required_columns(function: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return tuple(
        parameter.name
        for parameter in _parameters(function) or []
        if parameter.default is parameter.empty
        and parameter.kind not in kinds
        and parameter.name not in _OWN_PARAMETERS
    )


def _call_trl(function: Callable[..., Any], prompt_field: str, row: Row, text: str) -> Any:
    prompt = row[prompt_field]
    completion = [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
    arguments = {name: [value] for name, value in row.items() if name not in (prompt_field, "prompt", "completion")}
    arguments |= {"prompts": [prompt], "completions": [completion]}
    parameters = _parameters(function) or []
    if not any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    result = function(**arguments)
    return _first_of(result) if inspect.isawaitable(result) else _first(result)


async def _first_of(result: Any) -> Any:
    return _first(await result)


def _first(result: Any) -> Any:
    if not isinstance(result, list | tuple) or len(result) != 1:
        raise NotAScore(f"{_a(result)} rather than a list of one score")
    return result[0]


def _ask_service(url: str, row: Row, text: str) -> Any:
    """What a service says of the text. An outage of a few seconds is waited out; the pool's deadline holds."""
    import http.client
    import urllib.error
    import urllib.request

    body = json.dumps({"task": row, "text": text}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    for attempt in range(_HTTP_ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as response:
                return _answer_of_service(json.load(response))
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise
            last: Exception = error
        except (http.client.HTTPException, OSError) as error:  # no answer, or half of one
            last = error
        time.sleep(_HTTP_PAUSE_S * 2**attempt)
    raise last


def _answer_of_service(answer: Any) -> Any:
    if isinstance(answer, dict):
        return answer.get("components") or answer.get("score")
    return answer
