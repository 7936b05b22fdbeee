"""The math verifier: equal answers in other words, different answers, rows it cannot score, and texts made to hurt."""

import time
from typing import Any

import pytest

from headway.tasks.verifiers import expressions, math_answer
from headway.tasks.verifiers.bounded import Bounded
from headway.tasks.verifiers.math_answer import verify


def score(answer: Any, given: str) -> float:
    return verify({"answer": answer}, given)


SAME = [
    ("\\frac{3}{7}", "3/7"),
    ("\\frac34", "0.75"),
    ("\\dfrac{1}{2}", "\\frac12"),
    ("2\\sqrt{5}", "\\sqrt{20}"),
    ("3\\sqrt{13}", "\\sqrt{13} \\cdot 3"),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt2}"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    ("(3, -1)", "\\left(3,-1\\right)"),
    ("(3,\\frac{\\pi}{2})", "\\left( 3, \\pi/2 \\right)"),
    ("[2, 5)", "\\left[2,5\\right)"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "(3,\\infty)\\cup(-\\infty,2)"),
    ("1, 2, 3", "3, 1, 2"),
    ("\\{1, 2\\}", "\\{2,1\\}"),
    ("\\{1, 2\\}", "1, 2"),
    ("2, 3, \\text{ and } 4", "2,3,4"),
    ("1 \\pm \\sqrt{2}", "1+\\sqrt2, 1-\\sqrt2"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&\\frac{8}{2}\\end{bmatrix}"),
    ("12{,}000", "12000"),
    ("11,\\! 111,\\! 100", "11,111,100"),
    ("50\\%", "50"),
    ("50\\%", "\\frac12"),
    ("0.5", "50\\%"),
    ("15 \\text{ cm}^2", "15"),
    ("90^\\circ", "90"),
    ("\\$32.50", "32.5"),
    ("5 \\text{ degrees}", "5^{\\circ}"),
    ("\\text{even}", "even"),
    ("\\text{(C)}", "C"),
    ("\\text{Tom, Ann}", "Ann, Tom"),
    ("x = 5", "5"),
    ("7", "x = 7"),
    ("x \\in [1,2]", "[1,2]"),
    ("y = 2x + 3", "2x+3"),
    ("314_8", "314_{8}"),
    ("314_8", "314"),
    ("0.1\\overline{6}", "\\frac16"),
    ("e^{2x}", "e^{x} \\cdot e^x"),
    ("2007 + \\frac\\pi 2", "2007 + \\frac{\\pi}{2}"),
    ("6 - 5i", "-5i+6"),
    ("5!", "120"),
    ("\\binom{5}{2}", "10"),
    ("\\text{June 5}", "June 5"),
    ("5\\text{ cm}", "5 centimeters"),
    ("10:30\\text{ a.m.}", "10:30"),
    ("x=3, y=4", "y = 4, x = 3"),
    ("x=3, y=4", "(3, 4)"),
    ("(3,4)", "x=3, y=4"),
    ("x = 2, x = -2", "-2, 2"),
    ("x > 5", "(5, \\infty)"),
    ("x \\le 5", "5 \\geq x"),
    ("-1 < x \\leq 2", "(-1, 2]"),
    ("2<x<5", "5>x>2"),
    ("[-1,1]", "-1 \\le x \\le 1"),
    ("x<-1 \\text{ or } x>2", "(-\\infty,-1)\\cup(2,\\infty)"),
    ("\\mathbb{R}", "(-\\infty,\\infty)"),
    ("\\emptyset", "\\{\\}"),
    ("[2, \\infty)", "[2, +\\infty)"),
    ("\\emptyset", "\\varnothing"),
    ("\\langle 1,2\\rangle", "(1,2)"),
    ("6\\frac{2}{3}\\%", "\\frac{20}{3}\\%"),
    ("\\sin 30^\\circ", "\\frac12"),
    ("e^{i\\pi}", "-1"),
    ("\\frac{1}{i}", "-i"),
    ("AB = 5", "5"),
    ("0.56 = 56\\%", "0.56 = 56\\%"),
    ("10", "4 + 6 = 10"),
    ("(3,4)", "\\bigl(3,4\\bigr)"),
    ("(3,4)", "(x, y) = (3, 4)"),
    ("x = 1 \\text{ or } x = 2", "x = 2 \\text{ or } x = 1"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\left(\\begin{array}{cc}1&2\\cr3&4\\end{array}\\right)"),
    ("3\\sqrt{13}", "3√13"),
    ("2\\pi", "2π"),
    ("0.\\bar{3}", "\\frac13"),
    ("p - q", "-q+p"),
    ("45^\\circ, 135^\\circ", "135^\\circ, 45^\\circ"),
    ("45, 135, 225", "225, 135, 45"),
    ("\\text{(A)}", "{\\text{(A)}}"),
    ("\\frac{11}{2}", "5 1/2"),
    ("-\\frac32", "-1 1/2"),
    ("xy", "yx"),
    ("i", "\\sqrt{-1}"),
    ("1200", "1\\,200"),
    (42, "42.0"),
    (0.25, "1/4"),
]

DIFFERENT = [
    ("\\frac{3}{7}", "7/3"),
    ("2\\sqrt{5}", "5\\sqrt{2}"),
    ("18", "18\\sqrt2"),
    ("18", "18^2"),
    ("18", "(18, 2)"),
    ("(3,-1)", "(-1,3)"),
    ("(3,-1)", "3"),
    ("(3,-1)", "[3,-1]"),
    ("(3,-1)", "(3,-1,0)"),
    ("[2,5)", "[2,5]"),
    ("1,2,3", "1,2"),
    ("1,2,3", "1,2,2"),
    ("1,2", "(1,2)"),
    ("\\{1,2\\}", "\\{1,3\\}"),
    ("1 \\pm \\sqrt2", "1 + \\sqrt2"),
    ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("x^2+1", "x^2-1"),
    ("x+1", "x + 1, 2"),
    ("314_8", "314_9"),
    ("314_8", "204"),
    ("15 \\text{ cm}^2", "15 \\text{ cm}^3"),
    ("\\text{even}", "odd"),
    ("\\text{(C)}", "D"),
    ("C", "7"),
    ("\\pi", "3.14"),
    ("\\frac13", "0.333"),
    ("1000001", "1000000"),
    ("50\\%", "0.05"),
    ("7", ""),
    ("7", "seven and a half"),
    ("7", "\\frac{7}{"),
    ("\\infty", "-\\infty"),
    ("5\\text{ cm}", "5\\text{ m}"),
    ("10:30\\text{ a.m.}", "10:30\\text{ p.m.}"),
    ("\\text{June 5}", "June 6"),
    ("x=3, y=4", "x=4, y=3"),
    ("(3,4)", "x=4, y=3"),
    ("x > 5", "[5, \\infty)"),
    ("x > 5", "y > 5"),
    ("x > 5", "x < 5"),
    ("2<x<5", "2<x<6"),
    ("x<-1 \\text{ or } x>2", "x<-1"),
    ("x+y=5", "5"),
    ("x^2=4", "4"),
    ("10", "2x = 10"),
    ("\\emptyset", "0"),
    ("0.56 = 56\\%", "0.56 = 57\\%"),
    ("10", "2 \\cdot 4 = 10"),
    ("3+4i", "3-4i"),
    ("\\sin 30^\\circ", "\\sin 30"),
    ("18", "18 or 19"),
    ("\\frac{a}{b+c}", "a/b+c"),
    ("p - q", "q - p"),
    ("(20,100)", "20100"),
    ("(20,100)", "20,100"),
    ("45, 135", "45135"),
    ("(x,y) = (3,4)", "(x,y) = (4,3)"),
    ("6", "5$6"),
    ("12", "1 2"),
    ("12", "1\\quad 2"),
    ("12", "1\\text{ }2"),
    ("51/2", "5 1/2"),
    ("\\{12\\}", "\\{1 2\\}"),
    ("12x", "1 2x"),
    ("4\\text{ thousand}", "4 million"),
    ("4", "4 \\text{ or 5}"),
]


@pytest.mark.parametrize(("answer", "given"), SAME)
def test_an_equal_answer_in_other_words_is_right(answer: Any, given: str) -> None:
    assert score(answer, f"So it is $\\boxed{{{given}}}$, which we had to find.") == 1.0
    assert score(answer, f"First 12.\n#### {given}") == 1.0


@pytest.mark.parametrize(("answer", "given"), DIFFERENT)
def test_a_different_answer_is_wrong(answer: Any, given: str) -> None:
    assert score(answer, f"We had {answer}, so $\\boxed{{{given}}}$") == 0.0
    assert score(answer, f"We had {answer}, so\n#### {given}") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "so $\\boxed{\\frac{1}{2}}$",
        "\\boxed{1} was wrong; \\boxed{ {\\frac{1}{2}} }",
        "Final answer: $\\frac{1}{2}$.",
        "The answer is **1/2**",
        "<think>2/4</think>\n<answer>1/2</answer>\nDone: 7.",
        "<answer>The answer is $\\frac12$</answer>",
        "The answer is **1/2**.",
        "The answer is 1/2, because it is 3/6.",
        "The answer is exactly 1/2 (in lowest terms).",
        "Since $x = 3$ we get $y = \\frac{1}{2}$",
        "we get \\(x = y = \\frac12\\)",
        "we find \\[0.5\\]",
        "it is 1/2",
        "\\boxed{\\frac{1}{2}",
    ],
)
def test_the_final_answer_is_found_in_its_text(text: str) -> None:
    assert score("\\frac{1}{2}", text) == 1.0


