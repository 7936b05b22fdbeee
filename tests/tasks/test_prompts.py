import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config import TaskSection
from headway.errors import ConfigError
from headway.model.tokenizer import build_character_tokenizer
from headway.tasks.prompts import MixedStream, Prompts, PromptStream, load_all, stream_of
from headway.types import Prompt

TOKENIZER = build_character_tokenizer("0123456789+=")

VERIFIER = """
from headway.tasks.verifiers import verifier

@verifier(needs=("answer",))
def verify(task, text):
    return float(text == task["answer"])
"""


def task_of(directory: Path, rows: list[dict[str, Any]], **settings: Any) -> TaskSection:
    (directory / "check.py").write_text(VERIFIER)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskSection(train=f"{directory}/rows.jsonl", verifier=f"{directory}/check.py:verify", **settings)


def load(task: TaskSection, max_tokens: int = 64, tokenizer: Any = TOKENIZER) -> Prompts:
    return load_all({"": task}, tokenizer, max_tokens)


def prompts_of(num: int) -> list[Prompt]:
    return [Prompt(index=i, tokens=np.array([i], np.int32), text=str(i), task={}) for i in range(num)]


def test_a_prompt_carries_its_tokens_its_text_and_its_whole_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "1+2", "answer": "3", "note": [1]}, {"prompt": "4", "answer": "4"}]
    prompts = load(task_of(tmp_path, rows, suffix="=")).train
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert [prompt.text for prompt in prompts] == ["1+2=", "4="]
    assert [len(prompt.tokens) for prompt in prompts] == [4, 2]
    assert [prompt.task for prompt in prompts] == rows


def test_the_eval_split_reads_the_eval_rows(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{"prompt": "1", "answer": "1"}], eval=f"{tmp_path}/held.jsonl")
    (tmp_path / "held.jsonl").write_text('{"prompt": "2", "answer": "2"}')
    assert [prompt.text for prompt in load(task).held_out] == ["2"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "1", "answer": "1"}, r"row 1 has no field 'prompt', which task\.prompt_field names"),
        ({"prompt": "1"}, r"row 1 has no field 'answer', which the verifier .*check\.py:verify needs"),
        ({"prompt": 12, "answer": "1"}, "row 1: 'prompt' is text or a list of chat messages, not int"),
        ({"prompt": ["12"], "answer": "1"}, "row 1: 'prompt' is text or a list of chat messages, not list"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, r"row 1: .* set task\.chat = true"),
        ({"prompt": "", "answer": "1"}, "row 1: the prompt has 0 tokens"),
    ],
)
def test_a_row_that_cannot_work_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    task = task_of(tmp_path, [{"prompt": "1", "answer": "1"}, row])
    with pytest.raises(ConfigError, match=sentence):
        load(task, 7)


def test_rows_above_the_limit_are_left_out_and_counted_and_one_at_the_limit_stays(tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": "1"} for text in ("1234567", "12345678", "1", "123456789")]
    loaded = load(task_of(tmp_path, rows), 7)
    assert [(prompt.index, prompt.text) for prompt in loaded.train] == [(0, "1234567"), (2, "1")]
    (note,) = loaded.notes
    assert "2 of 4 rows have prompts of more than 7 tokens and are left out (row 3 has 9)" in note
    assert [prompt.text for prompt in load(task_of(tmp_path, rows, max_prompt_tokens=1)).train] == ["1"]


def test_a_data_set_of_rows_that_are_all_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 of 2 rows have prompts of more than 1 tokens, so none is left"):
        load(task_of(tmp_path, [{"prompt": "12", "answer": "1"}] * 2), 1)


def test_repeated_prompts_are_left_out_where_asked_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": "1"} for text in ("1", "2", "1", "1")]
    assert len(load(task_of(tmp_path, rows)).train) == 4
    loaded = load(task_of(tmp_path, rows, deduplicate=True))
    assert [prompt.index for prompt in loaded.train] == [0, 1]
    assert "2 of 4 rows left out, which repeat an earlier prompt" in loaded.notes[0]


def test_the_split_by_hash_is_disjoint_complete_and_does_not_depend_on_order(tmp_path: Path) -> None:
    rows = [{"prompt": str(number), "answer": "1"} for number in range(400)]
    loaded = load(task_of(tmp_path, rows + rows[:50], eval_share=0.25))
    train, held_out = ({prompt.text for prompt in side} for side in (loaded.train, loaded.held_out))
    assert not train & held_out and len(train | held_out) == 400
    assert 70 < len(held_out) < 130
    again = load(task_of(tmp_path, rows[::-1], eval_share=0.25))
    assert {prompt.text for prompt in again.held_out} == held_out


CHECKED = """
from headway.tasks.verifiers import verifier

def verify(task, text):
    return 0.0

verify.check_row = lambda row: "" if row["answer"].isdigit() else f"{row['answer']!r} is no number"
"""


@pytest.mark.parametrize(("num_bad", "refused"), [(1, False), (3, True)])
def test_rows_that_the_verifier_cannot_score_are_counted_or_refused_before_the_run(
    tmp_path: Path, num_bad: int, refused: bool
) -> None:
    rows = [{"prompt": "1", "answer": "x" if number < num_bad else "1"} for number in range(20)]
    task = task_of(tmp_path, rows)
    (tmp_path / "check.py").write_text(CHECKED)
    told = f"{num_bad} of 20 rows cannot be scored by their verifier (row 0: 'x' is no number)"
    if refused:
        with pytest.raises(ConfigError) as error:
            load(task)
        assert told in str(error.value)
    else:
        loaded = load(task)
        assert told in loaded.notes[0] and len(loaded.train) == 19


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ mode }}{% if add_generation_prompt %}={% endif %}"
)


