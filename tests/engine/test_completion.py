"""The one partial completion: stops of every kind, chunks, taking over, and that texts are compared as bytes."""

from dataclasses import replace

import numpy as np
import pytest
from driving import make_request

from headway.engine.completion import PartialCompletion, check_request
from headway.errors import RequestRefused
from headway.types import Chunk, Completion, Ints, StopReason

PROMPT = np.array([5, 6, 7], np.int32)


def given(*tokens: int) -> Ints:
    return np.array(tokens, np.int32)


def logprobs_of(tokens: Ints) -> np.ndarray:
    return -tokens.astype(np.float32)


def bytes_to_text(tokens: list[int]) -> str:
    """A tokenizer whose tokens are single bytes, as byte-level ones are for most of the world's scripts."""
    return bytes(tokens).decode(errors="replace")


def sample(partial: PartialCompletion, *tokens: int, version: int = 0) -> int:
    return partial.extend(given(*tokens), logprobs_of(given(*tokens)), version)


def test_tokens_beyond_the_first_stop_token_are_cut_off() -> None:
    partial = PartialCompletion(make_request(PROMPT, max_tokens=10, stop_tokens=(9, 8)))
    assert sample(partial, 1, 2) == 2 and partial.stop is None
    assert sample(partial, 3, 8, 9, 1, version=4) == 2
    completion = partial.completion()
    assert completion.stop == StopReason.STOP
    assert completion.tokens.tolist() == [1, 2, 3, 8] and completion.versions.tolist() == [0, 0, 4, 4]
    assert completion.logprobs.tolist() == [-1, -2, -3, -8]


def test_invariant_9_the_limit_and_the_context_are_distinguished_and_a_stop_wins() -> None:
    request = make_request(PROMPT, max_tokens=4, stop_tokens=(9,))
    for context, tokens, stop in [
        (None, (1, 1, 1, 1), StopReason.LENGTH),
        (7, (1, 1, 1, 1), StopReason.LENGTH),
        (6, (1, 1, 1), StopReason.CONTEXT),
        (6, (1, 1, 9), StopReason.STOP),
        (None, (1, 1, 1, 9), StopReason.STOP),
    ]:
        partial = PartialCompletion(request, context)
        assert sample(partial, *tokens[:-1]) == len(tokens) - 1 and partial.stop is None
        sample(partial, tokens[-1])
        assert partial.stop == stop
    assert PartialCompletion(request, context=3).stop == StopReason.CONTEXT


def test_more_tokens_than_were_asked_for_are_not_taken() -> None:
    partial = PartialCompletion(make_request(PROMPT, max_tokens=3))
    assert sample(partial, 1, 2, 3, 4, 5) == 3 and partial.stop == StopReason.LENGTH


@pytest.mark.parametrize("text", ["。结束", "答案是四", "\U0001f600\U0001f600\U0001f600", "end"])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_stop_string_of_several_bytes_a_character_is_found_however_its_tokens_come(text: str, size: int) -> None:
    whole = f"因为 x{text}。more".encode()
    end = len(f"因为 x{text}".encode())
    request = make_request(PROMPT, max_tokens=100, stop_strings=("never", text))
    partial = PartialCompletion(request, decode_text=bytes_to_text)
    for start in range(0, len(whole), size):
        if partial.stop is None:
            sample(partial, *whole[start : start + size])
    assert partial.stop == StopReason.STOP
    assert bytes(partial.completion().tokens.tolist()) == whole[:end]


def test_a_stop_string_in_the_prompt_ends_nothing() -> None:
    prompt = np.array(list(b"end of"), np.int32)
    partial = PartialCompletion(
        make_request(prompt, max_tokens=9, stop_strings=("end", "ofs")), decode_text=bytes_to_text
    )
    sample(partial, *b"some en")
    assert partial.stop is None
    sample(partial, *b"d.")
    assert bytes(partial.completion().tokens.tolist()) == b"some end"


def test_a_stop_string_that_is_a_special_token_is_found(tiny_model: str) -> None:
    from headway.model.tokenizer import decode, load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    request = make_request(PROMPT, max_tokens=9, stop_strings=("<eos>",))
    partial = PartialCompletion(request, decode_text=lambda tokens: decode(tokenizer, tokens, special=True))
    sample(partial, 10, 11, int(tokenizer.eos_token_id), 12)
    assert partial.stop == StopReason.STOP and partial.num_sampled == 3


def test_chunks_follow_one_another_and_a_truncated_completion_goes_on_from_there() -> None:
    partial = PartialCompletion(make_request(PROMPT, max_tokens=8))
    sample(partial, 1, 2, 3, version=1)
    assert partial.take_chunk(end=5).tokens.tolist() == [1, 2]
    assert partial.take_chunk().tokens.tolist() == [3] and len(partial.take_chunk().tokens) == 0
    sample(partial, 4, 4, 4, 4, 4, version=2)
    assert partial.stop == StopReason.LENGTH
    partial.truncate(partial.num_prompt + 2)
    assert partial.stop is None
    sample(partial, 7, version=3)
    chunk = partial.take_chunk()
    assert (chunk.tokens.tolist(), chunk.versions.tolist()) == ([7], [3])
    assert partial.completion(StopReason.ABORTED).tokens.tolist() == [1, 2, 7]


def test_what_one_engine_sampled_is_taken_over_by_the_next_and_a_stop_in_it_counts() -> None:
    request = make_request(PROMPT, max_tokens=8, stop_tokens=(9,))
    first = PartialCompletion(request)
    assert first.remaining_request() is request
    sample(first, 1, 2, version=3)
    second = PartialCompletion(first.remaining_request())
    assert second.num_sampled == 2 and len(second.take_chunk().tokens) == 0, "the caller has these"
    sample(second, 9, version=5)
    completion = second.completion()
    assert isinstance(completion, Completion) and completion.versions.tolist() == [3, 3, 5]
    assert PartialCompletion(second.remaining_request()).stop == StopReason.STOP


def test_requests_that_cannot_be_generated_are_refused_by_name() -> None:
    request = make_request(PROMPT, max_tokens=2)
    check_request(request, context=3, vocab_size=8)
    for context, vocab_size, sampled, match in [
        (2, 8, (), "request train/0/0/0 has 3 tokens, more than the context of 2"),
        (3, 7, (), "holds a token outside the model's vocabulary of 7"),
        (4, 8, (1, 1), "with its sampled tokens has 5 tokens"),
        (9, 8, (1, 9), "with its sampled tokens holds a token outside"),
        (9, 8, (1, 1, 1), "comes with 3 sampled tokens, more than its max_tokens of 2"),
    ]:
        tokens = given(*sampled)
        chunk = Chunk(tokens, logprobs_of(tokens), tokens * 0) if sampled else None
        with pytest.raises(RequestRefused, match=match):
            check_request(replace(request, sampled=chunk), context, vocab_size)
