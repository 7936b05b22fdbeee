"""What two trainer ranks publish and save together: weights in pieces, checkpoints, models.

Invariant 11: verified weight sync at every load.
"""

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import Stage
from safetensors import safe_open
from training import load_state, make_batch, make_trainer, same_bits, save_state, write_model
from transformers import AutoModelForCausalLM

from headway.errors import ConfigError, HeadwayError, SaveFailed, WeightMismatch
from headway.model.loading import load_model, named_weights
from headway.training import checkpoint
from headway.types import Batch, WeightUpdate
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.receive import open_update
from headway.weights.shadow import ShadowWeights

# Published weights


def published(stage: Stage) -> WeightUpdate:
    ranked = stage.begin(lr=1e-2)
    stage.run(ranked.train(make_batch()))
    return stage.run(ranked.publish())


def test_invariant_11_an_engine_puts_the_pieces_together_and_proves_each(stage: Stage) -> None:
    update = published(stage)
    model = load_model(stage.path)
    shadow = ShadowWeights(named_weights(model))
    shadow.stage(update)
    assert shadow.swap() == update.fingerprints
    one = stage.one(lr=1e-2)
    one.train(make_batch())
    exact = one.published_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in named_weights(model).items():
        torch.testing.assert_close(tensor.detach(), exact[name], rtol=0, atol=1e-4)
    moved = named_weights(load_model(stage.path))
    assert not any(torch.equal(tensor, moved[name]) for name, tensor in named_weights(model).items())


