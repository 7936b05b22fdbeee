"""Synchronous training in one readable loop, on Headway's own parts: generate a batch, score it, train on it, repeat.

    python examples/sync_loop.py configs/quickstart.toml [--section.key=value ...]

It is what the asynchronous system is measured against: `headway train` with staleness.max_staleness = 0 and
run.deterministic = true gives the same tokens, the same losses and the same weights, bit for bit
(tests/test_sync_equality.py holds the two together).
"""

import asyncio
import sys
from dataclasses import dataclass

import torch

from headway.config import Config, load
from headway.engine.embedded.service import EmbeddedEngine
from headway.launch import Prepared, prepare
from headway.model.tokenizer import decode, load_tokenizer
from headway.tasks import imports
from headway.training.trainer import Trainer
from headway.types import (
    Batch,
    Completion,
    Group,
    Prompt,
    Request,
    RequestKey,
    Reward,
    Sequence,
    StepReport,
    Trajectory,
)
from headway.weights.fingerprints import digest


@dataclass
class Step:
    batch: Batch
    report: StepReport
    digest: str


class SyncLoop:
    def __init__(self, config: Config):
        self.config = config
        self.prepared: Prepared = prepare(config)
        self.stream = self.prepared.stream
        self.verify = imports.load(config.task.verifier)
        self.tokenizer = load_tokenizer(config.model.path)
        self.engine = EmbeddedEngine(config.model.path, config.model.dtype, config.engine, config.run.deterministic)
        self.trainer = Trainer(config.model, config.trainer, config.algorithm, worst_staleness=0)

    async def run(self) -> list[Step]:
        await self.engine.open()
        await self.load_weights()
        steps = [await self.step(version) for version in range(self.config.run.steps)]
        await self.engine.close()
        await self.trainer.close()
        return steps

    async def step(self, version: int) -> Step:
        """One training step: B groups of the current policy, scored, trained on, and the new weights loaded."""
        first = version * self.config.trainer.batch_groups
        ids = range(first, first + self.config.trainer.batch_groups)
        groups = await asyncio.gather(*(self.group(group_id) for group_id in ids))
        batch = Batch(version, tuple(groups))
        report = self.trainer.train(batch)
        return Step(batch, report, await self.load_weights())

    async def group(self, group_id: int) -> Group:
        prompt, size = self.stream[group_id], self.config.rollout.group_size
        trajectories = await asyncio.gather(*(self.trajectory(group_id, prompt, index) for index in range(size)))
        return Group(group_id, prompt.index, 0, size, tuple(trajectories))

    async def trajectory(self, group_id: int, prompt: Prompt, index: int) -> Trajectory:
        key = RequestKey(group_id, index)
        request = Request(key, prompt.tokens, self.prepared.sampling, self.config.run.seed)
        async for item in self.engine.generate(request):
            if isinstance(item, Completion):
                completion = item
        score = float(self.verify(prompt.task, decode(self.tokenizer, completion.tokens)))
        sequence = Sequence.single_turn(prompt.tokens, completion)
        reward = Reward(0, len(sequence.tokens) - 1, score)
        return Trajectory(index, (sequence,), (reward,), self.config.sampling.temperature, (completion.stop,))

    async def load_weights(self) -> str:
        update = self.trainer.publish()
        await self.engine.stage_weights(update)
        await self.engine.swap(update.version, self.config.engine.kv_on_swap)
        return digest(update.fingerprints)


def main() -> None:
    config = load(sys.argv[1], sys.argv[2:])
    torch.set_num_threads(config.trainer.threads)
    for step in asyncio.run(SyncLoop(config).run()):
        rewards = [trajectory.reward for group in step.batch.groups for trajectory in group.trajectories]
        mean = sum(rewards) / len(rewards)
        print(f"step {step.report.version}: reward {mean:.3f}, loss {step.report.metrics['loss']:.4f}, {step.digest}")


if __name__ == "__main__":
    main()
