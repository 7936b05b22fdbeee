"""Weights on their way from trainer to engine.

Invariant 11: verified weight sync at every load by fingerprint; a mismatch stops the run.
"""

import dataclasses
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from training import digest_of, make_batch, make_trainer

from headway.errors import InvariantBroken, WeightMismatch, WeightsUnreachable
from headway.model.loading import load_model, named_weights
from headway.types import WeightUpdate
from headway.weights.fingerprints import digest, fingerprint, fingerprints
from headway.weights.publish import Publisher, as_part, joined
from headway.weights.receive import open_update, open_whole
from headway.weights.shadow import ShadowWeights


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


def numbered(value: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """An odd number of elements each, so that alignment has something to do; embed and head are one tensor."""
    embed = torch.full((7, 3), value, dtype=dtype)
    return {"embed": embed, "norm": torch.arange(5).to(dtype) + value, "head": embed}


def receiver(tied: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    embed = nn.Parameter(torch.full((7, 3), -1.0, dtype=dtype))
    head = embed if tied else nn.Parameter(torch.full((7, 3), -1.0, dtype=dtype))
    return {"embed": embed, "norm": nn.Parameter(torch.full((5,), -1.0, dtype=dtype)), "head": head}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].detach(), other[name].detach()) for name in one)


def is_untouched(live: Mapping[str, Tensor]) -> bool:
    return all(bool((tensor == -1).all()) for tensor in live.values())


def mismatch(shadow: ShadowWeights, update: WeightUpdate) -> str:
    """Why the update was refused; afterwards nothing is staged and nothing can be swapped in."""
    with pytest.raises(WeightMismatch) as error:
        shadow.stage(update)
    assert shadow.staged_version is None
    with pytest.raises(InvariantBroken):
        shadow.swap()
    assert "\n" not in str(error.value)
    return str(error.value)


def overwrite(update: WeightUpdate, name: str) -> None:
    """Flip one bit of a tensor where it lies, as its owner could."""
    info = next(tensor for tensor in update.tensors if tensor.name == name)
    file = os.open(update.location, os.O_RDWR)
    memory = mmap.mmap(file, 0)
    memory[info.offset + 5] ^= 1
    memory.close()
    os.close(file)


# Publishing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_opens_as_the_tensors_that_were_published(publisher: Publisher, dtype: torch.dtype) -> None:
    tensors = numbered(2.5, dtype)
    opened = open_update(publisher.publish(0, tensors))
    assert equal(opened, tensors) and all(tensor.dtype == dtype for tensor in opened.values())


def test_tied_tensors_are_named_twice_and_lie_in_the_buffer_once(publisher: Publisher) -> None:
    update = publisher.publish(0, numbered(1.0))
    places = {info.name: info.offset for info in update.tensors}
    assert places == {"embed": 0, "norm": 128, "head": 0}
    assert os.stat(update.location).st_size == 128 + 64
    assert update.kind == "full" and update.fingerprints["embed"] == update.fingerprints["head"]


def test_every_tensor_begins_at_a_multiple_of_the_alignment(publisher: Publisher) -> None:
    tensors = {str(size): torch.arange(size, dtype=torch.bfloat16) for size in (1, 31, 32, 33, 100)}
    update = publisher.publish(0, tensors)
    assert all(info.offset % 64 == 0 for info in update.tensors) and equal(open_update(update), tensors)


def test_a_transposed_tensor_is_published_as_it_reads_not_as_it_lies(publisher: Publisher) -> None:
    tensors = {"turned": torch.arange(6.0).view(2, 3).T, "number": torch.tensor(3.0)}
    assert equal(open_update(publisher.publish(0, tensors)), tensors)


