"""Tool use: multiply two numbers of two digits, which a model this small cannot do in its head.

    prompt        37*58=
    in the head   #1906                  a guess
    with a tool   [37*58]2146#2146       the text after ] comes from the tool, and is not trained

    headway sft configs/use_calculator.toml
    headway train configs/use_calculator.toml

Most worked examples of the warm-up guess. Reinforcement learning finds out that asking the tool pays.
"""

import random
import re
import zlib
from typing import Any

from headway.rollout.workflows import Episode
from headway.rollout.workflows.conversation import Conversation
from headway.types import Trajectory

Row = dict[str, Any]
TOOL_SHARE = 0.2
_CALL = re.compile(r"\[(\d{1,4})\*(\d{1,4})\]")


def train_rows() -> list[Row]:
    return [row for row in _rows() if not _is_held_out(row)]


def eval_rows() -> list[Row]:
    return [row for row in _rows() if _is_held_out(row)]


def sft_rows() -> list[Row]:
    draw = random.Random(3)
    made = []
    for row in train_rows():
        guess = f"#{draw.randrange(100, 9999)}"
        asked = f"[{row['prompt'][:-1]}]{row['answer']}#{row['answer']}"
        made.append(row | {"completion": asked if draw.random() < TOOL_SHARE else guess})
    return made


def verify(task: Row, text: str) -> float:
    """1 if the text after the last # is the product."""
    return float(text.rpartition("#")[2] == task["answer"])


def calculate(text: str) -> str:
    """What the tool answers to a text that ends in a call."""
    call = _CALL.search(text)
    return str(int(call[1]) * int(call[2])) if call else "?"


class UseCalculator:
    async def run(self, episode: Episode) -> Trajectory:
        talk = Conversation(episode)
        answer = await talk.ask(max_tokens=24, stop_strings=("]",))
        if answer.endswith("]"):
            talk.say(calculate(answer), role="tool")
            answer = await talk.ask(max_tokens=12)
        return talk.finish(await episode.verify(answer))


def _rows() -> list[Row]:
    return [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a in range(11, 100) for b in range(11, 100)]


def _is_held_out(row: Row) -> bool:
    return zlib.crc32(row["prompt"].encode()) % 20 == 0