def test_several_formulas_after_the_mark_are_one_answer() -> None:
    for text in ("The answer is $5$ or $6$.", "Answer: $5$, $6$", "The answer is $5$, and \\(6\\)."):
        assert [score(answer, text) for answer in ("5", "6", "5, 6")] == [0.0, 0.0, 1.0]


def test_a_worked_solution_is_a_reference_too() -> None:
    assert score("Half of 3 is $\\boxed{\\frac32}$.", "it is 1.5") == 1.0
    assert score("We add them.\n#### 1,200", "\\boxed{1200}") == 1.0


def test_no_text_is_evaluated_as_python() -> None:
    def read(text: str) -> str:
        import sympy

        expressions.guard_sympy()
        return str(sympy.sympify(text))

    bounded = Bounded(read, 5.0, prepare=math_answer._load)
    assert bounded("12.5") == "12.5000000000000", "sympy itself reads numerals so"
    for text in ("__import__('os').getpid()", "x.__class__", "Integer(2).__class__", "().__class__", "print(3)"):
        with pytest.raises(RuntimeError, match="never evaluated"):
            bounded(text)
    bounded.close()


@pytest.mark.parametrize(
    "answer", [None, "", "  ", True, [1], "x" * 5000, "\\frac{", "((", "\\begin{matrix}", "1 + + )"]
)
def test_a_row_that_cannot_be_compared_is_refused_at_start(answer: Any) -> None:
    assert math_answer.check_row({"answer": answer})