def test_no_rank_publishes_more_than_its_rows(stage: Stage) -> None:
    """The tied head lies in the memory of each rank once, under both its names."""
    update = published(stage)
    weights = named_weights(load_model(stage.path))
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in weights.items()}
    del sizes["lm_head.weight"]
    for part in update.parts:
        assert {info.name for info in part.tensors} == set(weights)
        assert os.stat(part.location).st_size <= sum(sizes.values()) / 2 + 64 * len(weights)
    for name, tensor in weights.items():
        pieces = [info for info in update.pieces if info.name == name]
        assert [info.rows for info in pieces] == [range(len(tensor) // 2), range(len(tensor) // 2, len(tensor))]
        assert all(info.whole_shape == tuple(tensor.shape) for info in pieces)
    assert {key for key in update.fingerprints if key.startswith("model.norm")} == {
        "model.norm.weight[0:32]",
        "model.norm.weight[32:64]",
    }


def test_the_digest_of_an_update_is_that_of_its_pieces(stage: Stage) -> None:
    update = published(stage)
    pieces = {info.key: open_update(part)[info.name] for part in update.parts for info in part.tensors}
    assert digest(fingerprints(pieces)) == digest(update.fingerprints)


@pytest.mark.parametrize("rank", [0, 1])
def test_invariant_11_a_flipped_bit_in_any_part_stops_the_load_and_names_the_piece(stage: Stage, rank: int) -> None:
    update = published(stage)
    info = next(info for info in update.parts[rank].tensors if info.name == "model.norm.weight")
    with open(update.parts[rank].location, "r+b") as memory:
        memory.seek(info.offset)
        byte = memory.read(1)[0]
        memory.seek(info.offset)
        memory.write(bytes([byte ^ 1]))
    live = named_weights(load_model(stage.path))
    with pytest.raises(WeightMismatch) as error:
        ShadowWeights(live).stage(update)
    assert str(error.value) == f"version 1: {info.key} arrived with another checksum than published"


def test_invariant_11_a_part_that_is_missing_or_comes_twice_stops_the_load(stage: Stage) -> None:
    update = published(stage)
    first, second = update.parts
    shadow = ShadowWeights(named_weights(load_model(stage.path)))
    for parts in ((first,), (second,), (first, first), (first, second, second)):
        with pytest.raises(WeightMismatch, match=r"version 1: the pieces of model\.\S+ do not hold every row once"):
            shadow.stage(dataclasses.replace(update, parts=parts))
    shadow.stage(dataclasses.replace(update, parts=(second, first)))
    assert shadow.swap() == update.fingerprints


# Checkpoints


def losses(train: Callable[[Batch], Any], versions: range) -> list[float]:
    reports = [train(make_batch(version, first=10 * version)) for version in versions]
    assert not any(report.skipped for report in reports)
    return [report.metrics["loss"] for report in reports]


KNOBS: dict[str, Any] = {"lr": 1e-3, "minibatches": 2, "token_budget": 64, "warmup_steps": 3}


def test_a_checkpoint_of_two_ranks_goes_on_bit_for_bit_on_two_and_with_the_same_loss_on_one(
    stage: Stage, tmp_path: Path
) -> None:
    ranked = stage.begin(**KNOBS)
    losses(lambda batch: stage.run(ranked.train(batch)), range(2))
    stage.save(tmp_path / "a")
    expected = losses(lambda batch: stage.run(ranked.train(batch)), range(2, 4))
    last = digest(stage.run(ranked.publish()).fingerprints)
    ranked = stage.begin(**KNOBS)
    assert stage.run(ranked.load(str(tmp_path / "a"))) == 2
    assert losses(lambda batch: stage.run(ranked.train(batch)), range(2, 4)) == expected
    assert digest(stage.run(ranked.publish()).fingerprints) == last
    one = stage.one(**KNOBS)
    assert load_state(one, tmp_path / "a") == 2
    assert losses(one.train, range(2, 4)) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_checkpoint_of_one_rank_goes_on_with_the_same_loss_on_two(stage: Stage, tmp_path: Path) -> None:
    one = stage.one(**KNOBS)
    losses(one.train, range(2))
    save_state(one, tmp_path / "a")
    expected = losses(one.train, range(2, 4))
    ranked = stage.begin(**KNOBS)
    assert stage.run(ranked.load(str(tmp_path / "a"))) == 2
    stage.save(tmp_path / "b")
    one_whole, two_halves = (checkpoint.load(tmp_path / slot) for slot in ("a", "b"))
    assert same_bits(one_whole.tensors, two_halves.tensors) and one_whole.shapes == two_halves.shapes
    found = losses(lambda batch: stage.run(ranked.train(batch)), range(2, 4))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_each_rank_writes_its_own_rows_and_nothing_twice(stage: Stage, tmp_path: Path) -> None:
    ranked = stage.begin(lr=1e-3)
    stage.run(ranked.train(make_batch()))
    stage.save(tmp_path / "a")
    names = ["checkpoint.json", "state-0-of-2.safetensors", "state-1-of-2.safetensors"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    whole = checkpoint.load(tmp_path / "a")
    rows = dict.fromkeys(whole.tensors, 0)
    for file in names[1:]:
        with safe_open(tmp_path / "a" / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                rows[name] += 1 if not whole.shapes[name] else opened.get_slice(name).get_shape()[0]
    assert rows == {name: shape[0] if shape else 1 for name, shape in whole.shapes.items()}


def test_a_snapshot_is_written_during_the_next_step_and_has_none_of_it(stage: Stage, tmp_path: Path) -> None:
    ranked = stage.begin(**KNOBS)
    losses(lambda batch: stage.run(ranked.train(batch)), range(1))

    async def both() -> None:
        await ranked.snapshot()
        await asyncio.gather(ranked.save(str(tmp_path / "a")), ranked.train(make_batch(1, first=10)))

    stage.run(both())
    after = losses(lambda batch: stage.run(ranked.train(batch)), range(2, 3))
    assert stage.run(ranked.load(str(tmp_path / "a"))) == 1
    assert losses(lambda batch: stage.run(ranked.train(batch)), range(1, 3))[1:] == after
    with pytest.raises(SaveFailed, match=r"cannot write .*/b: the trainer has restarted since and has no snapshot"):
        stage.run(ranked.save(str(tmp_path / "b")))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["state-0-of-2.safetensors", "state-1-of-2.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("how", [damage, Path.unlink])
def test_a_damaged_slot_is_named_and_changes_no_rank(
    stage: Stage, tmp_path: Path, file: str, how: Callable[[Path], None]
) -> None:
    ranked = stage.begin(lr=1e-2)
    stage.save(tmp_path / "a")
    stage.run(ranked.train(make_batch()))
    before = digest(stage.run(ranked.publish()).fingerprints)
    how(tmp_path / "a" / file)
    with pytest.raises(HeadwayError) as error:
        stage.run(ranked.load(str(tmp_path / "a")))
    assert str(error.value).startswith(f"checkpoint {tmp_path / 'a'} ") and "\n" not in str(error.value)
    assert digest(stage.run(ranked.publish()).fingerprints) == before
    assert stage.run(ranked.train(make_batch(1))).version == 2


def test_a_slot_from_which_a_part_was_left_out_is_damaged(stage: Stage, tmp_path: Path) -> None:
    checkpoint.begin(tmp_path / "a")
    stage.begin()
    stage.each("snapshot")
    parts = stage.each("save", str(tmp_path / "a"))
    checkpoint.finish(tmp_path / "a", parts[:1])
    with pytest.raises(HeadwayError, match=r"a is damaged: weights/\S+ does not match its checksum"):
        checkpoint.load(tmp_path / "a")


def test_a_disk_that_fails_one_rank_is_one_sentence_and_leaves_the_slot_and_the_ranks_as_they_were(
    stage: Stage, tmp_path: Path
) -> None:
    ranked = stage.begin(lr=1e-2)
    stage.save(tmp_path / "a")
    stage.run(ranked.train(make_batch()))
    stage.run(stage.ranks[1].limit_files(64))
    try:
        saves = {"a": stage.save, "model": lambda path: stage.run(ranked.save_model(str(path)))}
        for name, save in saves.items():
            with pytest.raises(SaveFailed, match=rf"cannot write {tmp_path}/{name}: .*; make room or repair the disk"):
                save(tmp_path / name)
    finally:
        stage.run(stage.ranks[1].limit_files(None))
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and checkpoint.load(tmp_path / "a").version == 0
    assert stage.run(ranked.train(make_batch(1))).version == 2
    stage.save(tmp_path / "a")
    assert checkpoint.load(tmp_path / "a").version == 2


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(
    stage: Stage, tmp_path: Path, tiny_variant: Callable[[str], str]
) -> None:
    save_state(make_trainer(tiny_variant("llama-untied")), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"is of another model: weights/model.lm_head.weight is \(52, 64\), here abs"):
        stage.run(stage.begin().load(str(tmp_path / "a")))


# Models


def test_the_model_that_ranks_write_together_is_the_one_a_single_rank_writes(stage: Stage, tmp_path: Path) -> None:
    ranked = stage.begin(lr=1e-2)
    stage.run(ranked.train(make_batch()))
    stage.save(tmp_path / "a")
    one = stage.one(lr=1e-2)
    load_state(one, tmp_path / "a")
    write_model(one, tmp_path / "one")
    for _ in range(2):  # the second takes the place of the first
        stage.run(ranked.save_model(str(tmp_path / "both")))
    weights = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    names = {path.name for path in (tmp_path / "one").iterdir()} - {"model.safetensors"}
    assert {path.name for path in (tmp_path / "both").iterdir()} == names | weights
    for name in names:
        if name.endswith(".json"):
            assert json.loads((tmp_path / "both" / name).read_text()) == json.loads(
                (tmp_path / "one" / name).read_text()
            ), name
    theirs, ours = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "both"))
    assert same_bits(theirs, ours)


def test_ranks_write_a_model_over_nothing_but_a_model(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something other than a model"):
        stage.run(stage.begin().save_model(str(tmp_path)))
    assert (tmp_path / "precious.txt").read_text() == "mine"