def chat_tokenizer() -> Any:
    tokenizer = build_character_tokenizer("0123456789+=<>sytemurain")
    tokenizer.chat_template = CHAT
    return tokenizer


def test_a_chat_prompt_has_system_prompt_examples_suffix_and_template_arguments(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "chat": True,
        "system": "sss",
        "few_shot": [{"prompt": "1+1", "completion": "2"}],
        "suffix": "ee",
        "template": {"mode": "tt"},
    }
    rows: list[dict[str, Any]] = [
        {"prompt": "4", "answer": "4"},
        {"prompt": [{"role": "system", "content": "rr"}, {"role": "user", "content": "5"}], "answer": "5"},
    ]
    first, second = load(task_of(tmp_path, rows, **settings), 200, chat_tokenizer()).train
    assert first.text == "<system>sss<user>1+1ee<assistant>2<user>4eett="
    assert second.text == "<system>rr<user>1+1ee<assistant>2<user>5eett=", "a row's own system prompt stays"


def test_plain_text_has_system_prompt_and_examples_before_it(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{"prompt": "4", "answer": "4"}], few_shot=[{"prompt": "1+1", "completion": "2"}])
    (prompt,) = load(task.model_copy(update={"suffix": "=", "system": "00"})).train
    assert prompt.text.replace("<unk>", "|") == "00||1+1=2||4="


def test_an_instruct_model_without_chat_is_reported(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "answer": "1"}]
    assert any("task.chat = false" in note for note in load(task_of(tmp_path, rows), 64, chat_tokenizer()).notes)
    assert not load(task_of(tmp_path, rows, chat=True), 64, chat_tokenizer()).notes
    assert not load(task_of(tmp_path, rows)).notes


def mixed(weights: dict[str, float], nums: dict[str, int]) -> MixedStream:
    prompts = [Prompt(i, np.array([1], np.int32), "", {}, name) for name, num in nums.items() for i in range(num)]
    return MixedStream(prompts, weights, seed=5)


def test_several_tasks_are_mixed_by_weight_and_each_keeps_its_epochs() -> None:
    """Invariant 14's ground here too: the prompt of a position does not depend on what was read before."""
    weights, nums = {"a": 3.0, "b": 1.0, "off": 0.0}, {"a": 7, "b": 50, "off": 3}
    stream = mixed(weights, nums)
    drawn = [stream[position] for position in range(1200)]
    counts = {name: sum(prompt.source == name for prompt in drawn) for name in nums}
    assert counts == {"a": 900, "b": 300, "off": 0}
    for name, num in (("a", 7), ("b", 50)):
        indices = [prompt.index for prompt in drawn if prompt.source == name]
        epochs = [indices[start : start + num] for start in range(0, len(indices) - num, num)]
        assert all(sorted(epoch) == list(range(num)) for epoch in epochs)
    fresh = mixed(weights, nums)
    assert [(p.source, p.index) for p in map(fresh.__getitem__, (1000, 3, 577))] == [
        (drawn[position].source, drawn[position].index) for position in (1000, 3, 577)
    ]


def test_one_task_keeps_the_stream_it_had_and_two_are_distinguished(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "2"}])
    assert isinstance(stream_of(load(task).train, {"": task}, 0), PromptStream)
    both = load_all({"a": task, "b": task}, TOKENIZER, 64)
    assert [(prompt.source, prompt.index) for prompt in both.train] == [("a", 0), ("a", 1), ("b", 2), ("b", 3)]


@pytest.mark.parametrize("num", [1, 2, 7, 100])
def test_every_epoch_of_the_stream_holds_each_prompt_once(num: int) -> None:
    stream = PromptStream(prompts_of(num), seed=3)
    for epoch in range(6):
        indices = [stream[epoch * num + place].index for place in range(num)]
        assert sorted(indices) == list(range(num))


def test_epochs_and_seeds_differ_in_their_order() -> None:
    orders = {
        tuple(PromptStream(prompts_of(50), seed)[epoch * 50 + place].index for place in range(50))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_a_position_gives_the_same_prompt_whatever_was_read_before() -> None:
    """Invariant 14's ground: a resumed run continues the stream from a number alone."""
    read_in_order = PromptStream(prompts_of(5), seed=11)
    in_order = [read_in_order[position].index for position in range(200)]
    jumping = PromptStream(prompts_of(5), seed=11)
    backwards = [jumping[position].index for position in reversed(range(200))]
    assert backwards[::-1] == in_order
    assert [PromptStream(prompts_of(5), seed=11)[position].index for position in (0, 77, 199)] == [
        in_order[position] for position in (0, 77, 199)
    ]


def test_the_stream_order_is_fixed_for_good() -> None:
    """A changed generator would silently reorder the prompts of every resumed run."""
    stream = PromptStream(prompts_of(8), seed=0)
    assert [stream[position].index for position in range(8)] == [3, 6, 4, 0, 7, 5, 2, 1]


def test_a_far_position_of_a_one_row_stream_keeps_little_in_memory() -> None:
    stream = PromptStream(prompts_of(1), seed=0)
    assert {stream[position].index for position in range(0, 10**9, 10**7)} == {0}
    assert len(stream._orders) <= PromptStream.NUM_CACHED_EPOCHS


def test_a_stream_without_prompts_and_a_negative_position_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one prompt"):
        PromptStream([], seed=0)
    with pytest.raises(IndexError, match="start at 0"):
        PromptStream(prompts_of(3), seed=0)[-1]
