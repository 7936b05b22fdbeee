"""What a training step changes: samples of it, and copies on the host.

Invariant 14: crash safety, where retraining cannot be bit-equal.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn
from training import make_batch, make_trainer

from headway.model.sharding import Masters
from headway.training.batches import MemoryFit
from headway.training.state import NUM_SAMPLED, HostCopy, sample_weights, weight_difference


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(700, 40))


def test_a_sample_estimates_how_far_two_sets_of_weights_lie_apart() -> None:
    torch.manual_seed(0)
    module = Two()
    before = sample_weights(Masters(module))
    assert len(before) == NUM_SAMPLED
    moved = torch.randn(700, 40) * 0.01
    exact = float(moved.norm() / torch.cat([module.large.detach().flatten(), module.small.detach()]).norm())
    with torch.no_grad():
        module.large += moved
    max_abs, relative_norm = weight_difference(before, sample_weights(Masters(module)))
    assert relative_norm == pytest.approx(exact, rel=0.2)
    assert 0 < max_abs <= float(moved.abs().max()) + 1e-6
    assert weight_difference(before, before) == (0.0, 0.0)


def test_samples_that_cannot_be_compared_have_no_difference() -> None:
    """A record of another rank count, or of before samples were recorded."""
    assert all(map(math.isnan, weight_difference((), (1.0,))))


def test_a_copy_on_the_host_does_not_follow_the_live_tensors() -> None:
    live = {"weights/a": torch.ones(4)}
    copy = HostCopy(live, torch.device("cpu"))
    live["weights/a"] += 1
    assert torch.equal(copy.tensors()["weights/a"], torch.ones(4))


def test_a_step_reports_its_fit_so_that_retraining_packs_it_alike(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model, token_budget=64)
    report = trainer.train(make_batch())
    assert str(MemoryFit.of_metrics(report.metrics)) == str(MemoryFit(64, recompute=False))
    np.testing.assert_array_equal(report.weights_sample, sample_weights(trainer.masters))
    assert MemoryFit.of_metrics({"loss": 0.0}) is None
