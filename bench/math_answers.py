"""Written variants and perturbations of reference answers, and what verifiers make of them.

Each reference is written in five ways that mean the same and in one that does not. A variant that scores 0 is a false
negative, a perturbed one that scores 1 a false positive. math-verify as its authors use it (`verify(parse(gold),
parse(text))`) is asked the same questions; every question on which the two differ is listed.
"""

import re
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

_DIGITS = re.compile(r"\d+(?![\d}]*\\?(?:end|begin))")
_INTEGER = re.compile(r"-?\d{1,3}|-?\d{4,}")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")


def variants(answer: str) -> dict[str, str]:
    """Five texts that end on the answer."""
    return {
        "box": f"Adding the parts gives the result, so it is $\\boxed{{{answer}}}$.",
        "box, respelled": f"We checked 3 cases.\n\n\\[\\boxed{{{respelled(answer)}}}\\]",
        "marks": f"First 2, then 7.\n#### {answer}",
        "sentence": f"Since $x > 0$ and $y = 12$, the final answer is ${answer}$.",
        "rewritten value": f"Therefore the answer is $\\boxed{{{rewritten(answer)}}}$",
    }


def respelled(answer: str) -> str:
    """The same, with other LaTeX."""
    text = re.sub(r"\\[dt]?frac(?=\{)", r"\\dfrac", answer)
    if "\\left" in text:
        text = re.sub(r"\\(?:left|right)(?![a-z])", "", text)
    else:
        text = re.sub(r"^\((.*)\)$", r"\\left( \1 \\right)", text) if text.count("(") == 1 else text
    return text.replace(", ", ",").replace(",", ", \\,") if not re.search(r"\d,(?:\\!)?\d{3}", text) else text


def rewritten(answer: str) -> str:
    """The same value written otherwise, where that can be said by rule; else with other spaces."""
    if _INTEGER.fullmatch(answer):
        number = int(answer)
        return f"{number:,}" if abs(number) > 999 else f"{number}.0"
    if match := _FRACTION.fullmatch(answer):
        return f"{match[1]}{match[2]}/{match[3]}"
    if match := re.fullmatch(r"(\d*)\\sqrt\{(\d+)\}", answer):
        return f"\\sqrt{{{match[2]}}} \\cdot {match[1] or '1'}"
    if match := re.fullmatch(r"(\d+)\\%", answer):
        return match[1]
    return re.sub(r"(?<=[\d)}]) *([+=-]) *(?=[\dA-Za-z(\\])", r" \1 ", answer)


def perturbed(answer: str) -> str:
    """Something else: the last number plus one, or another letter or word."""
    numbers = list(_DIGITS.finditer(answer))
    if numbers:
        place = numbers[-1]
        return f"{answer[: place.start()]}{int(place[0]) + 1}{answer[place.end() :]}"
    letters = list(re.finditer(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z{])", answer))
    if letters:
        place = letters[-1]
        other = chr((ord(place[0]) - ord("A") + 1) % 26 + ord("A")) if place[0].isupper() else "q"
        return f"{answer[: place.start()]}{other if other != place[0] else 'w'}{answer[place.end() :]}"
    words = re.search(r"[a-zA-Z]{2,}(?=[^a-zA-Z]*$)", answer)
    if words and ("\\text" in answer or "\\" not in answer):
        return f"{answer[: words.start()]}not{answer[words.start() :]}"
    return f"{answer} + 1"


def plain_math_verify(answer: str, text: str) -> bool:
    from math_verify import parse, verify

    return bool(
        verify(parse(f"${answer}$", parsing_timeout=None), parse(text, parsing_timeout=None), timeout_seconds=None)
    )


def ask(rows: list[Message], verify: Callable[[Message, str], float]) -> Message:
    """Every question of every row, to the verifier and to math-verify."""
    found: Message = {"refused": [], "wrong": [], "disagreements": [], "questions": {}}
    for number, row in enumerate(rows):
        answer = row["answer"]
        texts = {**variants(answer), "perturbed": f"So it is $\\boxed{{{perturbed(answer)}}}$."}
        for kind, text in texts.items():
            right = kind != "perturbed"
            ours, theirs = verify(row, text) == 1.0, plain_math_verify(answer, text)
            count = found["questions"].setdefault(kind, {"asked": 0, "headway_wrong": 0, "math_verify_wrong": 0})
            count["asked"] += 1
            count["headway_wrong"] += ours != right
            count["math_verify_wrong"] += theirs != right
            if ours != right:
                found["wrong"].append([row.get("row", number), kind, answer, text])
            if ours != theirs:
                found["disagreements"].append([row.get("row", number), kind, ours, theirs, answer, text])
    return found
