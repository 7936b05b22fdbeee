"""Verifiers: the mark that says what they read, and the number verifier against honest and hostile texts."""

import time
from typing import Any

import pytest

from headway.tasks.verifiers import needs_of, number, verifier
from headway.tasks.verifiers.number import verify


def score(answer: Any, text: str) -> float:
    return verify({"answer": answer}, text)


def test_a_verifier_says_what_it_needs_and_an_unmarked_one_needs_nothing() -> None:
    @verifier(needs=("answer", "unit"))
    def marked(task: dict[str, Any], text: str) -> float:
        return 0.0

    assert needs_of(marked) == ("answer", "unit")
    assert marked({}, "") == 0.0
    assert needs_of(lambda task, text: 0.0) == ()
    assert needs_of(verify) == ("answer",)


@pytest.mark.parametrize("needs", ["answer", lambda task, text: 0.0, (1,), ["answer"]])
def test_needs_that_are_not_a_tuple_of_names_are_refused(needs: Any) -> None:
    with pytest.raises(TypeError, match="tuple of field names"):
        verifier(needs)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (42, "so it is 42"),
        (42, "so it is 42."),
        (42, "<think>7</think> <answer> 42 </answer> (of 50)"),
        (42, "42"),
        (42, "first 7, then 42!"),
        (42, "42.0"),
        (42, "042"),
        ("42", "it is 42 dollars"),
        (42.0, "42"),
        (-7, "x = -7"),
        (-7, "x = −7"),
        (-1000, "it lost -$1,000"),
        (7, "+7"),
        (7, "10-3=7"),
        (3, "10-3"),
        (1234567, "1,234,567"),
        ("1,234,567", "1234567"),
        (3, "1,2,3"),
        (200, "1000,200"),
        (1234.5, "1,234.50"),
        (0.5, ".5"),
        (0.1, "0.1"),
        ("3/4", "0.75"),
        (0.75, "3/4."),
        (-0.75, "-3 / 4"),
        (1 / 3, "1/3"),
        (0.5, "\\boxed{\\frac{1}{2}}"),
        (-0.5, "it is -\\dfrac{1}{2}"),
        (2000, "2e3"),
        (10**40, "1" + "0" * 40),
        (42, "5 + 37 = 41? no. #### 42 (I checked 9 times)"),
        (42, "#### 41\n#### 42"),
        (42, "Answer: 42, because 6 * 7"),
        (42, "the **ANSWER:** 42\n\nThat took 3 steps."),
        (42, "\\boxed{x = 42} and 17 more"),
        (42, "\\boxed{1} then \\boxed{ {42} }"),
        (42, "\\boxed{42"),
        (42, "#### 1 and \\boxed{42} here"),
        ("Half of 84.\n#### 42", "42"),
        (42, "答案是42。"),
        (42, "\ud800 42"),
    ],
)
def test_the_number_the_text_ends_on_is_recognised_in_its_forms(answer: Any, text: str) -> None:
    assert score(answer, text) == 1.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (42, ""),
        (42, "no number"),
        (42, "41"),
        (42, "42 or 43"),
        (42, "#### 43, not 42"),
        (42, "not 42, answer: none"),
        (42, "\\boxed{} 42"),
        (5, "#### 5 1/2"),
        (45, "\\boxed{4\\;5}"),
        (4, "\\boxed{4 \\text{ or 5}}"),
        (42, "\\boxed{43} 42"),
        (42, "-42"),
        (42, "1/0"),
        (0, "0/0"),
        (42, "4.2"),
        (42, "٤٢"),
        (10**40, "1" + "0" * 39 + "1"),
        (10**15, "1000000000000001"),
        (1 / 3, "0.333"),
        ("0.3333333333333333", "1/3"),
        (42, "1e999999"),
        (42, "1e9999999999999"),
        (0.5, "1e999999/1e-999999"),
    ],
)
def test_any_other_number_scores_nothing(answer: Any, text: str) -> None:
    assert score(answer, text) == 0.0


@pytest.mark.parametrize("answer", ["no number", None, True, [42], float("nan"), float("inf"), "1/0"])
def test_a_row_whose_answer_is_no_number_is_an_error_and_not_a_low_score(answer: Any) -> None:
    with pytest.raises(ValueError, match="is no plain number"):
        score(answer, "42")


def test_a_row_without_an_answer_is_an_error() -> None:
    with pytest.raises(KeyError):
        verify({}, "42")


@pytest.mark.parametrize(
    ("prefix", "piece"),
    [
        ("", "9"),
        ("\\frac{", "9"),
        ("#### ", "9"),
        ("", "9 "),
        ("9", " "),
        ("", "9,"),
        ("9", ",234"),
        ("\\frac{9", ",234"),
        ("", "9/"),
        ("9", "e9"),
        ("", "."),
        ("", "-"),
        ("", "\\frac{9}{"),
        ("", "####"),
        ("", "\\boxed{9"),
        ("\\boxed{", "{"),
        ("", "9e999999/"),
        ("", "\ud800"),
    ],
)
def test_a_hostile_megabyte_takes_bounded_time(prefix: str, piece: str) -> None:
    text = prefix + piece * (1_000_000 // len(piece))
    started = time.process_time()
    assert score(42.5, text) == 0.0
    assert time.process_time() - started < 3


def test_a_million_digits_are_compared_exactly() -> None:
    digits = "7" * 1_000_000
    assert score(digits, f"it is {digits}") == 1.0
    assert score(digits, f"it is {digits[:-1]}8") == 0.0
    assert score(1, f"{digits}/{digits}") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        *[
            "18\\sqrt2",
            "18^2",
            "\\sqrt{18}",
            "\\boxed{18\\sqrt2}",
            "\\boxed{18^2}",
            "it is $18\\sqrt{2}$",
            "#### \\sqrt{18}",
        ],
        *[
            "\\boxed{(18,2)}",
            "the point (3, 18)",
            "18x",
            "$18\\pi$",
            "\\boxed{18,19}",
            "\\boxed{18!}",
            "x^{18}",
            "\\log_{18}",
        ],
    ],
)
def test_a_number_inside_an_expression_is_not_the_answer(text: str) -> None:
    assert score(18, text) == 0.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("4/3", "\\boxed{\\frac43}"),
        ("4/3", "it is \\dfrac 43"),
        (10080, "\\boxed{10,\\!080}"),
        (10080, "10{,}080"),
        (-5, "\\boxed{- 5}"),
        (-5, "x = - 5"),
        (5, "10 - 5"),
        (18, "\\boxed{18 \\text{ units}^2}"),
        (18, "\\boxed{\\$18}"),
        (18, "\\boxed{18^{\\circ}}"),
        (18, "\\boxed{x = 18}"),
    ],
)
def test_a_number_is_read_in_the_forms_of_latex(answer: Any, text: str) -> None:
    assert score(answer, text) == 1.0


@pytest.mark.parametrize(
    "answer", ["(3,-1)", "3\\sqrt{13}", "18^2", "x+1", "\\text{even}", "1,2,3", "[2,3]", "2\\frac12", "6_8"]
)
def test_a_row_whose_answer_is_no_plain_number_is_refused_at_start(answer: Any) -> None:
    assert "no plain number" in number.check_row({"answer": answer})


@pytest.mark.parametrize(
    "answer", ["42", "$1,234", "42 dollars", "\\frac43", "-3", "50\\%", "90^\\circ", "2\n#### 12", 3, 2.5]
)
def test_a_row_whose_answer_is_a_plain_number_is_not(answer: Any) -> None:
    assert number.check_row({"answer": answer}) == ""
