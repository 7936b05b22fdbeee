"""A conversation with the policy, token for token: what was sampled is trained, and nothing is tokenised twice.

    talk = Conversation(episode)
    async for answer in talk.turns(4):
        score = await episode.verify(answer)
        if score == 1:
            break
        talk.say("That is not right. Try again.")
    return talk.finish(score)

The text of others (feedback, a tool's result) goes in between as the chat template writes it, or as it is where the
prompt is plain text, and is never trained.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import ConfigError
from headway.model.tokenizer import Messages, render_chat
from headway.rollout.workflows import Episode, LimitReached
from headway.types import NOT_SAMPLED, Chat, Completion, Floats, Ints, Reward, Sequence, StopReason, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\u2980\u2980"
"""Stands for what the model wrote when the template is asked what follows it."""


@dataclass
class Growing:
    """A sequence in the making."""

    tokens: Ints
    loss_mask: Floats
    logprobs: Floats
    versions: Ints
    roles: dict[int, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, prompt: Ints) -> "Growing":
        ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        return cls(ints, floats, floats, ints).with_text(prompt)

    def with_text(self, tokens: Ints, role: str = "") -> "Growing":
        """Followed by tokens that no policy sampled, and by whom they were said."""
        zeros = np.zeros(len(tokens), np.float32)
        roles = self.roles | ({len(self.tokens): role} if role and len(tokens) else {})
        return replace(self._join(tokens, zeros, zeros, np.full(len(tokens), NOT_SAMPLED, np.int32)), roles=roles)

    def with_completion(self, completion: Completion) -> "Growing":
        ones = np.ones(len(completion.tokens), np.float32)
        return self._join(completion.tokens, ones, completion.logprobs, completion.versions)

    def up_to_last_sampled(self) -> "Growing":
        """Without the text at the end that nobody answered."""
        sampled = np.flatnonzero(self.versions != NOT_SAMPLED)
        end = sampled[-1] + 1 if len(sampled) else len(self.tokens)
        roles = {place: role for place, role in self.roles.items() if place < end}
        return Growing(self.tokens[:end], self.loss_mask[:end], self.logprobs[:end], self.versions[:end], roles)

    def _join(self, tokens: Ints, mask: Floats, logprobs: Floats, versions: Ints) -> "Growing":
        return Growing(
            np.concatenate([self.tokens, tokens]),
            np.concatenate([self.loss_mask, mask]),
            np.concatenate([self.logprobs, logprobs]),
            np.concatenate([self.versions, versions]),
            self.roles,
        )

    def sequence(self) -> Sequence:
        return Sequence(self.tokens, self.loss_mask, self.logprobs, self.versions, self.roles)


def tokens_between(
    tokenizer: "PreTrainedTokenizerBase", chat: Chat, last: Completion, messages: Messages, tools: Any = None
) -> Ints:
    """The tokens from the end of a completion, through further messages, to where the model writes next."""
    before = {"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}
    text = render_chat(tokenizer, [*before, *messages], chat.template, tools)
    tokens = np.asarray(tokenizer.encode(text.rpartition(_MARK)[2], add_special_tokens=False), np.int32)
    # The token that ends a turn was sampled, or it was not; the template writes it in any case.
    ended = len(tokens) and len(last.tokens) and last.stop == StopReason.STOP and tokens[0] == last.tokens[-1]
    return tokens[1:] if ended else tokens


def roles_of(messages: Messages) -> str:
    """Who said them, each once: "tool", or "tool, user"."""
    return ", ".join(dict.fromkeys(str(message["role"]) for message in messages))


class Conversation:
    """One episode's turns; `LimitReached` when a limit of the episode leaves no room for another completion."""

    def __init__(self, episode: Episode, tools: list[dict[str, Any]] | None = None) -> None:
        """With `tools`, the chat template lists them in the prompt."""
        self._episode, self._tools, self._chat = episode, tools, episode.prompt.chat
        self._growing = Growing.begin(self._prompt_tokens())
        self._completions: list[Completion] = []
        self._rewards: list[Reward] = []
        self._components: dict[str, float] = {}

    def _prompt_tokens(self) -> Ints:
        if not self._tools:
            return self._episode.prompt.tokens
        if self._chat is None:
            raise ConfigError("tools are written into the prompt by a chat template; set task.chat = true")
        text = render_chat(self._episode.tokenizer, self._chat.messages, self._chat.template, self._tools)
        return self._episode.tokens(text)

    @property
    def num_turns(self) -> int:
        return len(self._completions)

    async def ask(self, max_tokens: int | None = None, stop_strings: tuple[str, ...] = ()) -> str:
        """The model's next turn."""
        completion = await self._episode.generate(self._growing.tokens, max_tokens, stop_strings)
        self._growing = self._growing.with_completion(completion)
        self._completions.append(completion)
        return self._episode.text(completion.tokens)

    async def turns(self, most: int) -> AsyncIterator[str]:
        """The model's turns, each sampled when it is asked for; fewer where the episode's limits end it before."""
        for _ in range(most):
            try:
                answer = await self.ask()
            except LimitReached:
                if not self._completions:
                    raise
                return
            yield answer

    def say(self, text: str, role: str = "user") -> None:
        """Add a turn of somebody else, which is not trained."""
        if self._chat is None or not self._completions:
            self._growing = self._growing.with_text(self._episode.tokens(text), role)
        else:
            self.add([{"role": role, "content": text}])

    def add(self, messages: Messages) -> None:
        """Add turns of others as chat messages."""
        assert self._chat is not None and self._completions
        between = tokens_between(self._episode.tokenizer, self._chat, self._completions[-1], messages, self._tools)
        self._growing = self._growing.with_text(between, roles_of(messages))

    def reward(self, value: float) -> None:
        """Reward what was written so far, at its last token; the rewards of an episode add up."""
        self._rewards.append(Reward(0, len(self._growing.tokens) - 1, value))

    def finish(self, reward: float | None = None, components: dict[str, float] | None = None) -> Trajectory:
        """The episode as a trajectory; text after the model's last turn is left out."""
        if reward is not None:
            self.reward(reward)
        sequence = self._growing.up_to_last_sampled().sequence()
        last = len(sequence.tokens) - 1
        return Trajectory(
            index=self._episode.index,
            sequences=(sequence,),
            rewards=tuple(Reward(0, min(reward.position, last), reward.value) for reward in self._rewards),
            temperature=self._episode.temperature,
            stops=tuple(completion.stop for completion in self._completions),
            components=components or {},
        )
