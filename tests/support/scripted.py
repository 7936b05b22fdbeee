"""An engine that says what a script tells it to, token for token as an engine would, and a worker in front of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np

from headway.config import RolloutSection
from headway.engine.fake import FakeEngine
from headway.engine.protocol import Engine
from headway.rollout.reward_pool import RewardPool
from headway.rollout.worker import RolloutWorker
from headway.types import Admission, Chat, Chunk, Completion, Prompt, Request, Sampling, StopReason, Verdict

EOS = 1
TEMPLATE = (
    "{% if tools %}tools {{ tools[0].function.name }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Scripted(FakeEngine):
    """`say(prompt text)` is what the model writes, up to an end-of-text token unless it ends in …; every token has a
    log-prob of its own."""

    def __init__(self, say: Callable[[str], str]) -> None:
        super().__init__()
        self._say, self.requests = say, list[Request]()
        self.tokenizer: Any = None
        self.num_sampled = 0

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self._say(self.tokenizer.decode(request.tokens.tolist()))
        tokens = self.tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
        tokens = np.array(tokens + [EOS] * (not text.endswith("…")), np.int32)[: request.sampling.max_tokens]
        ended = len(tokens) > 0 and tokens[-1] == EOS
        count = np.arange(self.num_sampled, self.num_sampled + len(tokens), dtype=np.float32)
        self.num_sampled += len(tokens)
        versions = np.full(len(tokens), self.version, np.int32)
        stop = StopReason.STOP if ended else StopReason.LENGTH
        if not ended:
            request_max = request.sampling.max_tokens
            stop = StopReason.LENGTH if len(tokens) == request_max else StopReason.CONTEXT
        chunk = Chunk(tokens, -count / 100, versions)
        half = len(tokens) // 2
        yield Chunk(chunk.tokens[:half], chunk.logprobs[:half], chunk.versions[:half])
        yield Completion(chunk.tokens, chunk.logprobs, chunk.versions, stop)


class Verifying:
    """The verifier is a function; a missing verdict is its error."""

    def __init__(self, verify: Callable[[dict[str, Any], str], float]) -> None:
        self._verify, self.texts = verify, list[str]()

    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Verdict:
        self.texts.append(text)
        return Verdict(self._verify(task, text), "", 0.0, {"chars": float(len(text))})

    async def stats(self) -> dict[str, int]:
        return {}


async def make_worker(
    model: str, engine: Engine, verify: Callable[[dict[str, Any], str], float], /, longest: int = 512, **rollout: Any
) -> tuple[RolloutWorker, Verifying]:
    worker = RolloutWorker(model, RolloutSection(**rollout), 0, 60, 512, longest, 5.0)
    worker._context.tokenizer.chat_template = TEMPLATE
    worker._context.tokenizer.split_special_tokens = False  # as real models' tokenizers read what a template writes
    if isinstance(engine, Scripted):
        engine.tokenizer = worker._context.tokenizer
    rewards = Verifying(verify)
    await worker.connect({"engine": engine}, {"engine": 0, "reward": 0}, (), cast(RewardPool, rewards))
    return worker, rewards


def admission(worker: RolloutWorker, text: str, size: int = 1, max_tokens: int = 64) -> Admission:
    chat = Chat([{"role": "user", "content": text}], {})
    rendered = f"user: {text}\nassistant: "
    tokens = np.array(worker._context.tokenizer.encode(rendered, add_special_tokens=False), np.int32)
    prompt = Prompt(0, tokens, rendered, {"prompt": text, "answer": "42"}, chat=chat)
    return Admission(0, prompt, size, 0, 0, Sampling(max_tokens=max_tokens, stop_tokens=(EOS,)))
