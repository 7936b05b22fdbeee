"""Tools: from a function's signature to its JSON schema, and from what a model wrote to the calls in it.

Calls are read in the form that Qwen and Hermes models write, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`,
and, where the whole text is one JSON object with a name, in that of Llama 3. What does not parse is text.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls."""
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _to_call(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(take, text)
    if not calls and (alone := _to_call(text)) is not None:
        return "", [alone]
    return (rest.strip() if calls else rest), calls


def _to_call(text: str) -> ToolCall | None:
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The function as a chat template and the OpenAI API take it: name, docstring, and its parameters' types."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": inspect.getdoc(function) or "",
            "parameters": {
                "type": "object",
                "properties": {name: _schema_of_type(hints.get(name, str)) for name in parameters},
                "required": [name for name, parameter in parameters.items() if parameter.default is parameter.empty],
            },
        },
    }


def _schema_of_type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"type": _TYPES.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        options = [argument for argument in arguments if argument is not type(None)]
        return _schema_of_type(options[0]) if len(options) == 1 else {"anyOf": [_schema_of_type(o) for o in options]}
    if origin in (list, tuple, set):
        return {"type": "array", "items": _schema_of_type(arguments[0]) if arguments else {}}
    return {"type": _TYPES.get(origin or hint, "string")}
