import importlib.util
import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest

from headway.model.tokenizer import build_character_tokenizer, decode, encode_prompt

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("arithmetic_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arithmetic = load_example()
TRAIN, EVAL, SFT = arithmetic.train_rows(), arithmetic.eval_rows(), arithmetic.sft_rows()


def test_held_out_problems_never_appear_in_training_or_warm_up() -> None:
    held_out = {row["prompt"] for row in EVAL}
    assert len(held_out) == len(EVAL) >= 512
    assert held_out.isdisjoint({row["prompt"] for row in TRAIN + SFT})


def test_rows_are_the_same_at_every_call() -> None:
    assert arithmetic.eval_rows() == EVAL
    assert arithmetic.train_rows() == TRAIN


def test_every_answer_is_the_sum_and_every_worked_step_is_true() -> None:
    for row in EVAL + SFT[:1000]:
        letters, terms = re.findall("[a-z]", row["prompt"]), [int(term) for term in re.findall("[0-9]+", row["prompt"])]
        totals = list(itertools.accumulate(terms))
        assert row["answer"] == str(totals[-1])
        *steps, answer = row["completion"].split(";")
        assert answer == f"#{totals[-1]}"
        worked = [f"{letters[i]}+{terms[i]}={totals[i]}" for i in range(1, len(terms))]
        assert steps in ([], worked)


def test_most_warm_up_examples_only_state_the_answer_and_the_rest_work_it_out() -> None:
    answer_only = sum(";" not in row["completion"] for row in SFT) / len(SFT)
    assert abs(answer_only - arithmetic.ANSWER_ONLY_SHARE) < 0.02
    assert answer_only > 0.5


def test_completions_to_imitate_earn_the_full_reward() -> None:
    assert all(arithmetic.verify(row, row["completion"]) == 1.0 for row in SFT)


def test_answer_lengths_have_a_long_tail() -> None:
    lengths = sorted(len(row["completion"]) for row in TRAIN)
    median, longest = lengths[len(lengths) // 2], lengths[-1]
    assert 30 <= sum(lengths) / len(lengths) <= 80
    assert 3 * median < longest <= 250


def test_the_example_alphabet_covers_every_row() -> None:
    tokenizer = build_character_tokenizer(arithmetic.ALPHABET)
    for row in (TRAIN + EVAL + SFT)[::50]:
        text = row["prompt"] + row["completion"]
        assert decode(tokenizer, encode_prompt(tokenizer, text, chat=False)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#",
        "25",
        "#2",
        "#255",
        "#25 ",
        "# 25",
        "#25;",
        "#025",
        "#+25",
        "#25.0",
        "#24#25",
        "#25#24",
        "#２５",
        "#" + "9" * 100_000,
        "#" * 100_000,
        "#__import__('os')._exit(0)",
        "\x00#25\x00",
        "#25\n",
    ],
)
def test_anything_but_the_exact_answer_earns_nothing(text: str) -> None:
    assert arithmetic.verify({"answer": "25"}, text) == 0.0


@pytest.mark.parametrize("text", ["#25", "b+5=13;c+12=25;#25", "nonsense;#25"])
def test_only_the_final_answer_counts(text: str) -> None:
    assert arithmetic.verify({"answer": "25"}, text) == 1.0