@pytest.mark.parametrize("answer", [answer for answer, _ in SAME])
def test_a_row_that_can_be_compared_is_not(answer: Any) -> None:
    assert math_answer.check_row({"answer": answer}) == ""


@pytest.mark.parametrize(
    "given",
    [
        "9^{9^{9^9}}",
        "10^{10^{10}}",
        "(10^8)!",
        "\\sum_{k=1}^{10^9} \\frac{1}{k}",
        "(" * 900 + "1" + ")" * 900,
        "{" * 900,
        "\\frac{1}{" * 150 + "2" + "}" * 150,
        "\\sqrt{" * 200 + "2" + "}" * 200,
        "+".join(["x^2"] * 400),
        "(x+y+z)^{300}",
        "\\ud800",
        "\x00",
        "1" * 1900,
        "__import__('os').system('true')",
    ],
)
def test_a_hostile_answer_is_wrong_within_its_deadline(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answer, "_EQUAL", Bounded(math_answer._compare, 0.4, prepare=math_answer._load))
    started = time.process_time()
    assert score("\\sqrt{3} + x", f"\\boxed{{{given}}}") == 0.0
    assert time.process_time() - started < 3
    monkeypatch.undo()
    assert score("\\sqrt{3} + x", "\\boxed{x + \\sqrt3}") == 1.0, "the next comparison is not hurt by it"


def test_a_megabyte_of_boxes_takes_bounded_time() -> None:
    for piece in ("\\boxed{", "$", "####", "\\(", "\\[", "\\(\\[", "answer is ", "{", "9,", "- "):
        started = time.process_time()
        assert score("\\sqrt{3}", piece * (150_000 // len(piece))) == 0.0
        assert time.process_time() - started < 2, piece
