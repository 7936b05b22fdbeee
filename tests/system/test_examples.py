"""The examples do what they say, with a tiny model where a run needs one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway.config import load
from headway.plan import describe
from headway.tasks import imports
from headway.tasks.verifiers.number import verify as verify_number

ROOT = Path(__file__).parents[2]


def run_example(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, f"examples/{name}.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def test_custom_reward_trains_on_its_own_rows_and_scores(tmp_path: Path, tiny_model: str) -> None:
    small = ["--run.steps=1", "--run.runtime=inline", "--task.chat=false", "--sampling.max_tokens=12"]
    done = run_example("custom_reward", f"--model.path={tiny_model}", f"--run.dir={tmp_path / 'run'}", *small)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["tokens_trained"] > 0 and summary["dropped"] == {}
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    rewards = [reward for event in events if event["kind"] == "finished" for reward in event["rewards"]]
    assert rewards and all(0 < reward <= 1 for reward in rewards), "scores of the example's own verifier, none missing"


def test_custom_reward_prefers_the_right_number_of_words() -> None:
    verify = imports.load(str(ROOT / "examples/custom_reward.py:verify"))
    right, near, far = (verify({"num_words": 4}, text) for text in ("the sea is wide", "the sea calls", "sea"))
    assert right == 1.0 > near > far > 0.0


def test_custom_reward_stays_about_forty_lines() -> None:
    assert len((ROOT / "examples/custom_reward.py").read_text().splitlines()) <= 45


def test_sums_are_all_there_once_and_their_answers_are_right() -> None:
    train, held_out = (imports.load(str(ROOT / f"examples/sums.py:{name}_rows"))() for name in ("train", "eval"))
    prompts = [row["prompt"] for row in [*train, *held_out]]
    assert len(set(prompts)) == len(prompts) == 100
    assert 25 <= len(held_out) <= 40
    for row in train:
        left, right = (int(word) for word in row["prompt"].replace("?", "").split() if word.isdigit())
        assert verify_number(row, f"The answer is {left + right}.") == 1.0


def test_smollm2_model_refuses_what_cannot_work_in_one_sentence(tmp_path: Path) -> None:
    exists = run_example("smollm2_model", str(tmp_path))
    assert exists.returncode == 1 and f"{tmp_path} exists" in exists.stderr
    missing = run_example("smollm2_model", str(tmp_path / "model"), "--gguf", str(tmp_path / "nothing.gguf"))
    assert missing.returncode == 1 and "nothing.gguf is not a file" in missing.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("text", ["2024", "7 12", "a12b3"])
def test_smollm2_model_gives_the_tokenizer_single_digits_back(tmp_path: Path, text: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    imports.load(str(ROOT / "examples/smollm2_model.py:split_digits"))(tmp_path / "tokenizer.json")
    pieces = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer.pre_tokenize_str(text)
    digits = [piece for piece, _ in pieces if any(character.isdigit() for character in piece)]
    assert digits == [character for character in text if character.isdigit()]


def test_the_calculator_answers_calls_and_the_worked_examples_say_what_the_rows_say() -> None:
    calculate, sft_rows, verify = (
        imports.load(str(ROOT / f"examples/use_calculator.py:{name}")) for name in ("calculate", "sft_rows", "verify")
    )
    assert (calculate("[12*34]"), calculate("[12*]")) == ("408", "?")
    rows = sft_rows()
    asked = [row for row in rows if row["completion"].startswith("[")]
    assert 0.1 < len(asked) / len(rows) < 0.3
    assert all(verify(row, row["completion"]) == 1.0 for row in asked)
    assert sum(verify(row, row["completion"]) for row in rows) < 1.05 * len(asked)


def test_the_programs_of_the_code_example_are_right_with_brackets_and_often_wrong_without() -> None:
    rows = imports.load(str(ROOT / "examples/write_code.py:train_rows"))()
    num_right = {"careful": 0, "hurried": 0}
    for row in rows[::9]:
        for kind in num_right:
            space: dict[str, object] = {}
            exec(row[kind], space)
            try:
                exec("\n".join(row["test_list"]), space)
                num_right[kind] += 1
            except AssertionError:
                pass
    assert num_right["careful"] == len(rows[::9]) > 1.2 * num_right["hurried"] > 0


ROWS = {
    "mbpp/train.jsonl": {"text": "Write double.", "test_list": ["assert double(2) == 4"], "test_setup_code": ""},
    "humaneval/HumanEval.jsonl": {
        "prompt": "def f():\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate() is None\n",
    },
    "math/train.jsonl": {"problem": "What is half of 3?", "answer": "\\frac{3}{2}"},
    "gsm8k/train.jsonl": {"question": "1+1?", "answer": "It is two. #### 2"},
}


@pytest.mark.parametrize("name", ["mbpp", "math", "gsm8k_qwen"])
def test_configs_of_several_benchmarks_plan_a_run_on_rows_of_their_kind(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for path, row in ROWS.items():
        for place in {path, path.replace("train", "test")}:
            (tmp_path / "data" / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / place).write_text(json.dumps(row) + "\n")
    small = [
        f"--model.path={model}",
        "--trainer.batch_groups=1",
        "--engine.device=cpu",
        "--trainer.device=cpu",
        "--model.dtype=float32",
    ]
    config = load(ROOT / f"configs/{name}.toml", [*small, "--engine.max_context=512", "--sampling.max_tokens=32"])
    plan = describe(config)
    assert dict(plan.rows)["prompts"] == "1 to train on, 2 held out" and not plan.warnings
