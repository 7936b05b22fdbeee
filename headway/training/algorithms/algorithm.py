"""The chosen algorithm as one object: micro-batch to loss, and sums to the figures people read."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from headway.algorithm import AlgorithmSection
from headway.training.algorithms.corrections import log_ratio, second_moment_limit
from headway.training.algorithms.losses import MASKS, Figures, PolicyLossInput, PolicyLossOutput, policy_loss

if TYPE_CHECKING:
    from headway.training.batches import Share


class Algorithm:
    def __init__(self, chosen: AlgorithmSection):
        self.chosen = chosen

    @property
    def needs_proximal(self) -> bool:
        """Whether π_prox is needed before the first minibatch's own pass, which otherwise gives it for nothing."""
        return self.chosen.mask_second_moment > 0

    def figures(
        self,
        share: "Share",
        number: int,
        policies: list[tuple[Tensor, Tensor]] | None = None,
        total: Callable[[Tensor], Tensor] = lambda figures: figures,
    ) -> Figures:
        """Those of minibatch `number`; `policies` are π_prox and π_behav of its micro-batches on this rank."""
        budget, limit = self.chosen.mask_second_moment, 0.0
        if budget:
            assert policies is not None
            limit = second_moment_limit([log_ratio(*pair) for pair in policies], budget, total)
        coef = entropy_coef(self.chosen, share.entropy)
        return Figures(share.num_trained[number], share.num_sequences[number], limit, coef)

    def loss(self, inputs: PolicyLossInput, figures: Figures) -> PolicyLossOutput:
        return policy_loss(inputs, figures, self.chosen)

    def report(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Sums over all minibatches as the figures a person reads, per trained token where they are sums."""
        tokens = max(1.0, totals.get("tokens", 0.0))
        names = {
            "loss": "loss_sum",
            "entropy": "entropy_sum",
            "clip_fraction": "clip_count",
            "capped_fraction": "capped_count",
            "behaviour_weight_mean": "behaviour_weight_sum",
            "kl": "kl_sum",
            "behaviour_kl": "behaviour_kl_sum",
            "reference_kl": "reference_kl_sum",
        }
        means = {shown: totals.get(summed, 0.0) / tokens for shown, summed in names.items()}
        if "reference_kl_sum" not in totals:
            del means["reference_kl"]
        square = totals.get("weight_square_sum", 0.0)
        size = totals["weight_sum"] ** 2 / square / tokens if square else 0.0
        largest = {name: totals.get(name, 0.0) for name in ("behaviour_weight_max", "logprob_gap_max")}
        masked = {name: totals[name] for name in MASKS if name in totals}
        return means | largest | masked | {"effective_sample_size": size}


def entropy_coef(chosen: AlgorithmSection, entropy: float) -> float:
    """The weight of the bonus where the batch was sampled with this entropy: fixed, or proportional to what is missing.

    What steers is the mean −log π_behav of the batch, so it follows from the batch alone, the same on every rank and
    in a replay.
    """
    if not chosen.entropy_target:
        return chosen.entropy_coef
    missing = (chosen.entropy_target - entropy) / chosen.entropy_target
    return chosen.entropy_coef * min(1.0, max(-1.0, missing))