def test_an_update_stays_readable_while_the_next_is_written(publisher: Publisher) -> None:
    updates = [publisher.publish(0, numbered(0.0))]
    for version in range(1, 5):
        updates.append(publisher.publish(version, numbered(float(version))))
        assert equal(open_update(updates[-1]), numbered(float(version)))
        assert equal(open_update(updates[-2]), numbered(float(version - 1)))
        live = receiver()
        ShadowWeights(live).stage(updates[-2])


def test_an_update_read_two_versions_late_is_recognised(publisher: Publisher) -> None:
    late = publisher.publish(0, numbered(0.0))
    for version in (1, 2):
        publisher.publish(version, numbered(float(version)))
    said = mismatch(ShadowWeights(receiver()), late)
    assert said == "version 0: embed arrived with another checksum than published"


def test_versions_never_go_back(publisher: Publisher) -> None:
    publisher.publish(3, numbered(0.0))
    publisher.publish(3, numbered(0.0))  # the same again, as after a resume
    with pytest.raises(InvariantBroken) as error:
        publisher.publish(2, numbered(0.0))
    assert str(error.value) == "version 2 cannot follow version 3: versions never go back"


def test_a_process_that_opens_an_update_cannot_change_it(publisher: Publisher) -> None:
    update = publisher.publish(0, numbered(1.0))
    open_update(update)["norm"].fill_(9.0)
    assert equal(open_update(update), numbered(1.0))


def test_buffers_vanish_when_the_publisher_closes() -> None:
    publisher = Publisher()
    updates = [publisher.publish(version, numbered(1.0)) for version in range(2)]
    kept = open_update(updates[0])
    files = [update.location for update in updates]
    assert len(set(files)) == 2 and all(os.path.exists(file) for file in files)
    publisher.close()
    assert not any(os.path.exists(file) for file in files)
    assert equal(kept, numbered(1.0))  # a reader that has it open keeps it
    with pytest.raises(WeightsUnreachable) as error:
        open_update(updates[1])
    assert str(error.value) == "version 1 cannot be fetched: its publisher has ended (No such file or directory)"


READ_FROM_OUTSIDE = """
import sys
from headway.codec import decode
from headway.weights.fingerprints import fingerprints
from headway.weights.receive import open_update
update = decode(sys.stdin.buffer.read())
assert fingerprints(open_update(update)) == update.fingerprints
"""


@pytest.mark.slow
def test_another_process_reads_the_same_bytes(publisher: Publisher) -> None:
    from headway.codec import encode

    sent = encode(publisher.publish(0, numbered(4.0)))
    subprocess.run([sys.executable, "-c", READ_FROM_OUTSIDE], input=sent, check=True, timeout=120)


# Fingerprints


def test_a_fingerprint_sees_every_bit_and_only_the_bits() -> None:
    tensor = torch.zeros(100)
    seen = {fingerprint(tensor)}
    for place in range(100):
        changed = tensor.clone()
        changed.view(torch.int32)[place] ^= 1
        seen.add(fingerprint(changed))
    assert len(seen) == 101
    assert fingerprint(torch.arange(6.0).view(2, 3).T) == fingerprint(torch.arange(6.0).view(2, 3).T.contiguous())


def test_a_digest_depends_on_names_and_values_and_not_on_their_order() -> None:
    prints = fingerprints(numbered(1.0))
    assert digest(prints) == digest(dict(reversed(prints.items())))
    assert digest(prints) != digest(fingerprints(numbered(2.0)))
    assert digest({"a": "1", "b": "2"}) != digest({"a": "2", "b": "1"})


# Receiving


@pytest.mark.parametrize("tied", [True, False])
def test_live_weights_are_untouched_until_the_swap_and_proved_after_it(publisher: Publisher, tied: bool) -> None:
    live = receiver(tied)
    shadow = ShadowWeights(live)
    for version in range(4):
        before = {name: tensor.detach().clone() for name, tensor in live.items()}
        update = publisher.publish(version, numbered(float(version)))
        shadow.stage(update)
        assert equal(live, before) and shadow.staged_version == version
        assert torch.equal(shadow.staged(live["head"]), numbered(float(version))["head"])
        assert shadow.swap() == update.fingerprints == fingerprints(live)
        assert equal(live, numbered(float(version))) and shadow.staged_version is None
        assert (live["head"] is live["embed"]) == tied


