"""A task of your own: the rows, and the function that scores what the model wrote. Here: say it in exactly N words.

    python examples/custom_reward.py --run.steps=5

That runs `headway train` with the knobs of configs/smollm2.toml, this file as the task, and yours on top.
"""

import sys
from typing import Any

from headway.tasks.verifiers import verifier

Row = dict[str, Any]

TOPICS = ("the sea", "a wedding", "winter", "bread", "an old train", "the moon", "a market", "chess")
CONFIG = "configs/smollm2.toml"


def rows() -> list[Row]:
    """Any list of dicts: one field is the prompt, the others are for the verifier."""
    return [
        {"prompt": f"Write one sentence about {topic}, with exactly {num_words} words.", "num_words": num_words}
        for topic in TOPICS
        for num_words in range(4, 12)
    ]


@verifier(needs=("num_words",))
def verify(task: Row, text: str) -> float:
    """1 for the right number of words, less the further off; called in a process of its own, under a deadline."""
    distance = abs(len(text.split()) - task["num_words"])
    return 1.0 if distance == 0 else 0.5 / (1 + distance)


if __name__ == "__main__":
    from headway.cli import main

    task = [f"--task.train={__file__}:rows", "--task.eval=", f"--task.verifier={__file__}:verify"]
    sys.argv[1:] = ["train", CONFIG, *task, "--run.dir=runs/custom_reward", *sys.argv[1:]]
    main()
