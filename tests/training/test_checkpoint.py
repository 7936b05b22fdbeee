"""Checkpoints: whole or recognised as damaged, whatever moment the kill came; models as ordinary directories.

Invariant 14: crash safety.
"""

import asyncio
import gc
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from training import (
    digest_of,
    load_state,
    make_batch,
    make_trainer,
    plain_model,
    same_bits,
    save_state,
    state_of,
    write_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.errors import ConfigError, HeadwayError, SaveFailed
from headway.model.attention import PackedAttention
from headway.model.loading import load_model
from headway.model.logprobs import head_logits, hidden_states
from headway.model.tokenizer import load_tokenizer
from headway.training import checkpoint
from headway.training.trainer import Trainer
from headway.types import Batch

Variant = Callable[[str], str]
FILE_STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def tensors_for(version: int) -> dict[str, Tensor]:
    return {
        "weights/matrix": torch.arange(12.0).view(3, 4) + version,
        "weights/vector": torch.full((5,), version, dtype=torch.bfloat16),
        "step/matrix": torch.tensor(float(version)),
    }


def save(directory: Path, version: int) -> None:
    checkpoint.save(directory, version, tensors_for(version))


def is_whole(directory: Path, version: int) -> bool:
    found = checkpoint.load(directory)
    return found.version == version and same_bits(found.tensors, tensors_for(version))


def refusal(directory: Path) -> str:
    with pytest.raises(HeadwayError) as error:
        checkpoint.load(directory)
    assert str(directory) in str(error.value)
    return str(error.value)


# Slots


def test_a_slot_brings_back_every_bit_and_replaces_the_one_before_it(tmp_path: Path) -> None:
    for version in (2, 6):
        save(tmp_path / "checkpoint" / "a", version)
        assert is_whole(tmp_path / "checkpoint" / "a", version)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["a"]


def test_slots_take_turns() -> None:
    assert [checkpoint.slot_for(number) for number in range(5)] == ["a", "b", "a", "b", "a"]


def save_and_die(directory: Path, version: int, step: int, write: Callable[[Path, int], None] = save) -> bool:
    """Save in a child process that is gone before its file system step number `step`; whether it lived to the end.

    Every opening, renaming and removing raises an audit event, so no function has to be replaced to count them.
    """
    child = os.fork()
    if child == 0:
        gc.disable()  # what other tests left behind may have had threads, and those are not forked
        remaining = step

        def count(event: str, _: object) -> None:
            nonlocal remaining
            if event in FILE_STEPS:
                if remaining == 0:
                    os._exit(9)
                remaining -= 1

        sys.addaudithook(count)
        write(directory, version)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def kills(tmp_path: Path, prepare: Callable[[Path], None]) -> Iterator[Path]:
    """A run's checkpoint folder after each possible kill of a save of version 6 to slot a."""
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        prepare(folder)
        if save_and_die(folder / "a", 6, step):
            assert is_whole(folder / "a", 6)
            assert step > 5  # opening, renaming and removing were counted
            return
        yield folder
    raise AssertionError("the save never came to its end")


def test_invariant_14_a_kill_between_any_two_steps_of_a_save_leaves_a_whole_slot(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        save(folder / "a", 2)
        save(folder / "b", 4)

    outcomes = set()
    for folder in kills(tmp_path, prepare):
        assert is_whole(folder / "b", 4)
        try:
            found = checkpoint.load(folder / "a").version
            assert is_whole(folder / "a", found)
        except HeadwayError as error:
            found = 0
            assert str(folder / "a") in str(error)
        outcomes.add(found)
        save(folder / "a", 6)  # the resumed run saves where the killed one left its rubbish
        assert is_whole(folder / "a", 6) and {path.name for path in folder.iterdir()} == {"a", "b"}
    assert outcomes >= {0, 2}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes, which fails a write as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_sentence_and_leaves_both_slots_as_they_were(tmp_path: Path) -> None:
    save(tmp_path / "a", 2)
    save(tmp_path / "b", 4)
    sentence = rf"cannot write {tmp_path}/a: .*; make room or repair the disk"
    with full_disk(), pytest.raises(SaveFailed, match=sentence):
        save(tmp_path / "a", 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert [checkpoint.load(tmp_path / slot).version for slot in ("a", "b")] == [2, 4]


def test_invariant_14_a_kill_during_the_first_save_is_seen_as_no_checkpoint(tmp_path: Path) -> None:
    for folder in kills(tmp_path, lambda folder: None):
        if (folder / "a").exists():
            assert is_whole(folder / "a", 6)
        else:
            assert "cannot be read" in refusal(folder / "a")


@pytest.mark.parametrize("name", ["checkpoint.json", "state.safetensors"])
def test_a_flipped_bit_anywhere_in_a_slot_is_detected_and_the_slot_named(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a", 4)
    path = tmp_path / "a" / name
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        refusal(tmp_path / "a")
    path.write_bytes(good)
    assert is_whole(tmp_path / "a", 4)


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path / "a", 4)
    other = tensors_for(4) | {"weights/vector": torch.zeros(5, dtype=torch.bfloat16)}
    save_file(other, tmp_path / "a" / "state.safetensors")
    said = f"checkpoint {tmp_path / 'a'} is damaged: weights/vector does not match its checksum"
    assert refusal(tmp_path / "a") == said


def test_the_same_bytes_in_another_shape_or_type_are_not_the_same_tensor(tmp_path: Path) -> None:
    save(tmp_path / "a", 4)
    matrix = tensors_for(4)["weights/matrix"]
    for other in (matrix.view(4, 3), matrix.view(torch.int32)):
        save_file(tensors_for(4) | {"weights/matrix": other}, tmp_path / "a" / "state.safetensors")
        assert refusal(tmp_path / "a").endswith(" is damaged: weights/matrix does not match its checksum")


def test_a_version_changed_by_hand_is_detected(tmp_path: Path) -> None:
    save(tmp_path / "a", 4)
    path = tmp_path / "a" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 5}))
    assert (
        refusal(tmp_path / "a")
        == f"checkpoint {tmp_path / 'a'} is damaged: checkpoint.json does not match its checksum"
    )


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"checksum": ""}', "\x00"])
def test_a_description_that_is_none_is_one_sentence(tmp_path: Path, content: str) -> None:
    save(tmp_path / "a", 4)
    (tmp_path / "a" / "checkpoint.json").write_text(content)
    assert "\n" not in refusal(tmp_path / "a")


