"""An agent written with the official `openai` client, trained by giving it another base URL and key.

    headway sft configs/agent.toml
    headway train configs/agent.toml

It plays the game of examples/guess_number.py and knows nothing of Headway: `play` would run against any server of the
OpenAI API. Its calls become the trajectory; what it returns is the reward.
"""

from typing import Any

import openai

TURNS, DISCOUNT = 5, 0.9


async def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
    # The URL is plain HTTP on this machine; to read certificates for it would take 25 ms of every episode.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http) as client:
        text = str(task["prompt"])
        for turn in range(TURNS):
            answer = await client.completions.create(model="policy", prompt=text, max_tokens=1)
            guess = answer.choices[0].text
            if guess == str(task["number"]):
                return float(DISCOUNT**turn)
            text += guess + ("<" if guess.isdigit() and int(guess) > task["number"] else ">")
        return 0.0
