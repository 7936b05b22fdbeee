"""Sampling: the numbers drawn are those of the definition, and so are the distributions and the log-probs."""

import math

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from headway.engine.embedded.sampler import request_counter, sample, uniforms
from headway.types import Request, RequestKey, Sampling

MASK = 2**64 - 1
ALMOST_ONE = 1.0 - 2.0**-53
"""The largest number `uniforms` can give."""


def splitmix64(counter: int, position: int) -> float:
    """The textbook generator, its state advanced step by step, in Python's own integers."""
    state = counter
    for _ in range(position + 1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 11) / 2**53


def inverse_cdf(weights: list[float], uniform: float) -> int:
    """The first token whose cumulative weight exceeds u times the total."""
    target, mass = uniform * math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > target:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def kept_by_truncation(probabilities: list[float], sampling: Sampling) -> set[int]:
    """Top-k, then the smallest set of the likeliest whose part of what is left reaches top-p; at least one token."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    total = math.fsum(probabilities[token] for token in order[: sampling.top_k or None])
    kept, mass = set[int](), 0.0
    for rank, token in enumerate(order):
        if kept and ((sampling.top_k and rank >= sampling.top_k) or mass >= sampling.top_p * total):
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


def make_request(seed: int = 0, group: int = 0, trajectory: int = 0, call: int = 0, stream: str = "train") -> Request:
    return Request(RequestKey(group, trajectory, call, stream), np.ones(1, np.int32), Sampling(), seed)


def draw_many(logits_V: Tensor, sampling: Sampling, num: int, batch: int) -> np.ndarray:
    counter = np.full(batch, request_counter(make_request(seed=3)), np.uint64)
    drawn = []
    for start in range(0, num, batch):
        numbers = uniforms(counter, np.arange(start, start + batch, dtype=np.uint64))
        drawn.append(sample(logits_V.expand(batch, -1), [sampling] * batch, numbers)[0].numpy())
    return np.concatenate(drawn)


def assert_distributed_as(drawn: np.ndarray, probabilities: np.ndarray, bins: np.ndarray) -> None:
    """Pearson's χ² over bins that each expect enough draws; six standard deviations above its mean is no accident."""
    expected = np.bincount(bins, probabilities) * len(drawn)
    found = np.bincount(bins[drawn], minlength=len(expected))
    assert expected[expected > 0].min() > 5, "the test itself needs fuller bins"
    assert (found[expected == 0] == 0).all()
    enough = expected > 0
    chi2 = ((found[enough] - expected[enough]) ** 2 / expected[enough]).sum()
    freedom = enough.sum() - 1
    assert chi2 < freedom + 6 * math.sqrt(2 * freedom)


def test_uniforms_are_splitmix64_at_any_position_of_any_stream() -> None:
    counters = [0, 1, MASK, 0x9E3779B97F4A7C15, 2**63, 123456789123456789]
    for position in (0, 1, 2, 77, 3000):
        found = uniforms(np.array(counters, np.uint64), np.full(len(counters), position, np.uint64))
        assert found.tolist() == [splitmix64(counter, position) for counter in counters]
    assert uniforms(np.array([0], np.uint64), np.array([0], np.uint64))[0] == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_uniforms_lie_in_the_half_open_interval_and_are_spread_evenly() -> None:
    numbers = uniforms(np.full(20000, 42, np.uint64), np.arange(20000, dtype=np.uint64))
    assert numbers.min() >= 0 and numbers.max() <= ALMOST_ONE
    assert_distributed_as((numbers * 100).astype(int), np.full(100, 0.01), np.arange(100))