@pytest.mark.parametrize("name", ["checkpoint.json", "state.safetensors"])
def test_a_missing_or_truncated_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a", 4)
    path = tmp_path / "a" / name
    os.truncate(path, path.stat().st_size // 2)
    refusal(tmp_path / "a")
    path.unlink()
    assert "cannot be read" in refusal(tmp_path / "a")


# The trainer's state


def steps(trainer: Trainer, versions: range) -> None:
    for version in versions:
        assert not trainer.train(make_batch(version, first=10 * version)).skipped


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_trainer_goes_on_bit_for_bit(tiny_model: str, tmp_path: Path, dtype: str, minibatches: int) -> None:
    knobs: dict[str, Any] = {
        "dtype": dtype,
        "minibatches": minibatches,
        "lr": 1e-3,
        "warmup_steps": 3,
        "token_budget": 64,
    }
    first, second = (make_trainer(tiny_model, **knobs) for _ in range(2))
    steps(first, range(2))
    first.score((np.arange(20, dtype=np.int32),), 1.0)  # as after every step, before a checkpoint
    save_state(first, tmp_path / "a")
    saved = checkpoint.load(tmp_path / "a")
    assert saved.version == 2
    assert {name.split("/")[0] for name in saved.tensors} == {"weights", "step", "exp_avg", "exp_avg_sq"}
    assert all(tensor.dtype == torch.float32 for tensor in saved.tensors.values())
    assert load_state(second, tmp_path / "a") == second.version == 2
    assert digest_of(second) == digest_of(first)
    for trainer in (first, second):
        steps(trainer, range(2, 4))
    assert same_bits(state_of(first, tmp_path / "one"), state_of(second, tmp_path / "other"))


def test_a_snapshot_is_of_its_own_version_however_far_training_has_continued(tiny_model: str, tmp_path: Path) -> None:
    trainer, other = (make_trainer(tiny_model, lr=1e-3) for _ in range(2))
    steps(trainer, range(2))
    exact = state_of(trainer, tmp_path / "exact")
    trainer.snapshot()
    steps(trainer, range(2, 4))
    checkpoint.begin(tmp_path / "a")
    checkpoint.finish(tmp_path / "a", [asyncio.run(trainer.save(str(tmp_path / "a")))])
    assert same_bits(checkpoint.load(tmp_path / "a").tensors, exact)
    assert load_state(other, tmp_path / "a") == 2
    steps(other, range(2, 4))
    assert digest_of(other) == digest_of(trainer)
    with pytest.raises(SaveFailed, match=r"cannot write .*/b: the trainer has restarted since and has no snapshot"):
        asyncio.run(trainer.save(str(tmp_path / "b")))


def test_a_checkpoint_of_the_first_weights_clears_a_used_optimizer(tiny_model: str, tmp_path: Path) -> None:
    fresh, used = make_trainer(tiny_model), make_trainer(tiny_model, lr=1e-3)
    save_state(fresh, tmp_path / "a")
    steps(used, range(1))
    assert load_state(used, tmp_path / "a") == 0
    assert same_bits(state_of(used, tmp_path / "one"), state_of(fresh, tmp_path / "other"))


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        ("qwen2", "llama", "weights/model.lm_head.weight is (52, 64), here absent"),
        ("llama", "llama-untied", "weights/model.lm_head.weight is absent, here (52, 64)"),
        ("qwen3-tied", "llama", "weights/model.model.layers.0.self_attn.k_norm.weight is (32,), here absent"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_in_one_sentence_and_changes_nothing(
    tiny_variant: Variant, tmp_path: Path, theirs: str, ours: str, named: str
) -> None:
    save_state(make_trainer(tiny_variant(theirs)), tmp_path / "a")
    trainer = make_trainer(tiny_variant(ours))
    before = digest_of(trainer)
    with pytest.raises(ConfigError) as error:
        load_state(trainer, tmp_path / "a")
    assert str(error.value) == f"checkpoint {tmp_path / 'a'} is of another model: {named}"
    assert digest_of(trainer) == before and trainer.version == 0


def test_a_checkpoint_of_other_shapes_is_refused_by_the_first_of_them(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model)
    tensors = state_of(trainer, tmp_path / "a")
    tensors["weights/model.model.norm.weight"] = torch.ones(1)  # would broadcast
    checkpoint.save(tmp_path / "b", 1, tensors)
    with pytest.raises(ConfigError) as error:
        load_state(trainer, tmp_path / "b")
    said = "is of another model: weights/model.model.norm.weight is (1,), here (64,)"
    assert str(error.value) == f"checkpoint {tmp_path / 'b'} {said}"


def test_a_damaged_checkpoint_leaves_the_trainer_as_it_was(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model, lr=1e-3)
    save_state(trainer, tmp_path / "a")
    path = tmp_path / "a" / "state-0-of-1.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    trainer.train(Batch(0, make_batch(0).groups))
    before = digest_of(trainer)
    with pytest.raises(HeadwayError):
        load_state(trainer, tmp_path / "a")
    assert digest_of(trainer) == before and trainer.version == 1


# Model directories


@pytest.mark.parametrize("family", ["llama", "llama-untied", "qwen2", "qwen3-tied"])
def test_a_saved_model_is_one_anybody_can_load(tiny_variant: Variant, tmp_path: Path, family: str) -> None:
    source = tiny_variant(family)
    model, tokenizer = load_model(source), load_tokenizer(source)
    checkpoint.save_model(tmp_path / "model", model, tokenizer)
    assert model.config._attn_implementation == "headway"  # the caller's model still has our attention
    assert "headway" not in (tmp_path / "model" / "config.json").read_text()
    tokens = torch.arange(3, 30)
    with torch.no_grad():
        hidden = hidden_states(model, tokens, torch.arange(27), PackedAttention([27]))
        ours = head_logits(hidden, model.lm_head.weight)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        theirs = loaded(input_ids=tokens[None]).logits[0]
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    text = "12+3=15\nok"
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_model_is_written_in_the_type_and_with_the_bits_it_was_published_in(
    tiny_model: str, tmp_path: Path, dtype: str
) -> None:
    trainer = make_trainer(tiny_model, lr=1e-2, dtype=dtype)
    steps(trainer, range(2))
    write_model(trainer, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    published = trainer.published_weights()
    assert same_bits({name: loaded[name] for name in published}, published)
    started = plain_model(tiny_model).state_dict()
    assert not torch.equal(loaded["lm_head.weight"].float(), started["lm_head.weight"])


def test_a_model_replaces_a_model_but_never_anything_else(tiny_model: str, tmp_path: Path) -> None:
    model, tokenizer = load_model(tiny_model), load_tokenizer(tiny_model)
    for _ in range(2):
        checkpoint.save_model(tmp_path / "model", model, tokenizer)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")  # a run directory has one too
    for precious in (run, run / "config.json"):
        with pytest.raises(ConfigError) as error:
            checkpoint.save_model(precious, model, tokenizer)
        said = f"{precious} holds something other than a model, which saving one would delete; name another"
        assert str(error.value) == said
    assert (run / "config.json").read_text() == "{}"


def write_two_files(directory: Path, version: int) -> None:
    checkpoint.begin(directory)
    unfinished = directory.with_name(directory.name + ".unfinished")
    (unfinished / "config.json").write_text("{}")
    (unfinished / "model.safetensors").write_text(str(version))
    checkpoint.replace(unfinished, directory)


def test_invariant_14_a_kill_while_a_model_is_replaced_leaves_room_for_the_next_one(tmp_path: Path) -> None:
    for step in range(100):
        model = tmp_path / str(step) / "model"
        write_two_files(model, 1)
        finished = save_and_die(model, 2, step, write_two_files)
        assert not model.exists() or {path.name for path in model.iterdir()} == {"config.json", "model.safetensors"}
        checkpoint.check_replaceable(model)
        write_two_files(model, 3)
        assert [path.name for path in model.parent.iterdir()] == ["model"]
        if finished:
            return
    raise AssertionError("the model was never replaced")


def test_a_model_with_folders_of_its_own_is_saved_whole(tmp_path: Path) -> None:
    unfinished = tmp_path / "model.unfinished"
    (unfinished / "additional_chat_templates").mkdir(parents=True)
    (unfinished / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    checkpoint.replace(unfinished, tmp_path / "model")
    assert (tmp_path / "model" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ messages }}"
