"""One prompt, one completion, one score on its last token."""

from headway.rollout.workflows import Episode
from headway.types import Reward, Sequence, Trajectory


class SingleTurn:
    async def run(self, episode: Episode) -> Trajectory:
        completion = await episode.generate(episode.prompt.tokens)
        score = await episode.verify(episode.text(completion.tokens))
        sequence = Sequence.single_turn(episode.prompt.tokens, completion)
        return Trajectory(
            index=episode.index,
            sequences=(sequence,),
            rewards=(Reward(sequence=0, position=len(sequence.tokens) - 1, value=score),),
            temperature=episode.temperature,
            stops=(completion.stop,),
        )