def test_a_request_draws_from_a_stream_of_its_own() -> None:
    """The stream depends on seed, stream, group, trajectory and call: each of them, and nothing else."""
    requests = [make_request(), make_request(seed=1), make_request(group=1), make_request(trajectory=1)]
    requests += [make_request(call=1), make_request(stream="eval"), make_request(group=11), make_request(seed=11)]
    assert len({int(request_counter(request)) for request in requests}) == len(requests)
    assert request_counter(make_request(4, 3, 2, 1, "eval")) == xxhash.xxh3_64_intdigest(b"4/eval/3/2/1")
    longer = Request(make_request().key, np.ones(9, np.int32), Sampling(temperature=0.5), 0)
    assert request_counter(longer) == request_counter(make_request())


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_small_vocabulary_follows_the_softmax_at_its_temperature(temperature: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    drawn = draw_many(logits, Sampling(temperature=temperature), 40000, batch=1000)
    probabilities = (logits.double() / temperature).softmax(-1).numpy()
    rare = probabilities * len(drawn) < 8
    bins = np.where(rare, np.argmax(probabilities), np.arange(50))
    assert_distributed_as(drawn, probabilities, bins)


def test_large_vocabulary_with_heavy_and_empty_blocks_follows_the_softmax() -> None:
    """49,152 tokens: blocks of 256 that hold most of the mass, next to none, and exactly none of it."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(49152, generator=generator)
    logits[256:512] += 6
    logits[512:1024] = -math.inf
    logits[40000:40010] += 9
    logits[49151] += 11
    drawn = draw_many(logits, Sampling(), 10000, batch=50)
    probabilities = logits.double().softmax(-1).numpy()
    order = np.argsort(-probabilities)
    bins = np.empty(49152, int)
    bins[order[:100]] = np.arange(100)
    bins[order[100:]] = 100 + order[100:] // 4096
    bins[512:1024] = 112
    assert len(np.unique(bins)) == 113
    assert_distributed_as(drawn, probabilities, bins)


@pytest.mark.parametrize(("vocab", "scale"), [(50, 1.0), (255, 3.0), (256, 1.0), (257, 2.0), (1000, 5.0), (5000, 2.0)])
def test_tokens_equal_those_of_a_scalar_inverse_cdf(vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator) * scale
    numbers = uniforms(np.arange(40, dtype=np.uint64), np.zeros(40, np.uint64))
    numbers[:3] = [0.0, ALMOST_ONE, 0.5]
    tokens, _ = sample(logits, [Sampling()] * 40, numbers)
    for row, uniform in enumerate(numbers):
        weights, token = logits[row].double().softmax(-1).tolist(), int(tokens[row])
        if token != inverse_cdf(weights, uniform):  # only where the number falls on a border, to fp32 rounding
            below, above = math.fsum(weights[:token]), math.fsum(weights[: token + 1])
            assert below - 1e-6 < uniform < above + 1e-6
            assert min(uniform - below, above - uniform) < 1e-6


def test_logprobs_are_of_the_full_distribution_at_the_rows_own_temperature() -> None:
    """Log-prob = log-softmax(logits ÷ temperature) in fp32, before top-k and top-p; at temperature 1 when greedy."""
    logits = 4 * torch.randn(6, 3000, generator=torch.Generator().manual_seed(2))
    samplings = [
        Sampling(),
        Sampling(temperature=0.25),
        Sampling(temperature=3.0, top_k=5),
        Sampling(top_p=0.3),
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, top_k=2, top_p=0.1),
    ]
    tokens, logprobs = sample(logits, samplings, uniforms(np.arange(6, dtype=np.uint64), np.zeros(6, np.uint64)))
    assert logprobs.dtype == torch.float32
    for row, sampling in enumerate(samplings):
        expected = (logits[row].double() / (sampling.temperature or 1.0)).log_softmax(-1)[tokens[row]]
        assert float(logprobs[row]) == pytest.approx(float(expected), abs=3e-6)
    assert tokens[4] == logits[4].argmax() and tokens[5] == logits[5].argmax()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=1),
        Sampling(top_k=7),
        Sampling(top_k=10**6),
        Sampling(top_p=1e-9),
        Sampling(top_p=0.6),
        Sampling(top_k=20, top_p=0.9, temperature=1.7),
        Sampling(top_k=3, top_p=0.99, temperature=0.5),
    ],
)
@pytest.mark.parametrize("vocab", [50, 700])
def test_truncation_keeps_exactly_the_likeliest_and_renormalises(sampling: Sampling, vocab: int) -> None:
    logits = 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    probabilities = (logits.double() / sampling.temperature).softmax(-1).tolist()
    kept = kept_by_truncation(probabilities, sampling)
    weights = [p if token in kept else 0.0 for token, p in enumerate(probabilities)]
    numbers = np.linspace(0, ALMOST_ONE, 400)
    tokens, _ = sample(logits.expand(400, -1), [sampling] * 400, numbers)
    wrong = sum(int(token) != inverse_cdf(weights, u) for token, u in zip(tokens, numbers, strict=True))
    assert set(tokens.tolist()) <= kept
    assert wrong <= 2, "more than the borders between tokens can explain"


def test_top_p_is_of_what_top_k_leaves_as_in_transformers() -> None:
    """p = .5 .3 .12 .08, k = 2, p = 0.6: renormalised, the first token alone reaches 0.6."""
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.tensor([0.5, 0.3, 0.12, 0.08]).log()
    for top_k, top_p in [(2, 0.6), (2, 0.65), (3, 0.6), (3, 0.9), (4, 0.85)]:
        scores = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits[None].clone()))[0]
        samplings, numbers = [Sampling(top_k=top_k, top_p=top_p)] * 400, np.linspace(0, 0.999, 400)
        tokens, _ = sample(logits.repeat(400, 1), samplings, numbers)
        assert set(tokens.tolist()) == set(scores.isfinite().nonzero()[:, 0].tolist()), (top_k, top_p)


def test_a_row_is_not_touched_by_the_settings_or_logits_of_others() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(4))
    samplings = [
        Sampling(top_k=2),
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(temperature=0.5),
        Sampling(top_p=0.2),
    ]
    numbers = uniforms(np.arange(5, dtype=np.uint64), np.zeros(5, np.uint64))
    tokens, logprobs = sample(logits, samplings, numbers)
    for row in range(5):
        token, logprob = sample(logits[row : row + 1], samplings[row : row + 1], numbers[row : row + 1])
        assert int(token) == int(tokens[row])
        assert float(logprob) == float(logprobs[row])


@pytest.mark.parametrize("vocab", [50, 256, 1000])
@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
def test_extreme_logits_never_yield_a_token_without_probability(vocab: int, uniform: float) -> None:
    impossible = torch.zeros(vocab)
    impossible[[0, vocab // 2, vocab - 1]] = -math.inf
    certain = torch.full((vocab,), -math.inf)
    certain[vocab // 3] = 5.0
    huge = torch.full((vocab,), -1e30)
    huge[[3, 4]] = 1e30
    for logits in (impossible, certain, huge, -huge):
        allowed = torch.nonzero(logits.double().softmax(-1) > 0).squeeze(-1).tolist()
        for sampling in (Sampling(), Sampling(top_k=40), Sampling(top_p=0.95), Sampling(temperature=0.0)):
            tokens, logprobs = sample(logits[None], [sampling], np.array([uniform]))
            assert int(tokens) in allowed
            assert float(logprobs) == pytest.approx(-math.log(len(allowed)), abs=1e-5)


def test_the_largest_uniform_takes_the_last_token_with_weight_even_before_empty_blocks() -> None:
    """u → 1: rounding must not push the draw past the last token, into padding or into what truncation emptied."""
    for seed in range(200):
        logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(seed))
        logits[0, 100:] -= 1000 if seed % 2 else 0
        kept = logits[0].topk(10).indices.tolist()
        token, _ = sample(logits, [Sampling(top_k=10)], np.array([ALMOST_ONE]))
        assert int(token) == max(kept)
