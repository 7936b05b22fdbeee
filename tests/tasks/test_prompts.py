import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config import TaskSection
from headway.errors import ConfigError
from headway.model.tokenizer import build_character_tokenizer
from headway.tasks.prompts import PromptStream, load_prompts, load_rows
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


def prompts_of(num: int) -> list[Prompt]:
    return [Prompt(index=i, tokens=np.array([i], np.int32), text=str(i), task={}) for i in range(num)]


def test_rows_of_a_jsonl_file_come_in_order_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n\n{"prompt": "2", "deep": {"a": [1]}}\n', encoding="utf-8")
    assert load_rows(str(path)) == [{"prompt": "1"}, {"prompt": "2", "deep": {"a": [1]}}]


def test_a_line_separator_inside_a_json_string_does_not_end_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert load_rows(str(path)) == [{"prompt": "a\u2028b"}]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [("{oops", "line 3: not valid JSON"), ("[1]", "line 3: a row is a JSON object, not list")],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"{path}, {sentence}"):
        load_rows(str(path))


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=f"{path} is not UTF-8"):
        load_rows(str(path))


def test_a_missing_dataset_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl does not exist"):
        load_rows(str(tmp_path / "nowhere.jsonl"))


def test_a_dataset_of_zero_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "data.py").write_text("def rows():\n    return []\n")
    for reference in ("empty.jsonl", "data.py:rows"):
        with pytest.raises(ConfigError, match="has no rows"):
            load_rows(f"{tmp_path}/{reference}")


def test_rows_come_from_a_function_even_if_it_yields_them(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("def rows():\n    for i in range(3):\n        yield {'prompt': str(i)}\n")
    assert [row["prompt"] for row in load_rows(f"{tmp_path}/data.py:rows")] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise RuntimeError('no network')", "rows raised RuntimeError: no network"),
        ("return ['1+1=']", "row 0: a row is a dict, not str"),
        ("return None", "rows raised TypeError"),
    ],
)
def test_a_function_that_gives_no_rows_is_one_sentence(tmp_path: Path, body: str, sentence: str) -> None:
    (tmp_path / "data.py").write_text(f"def rows():\n    {body}\n")
    with pytest.raises(ConfigError, match=sentence):
        load_rows(f"{tmp_path}/data.py:rows")


def test_a_prompt_carries_its_tokens_its_text_and_its_whole_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "1+2", "answer": "3", "note": [1]}, {"prompt": "4", "answer": "4"}]
    prompts = load_prompts(task_of(tmp_path, rows, suffix="="), TOKENIZER, max_prompt_tokens=8)
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert [prompt.text for prompt in prompts] == ["1+2=", "4="]
    assert [len(prompt.tokens) for prompt in prompts] == [4, 2]
    assert [prompt.task for prompt in prompts] == rows


def test_the_eval_split_reads_the_eval_rows(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{"prompt": "1", "answer": "1"}], eval=f"{tmp_path}/held.jsonl")
    (tmp_path / "held.jsonl").write_text('{"prompt": "2", "answer": "2"}')
    assert [prompt.text for prompt in load_prompts(task, TOKENIZER, 8, split="eval")] == ["2"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "1", "answer": "1"}, r"row 1 has no field 'prompt', which task\.prompt_field names"),
        ({"prompt": "1"}, r"row 1 has no field 'answer', which the verifier .*check\.py:verify needs"),
        ({"prompt": 12, "answer": "1"}, "row 1: 'prompt' is text or a list of chat messages, not int"),
        ({"prompt": ["12"], "answer": "1"}, "row 1: 'prompt' is text or a list of chat messages, not list"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, r"row 1: .* set task\.chat = true"),
        ({"prompt": "", "answer": "1"}, "row 1: the prompt has 0 tokens"),
        ({"prompt": "12345678", "answer": "1"}, "row 1: the prompt has 8 tokens, and 1 to 7"),
    ],
)
def test_a_row_that_cannot_work_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    task = task_of(tmp_path, [{"prompt": "1", "answer": "1"}, row])
    with pytest.raises(ConfigError, match=sentence):
        load_prompts(task, TOKENIZER, max_prompt_tokens=7)


def test_a_prompt_exactly_at_the_limit_is_accepted(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{"prompt": "1234567", "answer": "1"}])
    assert len(load_prompts(task, TOKENIZER, max_prompt_tokens=7)[0].tokens) == 7


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