def test_a_swap_moves_no_bytes(publisher: Publisher) -> None:
    live = receiver()
    shadow = ShadowWeights(live)
    places = []
    for version in range(3):
        places.append(live["norm"].data_ptr())
        shadow.stage(publisher.publish(version, numbered(float(version))))
        shadow.swap()
    assert places[0] != places[1] and live["norm"].data_ptr() == places[1] and places[2] == places[0]


def test_a_second_swap_without_staging_is_refused(publisher: Publisher) -> None:
    live = receiver()
    shadow = ShadowWeights(live)
    with pytest.raises(InvariantBroken) as error:
        shadow.swap()
    assert str(error.value) == "a swap needs staged weights, and none are staged"
    shadow.stage(publisher.publish(0, numbered(0.0)))
    shadow.swap()
    with pytest.raises(InvariantBroken):
        shadow.swap()
    assert equal(live, numbered(0.0))


@pytest.mark.parametrize("name", ["embed", "norm"])
def test_invariant_11_a_flipped_bit_in_shared_memory_stops_the_load_and_names_the_tensor(
    publisher: Publisher, name: str
) -> None:
    live = receiver()
    update = publisher.publish(3, numbered(1.0))
    overwrite(update, name)
    said = mismatch(ShadowWeights(live), update)
    assert said == f"version 3: {name} arrived with another checksum than published"
    assert is_untouched(live)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm": torch.zeros(6)}, "norm was published as torch.float32 (6,), loaded as torch.float32 (5,)"),
        ({"norm": torch.zeros(5).half()}, "norm was published as torch.float16 (5,), loaded as torch.float32 (5,)"),
        ({"embed": torch.zeros(3, 7)}, "embed was published as torch.float32 (3, 7), loaded as torch.float32 (7, 3)"),
        ({"bias": torch.zeros(1)}, "published and loaded tensors differ by name, first bias"),
    ],
)
def test_invariant_11_another_shape_type_or_name_stops_the_load(
    publisher: Publisher, change: dict[str, Tensor], said: str
) -> None:
    live = receiver()
    assert mismatch(ShadowWeights(live), publisher.publish(2, numbered(0.0) | change)) == f"version 2: {said}"
    assert is_untouched(live)


def test_invariant_11_a_missing_head_stops_the_load_and_is_named(publisher: Publisher) -> None:
    tensors = numbered(0.0)
    del tensors["head"]
    said = mismatch(ShadowWeights(receiver()), publisher.publish(1, tensors))
    assert said == "version 1: published and loaded tensors differ by name, first head"


def test_invariant_11_two_tensors_cannot_pass_as_the_one_that_is_tied_here(publisher: Publisher) -> None:
    live = receiver(tied=True)
    untied = numbered(1.0) | {"head": torch.full((7, 3), 2.0)}
    said = mismatch(ShadowWeights(live), publisher.publish(0, untied))
    assert "arrived with another checksum than published" in said
    assert is_untouched(live)


def test_a_good_update_after_a_bad_one_is_loaded(publisher: Publisher) -> None:
    live = receiver()
    shadow = ShadowWeights(live)
    bad = publisher.publish(1, numbered(1.0))
    overwrite(bad, "norm")
    mismatch(shadow, bad)
    shadow.stage(publisher.publish(2, numbered(2.0)))
    shadow.swap()
    assert equal(live, numbered(2.0))


def test_a_forged_fingerprint_does_not_help(publisher: Publisher) -> None:
    update = publisher.publish(0, numbered(1.0))
    forged = tuple(dataclasses.replace(info, fingerprint="0" * 16) for info in update.tensors)
    said = mismatch(ShadowWeights(receiver()), dataclasses.replace(update, tensors=forged))
    assert said.startswith("version 0: embed arrived with another checksum")


