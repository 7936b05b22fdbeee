"""Several turns: guess a number from 0 to 9; after a wrong guess the model reads < (it is smaller) or > (larger).

    headway sft configs/guess_number.toml
    headway train configs/guess_number.toml

The warm-up guesses at random. A guess that comes later is worth a little less, so using what was read pays: five
guesses at random find half of the numbers, halving finds all of them within four.
"""

import random
from typing import Any

from headway.rollout.workflows import Episode
from headway.rollout.workflows.conversation import Conversation
from headway.types import Trajectory

Row = dict[str, Any]
TURNS, DISCOUNT = 5, 0.9


def rows() -> list[Row]:
    """Every number under several prompts, so that the prompt does not tell the number."""
    return [{"prompt": f"{letter}:", "number": number} for letter in "abcdefgh" for number in range(10)]


def sft_rows() -> list[Row]:
    draw = random.Random(2)
    games = []
    for row in rows() * 25:
        guesses = "".join(f"{draw.randrange(10)}{draw.choice('<>')}" for _ in range(draw.randrange(TURNS)))
        games.append({"prompt": row["prompt"] + guesses, "completion": str(draw.randrange(10))})
    return games


def verify(task: Row, text: str) -> float:
    return float(text == str(task["number"]))


class GuessNumber:
    async def run(self, episode: Episode) -> Trajectory:
        talk, number, score = Conversation(episode), episode.prompt.task["number"], 0.0
        async for guess in talk.turns(TURNS):
            score = await episode.verify(guess)
            if score:
                break
            talk.say("<" if guess.isdigit() and int(guess) > number else ">")
        return talk.finish(score * DISCOUNT ** (talk.num_turns - 1))
