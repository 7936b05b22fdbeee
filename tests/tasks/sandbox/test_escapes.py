"""The escape suite: programs that attack the sandbox or their verdict. Invariant 10: all are wrong answers, none an
error, none a pass; and the machine is as it was before. Never skipped: where nothing can isolate, this must fail."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from attacks import ESCAPES, FORGERIES

from headway.tasks.sandbox.pool import Limits, Outcome, Sandboxes
from headway.tasks.verifiers.code import CodeVerifier

ROW = {"test_list": ["assert answer(2) == 4", "assert set([answer(3)]) == {9}"]}
LIMITS = Limits(wall_s=1.0, cpu_s=1, memory_mb=256, scratch_mb=8, output_kb=64)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Outcome], dict[str, object]]]:
    """Every attack tried at once, as hostile texts come; and what was seen of it from outside."""
    secret = tmp_path_factory.mktemp("host") / "secret.txt"
    secret.write_text("assert answer")
    os.environ["HEADWAY_TEST_SECRET"] = "SECRET"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    verifier = CodeVerifier(LIMITS, spares=2)
    reached: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: reached.append(accept(server)), daemon=True).start()
        words = {"HOST_FILE": str(secret), "HOST_PORT": str(server.getsockname()[1]), "HOST_PID": str(os.getpid())}

        def attack(program: str) -> Outcome:
            for word, value in words.items():
                program = program.replace(word, value)
            return verifier.outcome(ROW, program)

        attacks = FORGERIES | ESCAPES
        with ThreadPoolExecutor(8) as threads:
            outcomes = dict(zip(attacks, threads.map(attack, attacks.values()), strict=True))
        honest = verifier.outcome(ROW, "def answer(x): return x * x")
    verifier.close()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    yield outcomes, {"reached": reached, "left": left, "secret": secret.read_text(), "honest": honest}
    del os.environ["HEADWAY_TEST_SECRET"]


def accept(server: socket.socket) -> object:
    try:
        return server.accept()
    except OSError:
        return None


@pytest.mark.parametrize("name", [*FORGERIES, *ESCAPES])
def test_an_attack_is_a_wrong_answer(name: str, verdicts: tuple[dict[str, Outcome], dict[str, object]]) -> None:
    outcome = verdicts[0][name]
    assert outcome.passed == 0, outcome
    assert outcome.failure


def test_the_machine_is_as_it_was_and_the_pool_still_judges(
    verdicts: tuple[dict[str, Outcome], dict[str, object]],
) -> None:
    seen = verdicts[1]
    assert not any(seen["reached"]) and not seen["left"] and seen["secret"] == "assert answer"  # type: ignore[call-overload]
    honest = seen["honest"]
    assert isinstance(honest, Outcome) and honest.passed == honest.total == 2


def test_files_and_threads_are_counted() -> None:
    sandboxes = Sandboxes(Limits(wall_s=20.0, scratch_files=100, threads=16), spares=0)
    files = "import os, time\nfor n in range(int(input())): open(f'/tmp/{n}', 'w').close()\ntime.sleep(0.2)"
    threads = """
import threading
go = threading.Event()
for n in range(int(input())): threading.Thread(target=go.wait, daemon=True).start()
"""
    for program in (files, threads):
        few, many = sandboxes.run(program, ["8", "1000"])
        assert few.status == 0 and many.status != 0, (few, many)
    sandboxes.close()


def test_there_are_more_attacks_than_were_asked_for() -> None:
    assert len(FORGERIES) + len(ESCAPES) >= 56 and Path(__file__).name == "test_escapes.py"
