"""Continuing elsewhere: a completion that one engine began and another ends is the completion that either would make.

Invariant 5: interruption is transparent when the weights did not change: bit for bit in deterministic mode.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driving import Swapper, alone, drive, make_core, make_request, plain_model, prompt, teacher_forced
from test_scheduler import assert_same, mixed_requests, whole

from headway.errors import RequestRefused
from headway.model.tokenizer import decode, load_tokenizer
from headway.types import Chunk, Completion, Request, StopReason


def first_part(completion: Completion, num_tokens: int) -> Chunk:
    part = slice(0, num_tokens)
    return Chunk(completion.tokens[part], completion.logprobs[part], completion.versions[part])


def received_before_it_died(path: str, requests: list[Request], num_steps: int, **settings: Any) -> dict[str, Chunk]:
    """What an engine that dies after some steps had sent of each request."""
    core = make_core(path, chunk_tokens=3, **settings)
    for request in requests:
        core.submit(request)
    chunks: dict[str, list[Chunk]] = {str(request.key): [] for request in requests}
    for _ in range(num_steps):
        for name, item in core.step():
            if isinstance(item, Chunk):
                chunks[name].append(item)
    return {name: Chunk.join(sent) for name, sent in chunks.items() if sent}


@pytest.mark.parametrize("num_steps", [3, 17, 40])
def test_invariant_5_a_completion_ended_by_another_engine_equals_the_uninterrupted_one(
    tiny_model: str, num_steps: int
) -> None:
    requests = mixed_requests()
    received = received_before_it_died(tiny_model, requests, num_steps)
    assert any(len(chunk.tokens) > 0 for chunk in received.values())
    again = [replace(request, sampled=received.get(str(request.key))) for request in requests]
    outcome = drive(make_core(tiny_model, chunk_tokens=5), again)
    for request in requests:
        assert_same(outcome[request], alone(tiny_model, request))
        sent = outcome.chunks.get(str(request.key), [])
        known = len(received[str(request.key)].tokens) if str(request.key) in received else 0
        new = [token for chunk in sent for token in chunk.tokens.tolist()]
        assert new == outcome[request].tokens.tolist()[known:], "chunks hold what this engine sampled, and no more"


def test_without_deterministic_mode_the_tokens_are_the_same_and_the_numbers_close(tiny_model: str) -> None:
    requests = mixed_requests()
    received = received_before_it_died(tiny_model, requests, 20, deterministic=False)
    again = [replace(request, sampled=received.get(str(request.key))) for request in requests]
    outcome = drive(make_core(tiny_model, False), again)
    for request in requests:
        assert_same(outcome[request], alone(tiny_model, request, deterministic=False), atol=1e-4)


def test_what_another_engine_sampled_keeps_its_versions_and_its_logprobs(tiny_model: str) -> None:
    request = make_request(prompt(30), max_tokens=24)
    before = alone(tiny_model, request)
    sampled = replace_versions(first_part(before, 10), 4)
    core, swapper, newer = make_core(tiny_model), Swapper(), plain_model(tiny_model, noise_seed=1)
    swapper.swap(core, newer, "recompute")
    completion = drive(core, [replace(request, sampled=sampled)])[request]
    assert completion.tokens[:10].tolist() == before.tokens[:10].tolist()
    assert completion.logprobs[:10].tobytes() == before.logprobs[:10].tobytes()
    assert completion.versions.tolist() == [4] * 10 + [1] * (len(completion.tokens) - 10)
    expected = teacher_forced(newer, whole(request, completion))[len(request.tokens) + 10 :]
    np.testing.assert_allclose(completion.logprobs[10:], expected, atol=1e-4)
    assert core.stats().num_generated == len(completion.tokens) - 10


def replace_versions(chunk: Chunk, version: int) -> Chunk:
    return replace(chunk, versions=np.full(len(chunk.tokens), version, np.int32))


def test_max_tokens_counts_what_was_sampled_elsewhere(tiny_model: str) -> None:
    request = make_request(prompt(20), max_tokens=16)
    before = alone(tiny_model, request)
    assert before.stop == StopReason.LENGTH
    for num_known in (1, 15, 16):
        completion = drive(make_core(tiny_model), [replace(request, sampled=first_part(before, num_known))])[request]
        assert_same(completion, before)


def test_the_context_counts_what_was_sampled_elsewhere(tiny_model: str) -> None:
    request = make_request(prompt(20), max_tokens=200)
    before = alone(tiny_model, request, context=40)
    assert before.stop == StopReason.CONTEXT and len(before.tokens) == 20
    for num_known in (1, 19, 20):
        sampled = first_part(before, num_known)
        completion = drive(make_core(tiny_model, context=40), [replace(request, sampled=sampled)])[request]
        assert_same(completion, before)


def test_a_stop_token_that_was_sent_before_its_completion_still_ends_it(tiny_model: str) -> None:
    request = make_request(prompt(20), max_tokens=40)
    free = alone(tiny_model, request)
    stopping = replace(request, sampling=replace(request.sampling, stop_tokens=(int(free.tokens[12]),)))
    before = alone(tiny_model, stopping)
    assert before.stop == StopReason.STOP
    completion = drive(make_core(tiny_model), [replace(stopping, sampled=first_part(before, len(before.tokens)))])
    assert_same(completion[stopping], before)


def test_a_stop_string_that_spans_the_border_is_seen(tiny_model: str) -> None:
    request = make_request(prompt(20), max_tokens=40)
    free = alone(tiny_model, request)
    text = decode(load_tokenizer(tiny_model), free.tokens[8:12].tolist())
    stopping = replace(request, sampling=replace(request.sampling, stop_strings=(text,)))
    before = alone(tiny_model, stopping)
    assert before.stop == StopReason.STOP and len(before.tokens) <= 12
    for num_known in range(1, len(before.tokens) + 1):
        sampled = first_part(before, num_known)
        assert_same(drive(make_core(tiny_model), [replace(stopping, sampled=sampled)])[stopping], before)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([5] * 9, "comes with 9 sampled tokens, more than its max_tokens of 8"),
        ([5, 100_000], "holds a token outside the model's vocabulary"),
        ([5, -1], "holds a token outside the model's vocabulary"),
    ],
)
def test_what_no_engine_can_have_sampled_is_refused(tiny_model: str, tokens: list[int], sentence: str) -> None:
    length = len(tokens)
    sampled = Chunk(np.array(tokens, np.int32), np.zeros(length, np.float32), np.zeros(length, np.int32))
    with pytest.raises(RequestRefused, match=sentence):
        make_core(tiny_model).submit(replace(make_request(prompt(20), max_tokens=8), sampled=sampled))


def test_a_continued_request_goes_ahead_of_those_that_wait_and_leaves_nothing_behind(tiny_model: str) -> None:
    request = make_request(prompt(20), max_tokens=16)
    before = alone(tiny_model, request)
    core = make_core(tiny_model, max_num_seqs=1)
    others = [make_request(prompt(12, seed=group), group=group, max_tokens=6) for group in (1, 2, 3)]
    for other in others[:2]:
        core.submit(other)
    core.step()
    core.submit(replace(request, sampled=first_part(before, 4)))
    core.submit(others[2])
    ended = [name for _ in range(200) for name, item in core.step() if isinstance(item, Completion)]
    assert ended == [str(r.key) for r in (others[0], request, others[1], others[2])]
    assert not core.has_work and core.stats().kv_used == 0
