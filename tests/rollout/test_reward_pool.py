"""The reward pool with real processes. Invariant 10: errors are never rewards."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from reward_talk import VERIFIERS, errors_of, read_pids, run, wait_until_gone

from headway import codec
from headway.config import RewardSection
from headway.errors import ConfigError, WorkerDied
from headway.rollout import reward_pool
from headway.rollout.reward_pool import _BOOT, RewardPool
from headway.rollout.reward_process import HEADER, SCORED
from headway.types import EXCEEDED, UNSCORED, Verdict


def test_five_hundred_calls_get_each_their_own_score(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> list[Verdict]:
        return await asyncio.gather(*(pool.verify({"score": n}, "") for n in range(500)))

    verdicts, stats = run(tmp_path, "echo", talk, workers=2)
    assert [(verdict.score, verdict.error) for verdict in verdicts] == [(float(n), "") for n in range(500)]
    assert stats["num_verified"] == 500 and stats["num_errors"] == stats["num_failed"] == 0


def test_any_text_reaches_the_verifier_as_it_is(tmp_path: Path) -> None:
    texts = ["", "\ud800 lone \udfff", "\x00", "é漢🙂", "x" * 3_000_000]

    async def talk(pool: RewardPool) -> list[Verdict]:
        return [await pool.verify({"text": text.encode("utf-8", "surrogatepass")}, text) for text in texts]

    verdicts, _ = run(tmp_path, "compare", talk)
    assert [(verdict.score, verdict.error) for verdict in verdicts] == [(1.0, "")] * len(texts)


def test_an_error_is_never_a_reward_whatever_the_verifier_returns_or_raises(tmp_path: Path) -> None:
    expected = {"true": 1.0, "one": 1.0, "half": 0.5, "numpy half": 0.5, "numpy one": 1.0, "numpy true": 1.0}
    expected_errors = {
        "nan": "returned nan",
        "numpy nan": "returned nan",
        "infinity": "returned inf",
        "text": "returned a value of type str",
        "none": "returned a value of type NoneType",
        "complex": "returned a value of type complex",
        "array": "returned a value of type ndarray",
        "list": "returned a value of type list",
        "bytes": "returned a value of type bytes",
        "huge": "returned a value of type int",
        "raise": "raised ZeroDivisionError at verifiers.py:15: by zero \\ud800",
        "rude": "raised Rude at verifiers.py:18",
        "recurse": "raised RecursionError",
        "sys.exit": "raised SystemExit",
    }
    names = [*expected, *expected_errors, "half"]

    async def talk(pool: RewardPool) -> list[Verdict]:
        return [await pool.verify({"value": name}, "") for name in names]

    verdicts, stats = run(tmp_path, "give", talk)
    found = dict(zip(names, verdicts, strict=True))
    assert {name: found[name].score for name in expected} == expected
    assert not any(found[name].error for name in expected)
    for name, sentence in expected_errors.items():
        assert sentence in found[name].error and "verifiers.py:give" in found[name].error and found[name].score == 0.0
        assert "\n" not in found[name].error
    assert verdicts[-1].score == 0.5, "the pool goes on"
    assert errors_of(stats) == {"not_a_score": 10, "raised": 4}
    assert (stats["num_verified"], stats["num_failed"], stats["num_killed"]) == (7, 14, 0)


def test_a_hang_is_killed_at_its_deadline_counted_and_replaced(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> list[Verdict]:
        started = time.monotonic()
        verdicts = [await pool.verify({"action": action}, "") for action in ("hang", "nothing")]
        assert 0.3 <= time.monotonic() - started < 10
        return verdicts

    (hung, after), stats = run(tmp_path, "act", talk, deadline_s=0.3)
    assert "ran longer than reward.deadline_s = 0.3 and was killed" in hung.error
    assert after.error == ""
    assert errors_of(stats) == {"deadline": 1} and stats["num_killed"] == 1


def test_invariant_10_a_text_that_the_verifier_computes_beyond_its_deadline_is_a_wrong_answer(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> Verdict:
        while True:  # on a busy machine it may get too little of a processor to have computed
            verdict = await pool.verify({"action": "hang_deaf"}, "")
            if not verdict.error:
                return verdict
            assert "ran longer than reward.deadline_s = 0.5 and was killed" in verdict.error

    verdict, stats = run(tmp_path, "act", talk, deadline_s=0.5)
    assert (verdict.score, verdict.error, verdict.components) == (0.0, "", {EXCEEDED: 1.0})
    assert errors_of(stats)["exceeded"] == 1


def test_on_error_zero_gives_a_verdict_of_zero_that_is_named_and_drop_gives_none(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> Verdict:
        return await pool.verify({"value": "raise"}, "")

    dropped, _ = run(tmp_path, "give", talk)
    zero, stats = run(tmp_path, "give", talk, on_error="zero")
    assert "raised ZeroDivisionError" in dropped.error
    assert (zero.score, zero.error, zero.components) == (0.0, "", {UNSCORED: 1.0})
    assert errors_of(stats) == {"raised": 1} and stats["num_failed"] == 1


def test_a_killed_verifier_takes_its_whole_family_along_even_what_left_its_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    task = {"action": "hang_with_family", "pids": str(pids)}
    verdict, _ = run(tmp_path, "act", lambda pool: pool.verify(task, ""), deadline_s=1.0)
    assert "killed" in verdict.error
    assert len(read_pids(pids)) == 2
    wait_until_gone(read_pids(pids))


def test_what_a_verifier_leaves_running_is_gone_before_its_verdict(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def talk(pool: RewardPool) -> Verdict:
        verdict = await pool.verify({"action": "leave_family", "pids": str(pids)}, "")
        assert len(read_pids(pids)) == 3 and not any(map(psutil.pid_exists, read_pids(pids)))
        return verdict

    verdict, stats = run(tmp_path, "act", talk)
    assert (verdict.score, verdict.error, stats["num_killed"]) == (1.0, "", 0)


def test_a_helper_started_at_import_survives_the_calls(tmp_path: Path) -> None:
    source = "import subprocess\nhelper = subprocess.Popen(['sleep', '600'])\n"
    (tmp_path / "helped.py").write_text(f"{source}def verify(task, text): return helper.poll() is None\n")

    async def main() -> list[float]:
        pool = RewardPool(f"{tmp_path}/helped.py:verify", RewardSection())
        await pool.open()
        scores = [(await pool.verify({}, "")).score for _ in range(2)]
        helpers = [child.pid for child in psutil.Process().children(recursive=True) if child.name() == "sleep"]
        await pool.close()
        assert len(helpers) == 1
        wait_until_gone(helpers)
        return scores

    assert asyncio.run(main()) == [1.0, 1.0]


def test_a_fork_that_returns_neither_answers_nor_serves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def talk(pool: RewardPool) -> list[float]:
        actions = ["fork_and_return", "nothing"] * 5
        return [(await pool.verify({"action": action}, "")).score for action in actions]

    scores, stats = run(tmp_path, "act", talk)
    assert scores == [0.75, 1.0] * 5
    assert stats["num_errors"] == 0
    assert capfd.readouterr().err == ""


def test_a_verifier_that_takes_its_process_down_is_an_error_at_once_and_is_replaced(tmp_path: Path) -> None:
    expected = {
        "exit": "ended with exit code 3",
        "segfault": "was ended by SIGSEGV",
        "out of memory": "was ended by SIGKILL, as when memory runs out",
        "kill guardian": "was ended by SIGKILL",
        "fork_and_exit": "ended with exit code 0",
        "write": "its process",
        "close": "its process",
        "thread": "its process",
    }

    async def talk(pool: RewardPool) -> list[Verdict]:
        return [await pool.verify({"action": action}, "") for action in [*expected, "nothing"]]

    (*broken, after), stats = run(tmp_path, "act", talk)
    for verdict, sentence in zip(broken, expected.values(), strict=True):
        assert sentence in verdict.error and verdict.seconds < 10
    assert (after.score, after.error) == (1.0, "")
    assert errors_of(stats) == {"died": len(expected)} and stats["num_killed"] == 0


def test_printing_and_reading_do_not_touch_the_conversation(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def talk(pool: RewardPool) -> list[float]:
        return [(await pool.verify({"action": action}, "")).score for action in ("print", "read", "print")]

    scores, _ = run(tmp_path, "act", talk)
    assert scores == [1.0, 1.0, 1.0]
    captured = capfd.readouterr()
    assert captured.out == "" and "raw" in captured.err


def test_an_error_is_retried_and_the_retry_counts(tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(
        "import os\n"
        "def verify(task, text):\n"
        "    with open(task['path'], 'a') as file: file.write('x')\n"
        "    if os.path.getsize(task['path']) <= task['failures']: os._exit(1)\n"
        "    return 1.0\n"
    )

    async def main() -> tuple[Verdict, Verdict, dict[str, int]]:
        pool = RewardPool(f"{tmp_path}/flaky.py:verify", RewardSection(retries=2))
        await pool.open()
        mended = await pool.verify({"path": str(tmp_path / "mended"), "failures": 2}, "")
        broken = await pool.verify({"path": str(tmp_path / "broken"), "failures": 9}, "")
        await pool.close()
        return mended, broken, await pool.stats()

    mended, broken, stats = asyncio.run(main())
    assert (mended.score, mended.error) == (1.0, "")
    assert broken.error and (tmp_path / "broken").read_text() == "xxx"
    assert (stats["num_verified"], stats["num_failed"], stats["num_errors_died"]) == (1, 1, 5)


def test_a_slow_call_does_not_block_the_others(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> bool:
        slow = asyncio.ensure_future(pool.verify({"sleep": 600}, ""))
        for _ in range(20):
            assert (await pool.verify({"sleep": 0}, "")).error == ""
        still_running = not slow.done()
        slow.cancel()
        return still_running

    still_running, _ = run(tmp_path, "sleep", talk, workers=2, deadline_s=600)
    assert still_running


def test_the_deadline_runs_from_the_start_of_execution_and_not_in_the_queue(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> list[Verdict]:
        return await asyncio.gather(*(pool.verify({"sleep": 0.4}, "") for _ in range(4)))

    verdicts, stats = run(tmp_path, "sleep", talk, deadline_s=1.2)  # the last one waits as long as the deadline
    assert [verdict.error for verdict in verdicts] == [""] * 4
    assert all(0.4 <= verdict.seconds < 1.2 for verdict in verdicts)
    assert stats["num_killed"] == 0


def test_a_busy_event_loop_leaves_the_deadline_to_the_clock_of_the_child(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> list[Verdict]:
        verdicts = []
        for sleep in (0.05, 0.6):
            path = tmp_path / f"started {sleep}"
            call = asyncio.ensure_future(pool.verify({"sleep": sleep, "path": str(path)}, ""))
            while not path.exists():
                await asyncio.sleep(0.01)
            time.sleep(1.0)  # the event loop stands still until deadline and answer have both passed
            verdicts.append(await call)
        return verdicts

    (in_time, late), stats = run(tmp_path, "sleep", talk, deadline_s=0.4)
    assert (in_time.score, in_time.error) == (0.05, "")
    assert "longer than reward.deadline_s = 0.4" in late.error and late.seconds >= 0.6
    assert errors_of(stats) == {"deadline": 1} and stats["num_killed"] == 0


def test_a_cancelled_call_frees_its_place_and_hurts_nobody(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> list[float]:
        calls = [asyncio.ensure_future(pool.verify({"sleep": 600 if n % 3 == 0 else 0}, "")) for n in range(9)]
        await asyncio.sleep(0.05)
        for call in calls[::3]:
            call.cancel()
        rest = await asyncio.gather(*(call for n, call in enumerate(calls) if n % 3))
        assert all(call.cancelled() for call in calls[::3])
        return [verdict.score for verdict in rest]

    scores, stats = run(tmp_path, "sleep", talk, deadline_s=600)
    assert scores == [0.0] * 6
    assert stats["num_verified"] == 6 and stats["num_errors"] == 0


def test_a_child_that_dies_while_idle_costs_no_call_an_error(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> tuple[float, Verdict]:
        first = (await pool.verify({}, "")).score
        os.kill(int(first), signal.SIGKILL)
        wait_until_gone([int(first)])
        await asyncio.sleep(0.05)
        return first, await pool.verify({}, "")

    (first, second), stats = run(tmp_path, "pid", talk)
    assert second.error == "" and second.score != first
    assert stats["num_errors"] == 0


def test_a_row_that_cannot_be_sent_is_an_error_verdict(tmp_path: Path) -> None:
    verdict, stats = run(tmp_path, "echo", lambda pool: pool.verify({"score": 1j}, ""), retries=3)
    assert "the row cannot be sent to its verifier" in verdict.error
    assert errors_of(stats) == {"request": 1}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import no_such_thing\n", "No module named 'no_such_thing'"),
        ("verify = 3\n", "a verifier is a function (task, text) -> score, not a int"),
        ("import os\nos._exit(7)\n", "its process ended with exit code 7"),
    ],
)
def test_a_verifier_that_cannot_start_is_a_config_error_that_names_it(
    tmp_path: Path, source: str, sentence: str
) -> None:
    (tmp_path / "broken.py").write_text(source)

    async def main() -> None:
        pool = RewardPool(f"{tmp_path}/broken.py:verify", RewardSection())
        with pytest.raises(ConfigError) as caught:
            await pool.open()
        assert f"verifier {tmp_path}/broken.py:verify: " in str(caught.value) and sentence in str(caught.value)
        with pytest.raises(WorkerDied):
            await pool.verify({}, "")

    asyncio.run(main())


def test_a_verifier_that_hangs_at_import_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(reward_pool, "START_DEADLINE_S", 0.5)
    with pytest.raises(ConfigError, match=r"did not start within 0\.5 s and was killed"):
        asyncio.run(RewardPool(f"{tmp_path}/slow.py:verify", RewardSection()).open())


def test_children_that_stop_starting_give_error_verdicts_and_no_hang(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> list[Verdict]:
        await pool.verify({"action": "break"}, "")
        return await asyncio.gather(*(pool.verify({"action": "nothing"}, "") for _ in range(3)))

    verdicts, stats = run(tmp_path, "act", talk)
    assert all("RuntimeError at verifiers.py:1: gone bad" in verdict.error for verdict in verdicts)
    assert errors_of(stats) == {"died": 1, "start": 3}


def test_a_verifier_whose_pool_has_gone_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "last.py").write_text("def verify(task, text): return 1.0\n")
    ours, theirs = socket.socketpair()
    arguments = [str(theirs.fileno()), str(os.getpid()), str(4 << 30), f"{tmp_path}/last.py:verify", *sys.path]
    command = [sys.executable, "-c", _BOOT, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        request = codec.encode(["", {}, b""])
        ours.sendall(HEADER.pack(len(request)) + request)
        while SCORED.encode() not in ours.recv(1 << 12, socket.MSG_PEEK):
            time.sleep(0.01)
        ours.close()  # with an answer unread, which resets the connection
        assert child.stderr is not None and child.stderr.read() == b""
        assert child.wait() == 0


def test_closing_the_pool_fails_the_calls_that_wait(tmp_path: Path) -> None:
    async def talk(pool: RewardPool) -> list[Any]:
        calls = [asyncio.ensure_future(pool.verify({"sleep": 600}, "")) for _ in range(50)]
        await asyncio.sleep(0.05)
        await pool.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    results, stats = run(tmp_path, "sleep", talk, workers=2, deadline_s=600)
    assert len(results) == 50 and all(isinstance(result, WorkerDied) for result in results)
    assert stats["num_errors"] == 0


def test_23_a_stopped_idle_verifier_is_replaced_within_health_s(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text("def verify(task, text):\n    return task['score']\n")

    async def talk() -> Verdict:
        pool = RewardPool(f"{tmp_path}/echo.py:verify", RewardSection(), health_s=0.5)
        await pool.open()
        try:
            for child in psutil.Process().children(recursive=True):
                child.suspend()
            return await asyncio.wait_for(pool.verify({"score": 2.0}, ""), 30)
        finally:
            await pool.close()

    assert asyncio.run(talk()).score == 2.0


def test_23_a_verifier_that_takes_too_much_memory_fails_by_itself(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("def verify(task, text):\n    return float(len(bytearray(task['bytes'])) > 0)\n")

    async def talk() -> list[Verdict]:
        pool = RewardPool(f"{tmp_path}/large.py:verify", RewardSection(memory_gb=0.5, retries=0))
        await pool.open()
        try:
            return [await pool.verify({"bytes": num_bytes}, "") for num_bytes in (1 << 32, 1 << 20)]
        finally:
            await pool.close()

    too_much, little = asyncio.run(asyncio.wait_for(talk(), 60))
    assert "raised MemoryError at large.py:2" in too_much.error and (little.score, little.error) == (1.0, "")


def test_when_the_pool_is_killed_its_children_and_theirs_end(tmp_path: Path) -> None:
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    pids = tmp_path / "pids"
    program = (
        "import asyncio\n"
        "from headway.config import RewardSection\n"
        "from headway.rollout.reward_pool import RewardPool\n"
        "async def main():\n"
        f"    pool = RewardPool({str(tmp_path / 'verifiers.py:act')!r}, RewardSection(workers=2, deadline_s=600))\n"
        "    await pool.open()\n"
        f"    hang = pool.verify({{'action': 'hang_with_family', 'pids': {str(pids)!r}}}, '')\n"
        "    await asyncio.gather(hang, pool.verify({'action': 'hang_deaf'}, ''))\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as pool:
        try:
            deadline = time.monotonic() + 15
            while not pids.exists() or len(read_pids(pids)) < 2:
                assert time.monotonic() < deadline and pool.poll() is None
                time.sleep(0.02)
            family = [child.pid for child in psutil.Process(pool.pid).children(recursive=True)]
        finally:
            pool.kill()
    assert len(family) == 6, "two guardians, two workers, two that one of them started"
    wait_until_gone(family)


def test_children_import_no_torch(tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(
        "import sys\nHEAVY = {'torch', 'transformers', 'pydantic', 'asyncio'}\n"
        "def verify(task, text): return len(HEAVY & set(sys.modules))\n"
    )

    async def main() -> Verdict:
        pool = RewardPool(f"{tmp_path}/light.py:verify", RewardSection())
        await pool.open()
        verdict = await pool.verify({}, "")
        await pool.close()
        return verdict

    assert asyncio.run(main()).score == 0.0
