"""Answer, hear whether it was right, try again: several turns, of which a later success is worth a little less."""

from headway.rollout.workflows import Episode
from headway.rollout.workflows.conversation import Conversation
from headway.types import Trajectory


class RetryUntilCorrect:
    def __init__(
        self,
        turns: int = 3,
        discount: float = 0.9,
        correct: float = 1.0,
        feedback: str = "That is not correct. Try again.",
    ) -> None:
        """An answer that scores `correct` or more ends the episode; each further turn multiplies by `discount`."""
        self.turns, self.discount, self.correct, self.feedback = turns, discount, correct, feedback

    async def run(self, episode: Episode) -> Trajectory:
        talk, score = Conversation(episode), 0.0
        async for answer in talk.turns(self.turns):
            score = await episode.verify(answer)
            if score >= self.correct or talk.num_turns == self.turns:
                break
            talk.say(self.feedback)
        return talk.finish(score * self.discount ** (talk.num_turns - 1))