# Adapters (tests/training/test_lora.py has those that a trainer publishes)


def test_an_adapter_with_a_wrong_byte_or_an_unknown_name_changes_nothing(publisher: Publisher) -> None:
    live = receiver()
    base = digest(fingerprints(live))
    bad = publisher.publish(1, {"norm.lora_A": torch.ones(1, 5)}, base)
    overwrite(bad, "norm.lora_A")
    assert mismatch(ShadowWeights(live), bad) == "version 1: norm.lora_A arrived with another checksum than published"
    unknown = publisher.publish(2, {"norm": torch.ones(5)}, base)
    said = mismatch(ShadowWeights(live), unknown)
    assert said == "version 2: its adapter has norm, which does not fit the base"
    assert is_untouched(live)


def test_a_full_update_may_follow_a_small_adapter_in_the_same_buffer(publisher: Publisher) -> None:
    for version in range(3):
        assert publisher.publish(version, {"norm": torch.ones(5)}, "base").num_bytes == 20
    for version in range(3, 6):
        assert equal(open_update(publisher.publish(version, numbered(float(version)))), numbered(float(version)))


def test_an_update_is_full_or_an_adapter_with_a_base() -> None:
    for kind, base in (("full", "abc"), ("adapter", ""), ("partial", "")):
        with pytest.raises(ValueError, match="an update is full, or an adapter with its base"):
            WeightUpdate(1, kind, "shared_memory", "nowhere", (), base=base)


# A trainer's weights in an engine's model


@pytest.mark.parametrize("family", ["llama", "llama-untied", "qwen3-tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_11_a_model_runs_what_its_trainer_published(
    tiny_variant: Callable[[str], str], family: str, dtype: str
) -> None:
    path = tiny_variant(family)
    trainer = make_trainer(path, lr=1e-2, dtype=dtype)
    model = load_model(path, getattr(torch, dtype))
    shadow = ShadowWeights(named_weights(model))
    tied = "untied" not in family
    for version in range(2):
        trainer.train(make_batch(version))
        update = trainer.publish()
        assert update.version == version + 1 and "lm_head.weight" in update.fingerprints
        shadow.stage(update)
        assert shadow.swap() == update.fingerprints
        assert digest(update.fingerprints) == digest_of(trainer)
        assert equal(named_weights(model), trainer.published_weights())
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    padding = 64 * len(update.tensors)
    assert model_bytes <= os.stat(update.location).st_size <= model_bytes + padding
    assert (update.num_bytes > model_bytes) == tied  # the head is counted under both its names
    trainer._publisher.close()


def test_an_update_in_parts_is_opened_whole_and_every_piece_is_proved() -> None:
    whole = {"a": torch.arange(14.0).reshape(7, 2), "b": torch.arange(3.0)}
    publishers = [Publisher(), Publisher()]
    borders = {"a": (4, 7), "b": (2, 3)}
    parts = []
    for number, publisher in enumerate(publishers):
        rows = {name: range(first) if number == 0 else range(first, end) for name, (first, end) in borders.items()}
        held = {name: whole[name][mine.start : mine.stop].clone() for name, mine in rows.items()}
        placed = {name: (mine, len(whole[name])) for name, mine in rows.items()}
        parts.append(as_part(publisher.publish(1, held), placed))
    try:
        update = joined(parts[::-1])
        assert equal(open_whole(update), whole)
        wrong = replace(parts[1].tensors[0], fingerprint="0")
        damaged = replace(parts[1], tensors=(wrong, *parts[1].tensors[1:]))
        with pytest.raises(WeightMismatch, match="arrived with another checksum"):
            open_whole(joined([parts[0], damaged]))
    finally:
        for publisher in publishers:
            publisher.close()
