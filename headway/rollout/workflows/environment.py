"""Environments written for the package `verifiers`, unchanged: their rollouts, their tools, their rewards.

    [task]
    train = "my_env.py:load_environment"         # or module:load_environment of an installed environment
    eval = "my_env.py:load_environment@eval"
    chat = true

    [rollout]
    workflow = "headway.rollout.workflows.environment:Environment"
    settings = {environment = "my_env.py:load_environment"}

The environment talks to the episode's endpoint through the client of its own package, so its calls become the
trajectory as any agent's do; its rubric gives the reward, and the rubric's metrics are the components. Environments
that score several rollouts together are refused: here every episode is rewarded by itself.
"""

import logging
from collections.abc import Callable
from typing import Any

from headway.errors import ConfigError
from headway.rollout.workflows.agent import Agent
from headway.tasks import imports

MODEL = "policy"
_TEXT_ERRORS = ("EmptyModelResponseError", "InvalidModelResponseError")
"""What a policy's text can cause in that package; such an episode has the reward that the rubric gives it."""


class EnvironmentFailed(Exception):
    """The environment broke; its reward would be none."""


class Environment(Agent):
    def __init__(self, environment: str) -> None:
        """`environment` is file.py:function or module:function, which returns an environment."""
        super().__init__(environment)
        self._environment = _make(self._function, environment)
        logging.getLogger("verifiers").setLevel(logging.CRITICAL)  # a broken episode is reported as a failure

    async def _call(self, task: dict[str, Any], url: str, key: str) -> tuple[float, dict[str, float]]:
        import openai
        from verifiers.clients import OpenAIChatCompletionsClient

        given = {name: value for name, value in task.items() if value is not None}
        # No deadline of its own: a call waits for the engine, under the episode's.
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=None) as client:
            made = await self._environment.run_rollout(given, OpenAIChatCompletionsClient(client), MODEL, {})
        error = made.get("error")
        if error and not any(name in str(error) for name in _TEXT_ERRORS):
            raise EnvironmentFailed(str(error))
        metrics = {name: float(value) for name, value in (made.get("metrics") or {}).items() if value is not None}
        return float(made["reward"] or 0.0), metrics


def _make(function: Callable[[], Any], reference: str) -> Any:
    made = imports.call(function)
    if not callable(getattr(made, "run_rollout", None)):
        raise ConfigError(f"{reference} returned {type(made).__name__}, which is no environment of verifiers")
    if getattr(made, "requires_group_rollouts", False):
        raise ConfigError(f"{reference} scores several rollouts together; here every episode is rewarded by itself")
    return made
