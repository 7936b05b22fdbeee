"""A task without a trained model: prompts that say how long each of their trajectories must be, and coin-toss rewards.

Lengths are forced by the workflow, so every system, and every η, generates the same amounts in the same order.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from shapes import LongTailed

from headway.rollout.workflows import Episode
from headway.types import Reward, Sequence, Trajectory


def write_rows(path: Path, lengths: LongTailed, num_groups: int, group_size: int, prompt_length: int) -> None:
    """One row per group, in the order they are trained in."""
    draws = np.random.default_rng(lengths.seed)
    with path.open("w") as file:
        for group in range(num_groups):
            prompt = "".join(map(str, draws.integers(0, 10, prompt_length)))
            wanted = [lengths.length(group, trajectory) for trajectory in range(group_size)]
            file.write(json.dumps({"prompt": prompt, "lengths": wanted}) + "\n")


class ForcedLengths:
    """As single turn, but a completion is as long as its row says, and its reward is a coin that its tokens toss."""

    async def run(self, episode: Episode) -> Trajectory:
        wanted = int(episode.prompt.task["lengths"][episode.index])
        completion = await episode.generate(episode.prompt.tokens, max_tokens=wanted)
        sequence = Sequence.single_turn(episode.prompt.tokens, completion)
        reward = float(zlib.crc32(completion.tokens.tobytes()) & 1)
        return Trajectory(
            index=episode.index,
            sequences=(sequence,),
            rewards=(Reward(sequence=0, position=len(sequence.tokens) - 1, value=reward),),
            temperature=episode.temperature,
            stops=(completion.stop,),
        )


def no_score(task: dict[str, Any], text: str) -> float:
    """The workflow scores; this is what the config names as the verifier."""
    return 0.0
