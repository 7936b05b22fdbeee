"""The model uses tools: functions of the user's, and a Python interpreter in a sandbox, called over several turns."""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

from headway.errors import ConfigError
from headway.rollout.tool_calls import ToolCall, parse, schema_of
from headway.rollout.workflows import Episode, in_thread
from headway.rollout.workflows.conversation import Conversation
from headway.tasks import imports
from headway.tasks.sandbox.pool import SandboxError, Sandboxes
from headway.types import Trajectory

PYTHON = "python"
_LONGEST_RESULT = 4000


class ToolUse:
    needs_chat = True  # a chat template lists the tools in the prompt

    def __init__(self, tools: list[str], turns: int = 8, deadline_s: float = 10.0) -> None:
        """`tools` are file.py:function each, or "python" for the interpreter; `turns` bounds the completions."""
        self.turns, self.deadline_s = turns, deadline_s
        functions = [python if reference == PYTHON else _load(reference) for reference in tools]
        self.functions: dict[str, Callable[..., Any]] = {function.__name__: function for function in functions}
        self.schemas = [schema_of(function) for function in functions]
        if PYTHON in tools:
            _sandboxes()  # a machine that cannot isolate says so at the start

    async def run(self, episode: Episode) -> Trajectory:
        talk, answer = Conversation(episode, self.schemas), ""
        async for written in talk.turns(self.turns):
            answer, calls = parse(written)
            if not calls or talk.num_turns == self.turns:
                break
            results = await asyncio.gather(*(self.call(call) for call in calls))
            talk.add([{"role": "tool", "content": result} for result in results])
        return talk.finish(await episode.verify(answer))

    async def call(self, call: ToolCall) -> str:
        """What the tool returned, or what was wrong; a tool's error is for the model to read."""
        function = self.functions.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name}; there are {', '.join(self.functions)}"
        try:
            async with asyncio.timeout(self.deadline_s):
                if inspect.iscoroutinefunction(function):
                    result = await function(**call.arguments)
                else:
                    result = await in_thread(function, **call.arguments)
        except TimeoutError:
            return f"error: {call.name} took longer than {self.deadline_s:g} s"
        except SandboxError:  # of the machine, and nothing for a model to read
            raise
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        return text if len(text) <= _LONGEST_RESULT else text[:_LONGEST_RESULT] + " …"


def _load(reference: str) -> Callable[..., Any]:
    function = imports.load(reference)
    if not inspect.isfunction(function):
        raise ConfigError(f"tool {reference} is not a function")
    return function


@functools.cache
def _sandboxes() -> Sandboxes:
    return Sandboxes()


def python(code: str) -> str:
    """Run a Python program and return what it prints."""
    runs = _sandboxes().run(code, [""])
    if not runs:
        return "error: the program ran too long or ended its sandbox"
    output = runs[0].output.decode(errors="replace")
    return output + (f"\nerror: {runs[0].errors}" if runs[0].errors else "")
