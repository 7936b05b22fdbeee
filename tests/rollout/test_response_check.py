"""What an engine may answer. Invariant 3: the engine stamps versions, as far as they are possible; invariant 9: a stop
reason must not contradict its completion."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headway.engine.completion import PartialCompletion
from headway.rollout.response_check import find_violation, rest_of
from headway.types import (
    Chunk,
    Completion,
    Request,
    RequestKey,
    Sampling,
    StopReason,
)

VOCAB, NEWEST = 50, 7
SAMPLING = Sampling(max_tokens=8, stop_tokens=(1, 2))
REQUEST = Request(RequestKey(0, 0), np.array([3, 4], np.int32), SAMPLING, 0)


def chunk(tokens: list[int], version: int = 5, **changes: Any) -> Chunk:
    made = Chunk(
        np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), np.full(len(tokens), version, np.int32)
    )
    return replace(made, **changes)


def completion(tokens: list[int], stop: StopReason = StopReason.STOP, **changes: Any) -> Completion:
    made = chunk(tokens, **changes)
    return Completion(made.tokens, made.logprobs, made.versions, stop)


Before = tuple[list[Chunk], bool]


def after(*parts: Chunk, elsewhere: bool = False) -> Before:
    """What was received before, from this engine or from another one."""
    return list(parts), elsewhere


def found(answer: Chunk | Completion, before: Before = ([], False), request: Request = REQUEST) -> str:
    partial = PartialCompletion(request)
    for part in before[0]:
        partial.extend(part.tokens, part.logprobs, part.versions)
    num_before = partial.num_tokens if before[1] else partial.num_prompt
    return find_violation(partial, answer, num_before, VOCAB, NEWEST)


def test_what_engines_really_answer_passes() -> None:
    assert not found(chunk([3, 4, 5]))
    assert not found(chunk([]))
    assert not found(chunk([0, 49], version=NEWEST))
    assert not found(chunk([3, 4], logprobs=np.array([0.0, 1e-6], np.float32)))
    assert not found(chunk([3, 4], versions=np.array([5, 6], np.int32)), after(chunk([9])))
    assert not found(completion([3, 4, 1]))
    assert not found(completion([3] * 8, StopReason.LENGTH))
    assert not found(completion([3] * 7 + [2], StopReason.STOP))
    assert not found(completion([3, 4], StopReason.CONTEXT))
    assert not found(completion([], StopReason.CONTEXT))
    assert not found(completion([3], StopReason.ABORTED))


def test_a_completion_that_goes_on_from_another_engine_may_be_of_an_older_version() -> None:
    known = after(chunk([3, 4], version=6), elsewhere=True)
    assert not found(completion([3, 4, 5, 1], versions=np.array([6, 6, 5, 5], np.int32)), known)
    here = after(chunk([3, 4], version=6))
    assert "decrease" in found(completion([3, 4, 5, 1], versions=np.array([6, 6, 5, 5], np.int32)), here)


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (chunk([3, 50]), "outside the vocabulary of 50"),
        (chunk([3, -1]), "outside the vocabulary"),
        (chunk([3, 4], logprobs=np.array([-1, np.nan], np.float32)), "a log-prob is not a finite number"),
        (chunk([3, 4], logprobs=np.array([-1, -np.inf], np.float32)), "a log-prob is not a finite number"),
        (chunk([3, 4], logprobs=np.array([-1, 0.01], np.float32)), "a log-prob is above 0"),
        (chunk([3, 4], versions=np.array([5, 4], np.int32)), "its versions decrease"),
        (chunk([3], version=-1), "its versions decrease"),
        (chunk([3], version=8), "a token has version 8, and engines were sent 7 at most"),
        (chunk([3] * 9), "9 tokens are more than the 8 asked for"),
        (completion([3] * 9, StopReason.LENGTH), "9 tokens are more than the 8"),
        (completion([3, 4]), "it stopped without a stop token"),
        (completion([]), "it stopped without a stop token"),
        (completion([3, 1, 4], StopReason.CONTEXT), "it continued after a stop token"),
        (completion([3, 1, 1]), "it continued after a stop token"),
        (completion([3, 4], StopReason.LENGTH), "it reports 8 tokens reached with 2"),
    ],
)
def test_what_cannot_be_valid_is_found(answer: Chunk | Completion, wrong: str) -> None:
    assert wrong in found(answer)


def test_a_completion_must_be_what_was_sent_before_and_more() -> None:
    known = after(chunk([3, 4]), chunk([5]))
    assert not found(completion([3, 4, 5, 1]), known)
    assert not found(completion([3, 4, 5], StopReason.CONTEXT), known)
    for tokens in ([3, 4, 6, 1], [3, 4], [4, 3, 5, 1], []):
        assert "does not begin with the 3 it streamed before" in found(completion(tokens, StopReason.CONTEXT), known)


def test_a_stop_string_or_an_end_of_its_own_needs_no_stop_token() -> None:
    strings = replace(REQUEST, sampling=replace(SAMPLING, stop_strings=("\n",)))
    assert not found(completion([3, 4]), request=strings)
    assert "without a stop token" in found(completion([]), request=strings)
    free = replace(REQUEST, sampling=replace(SAMPLING, stop_tokens=()))
    assert not found(completion([3, 4]), request=free)


def test_the_rest_of_a_completion_is_what_is_new_in_it() -> None:
    whole = completion([3, 4, 5, 1])
    assert rest_of(whole, 3).tokens.tolist() == [1] and len(rest_of(whole, 4).versions) == 0
