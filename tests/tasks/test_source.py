"""Functions of scripts and notebooks reach other processes as they are, or are refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.tasks import imports
from headway.tasks.source import reference_of

SCRIPT = """
import math as maths
import re
from pathlib import Path
from headway.tasks.source import reference_of
from headway.tasks.verifiers import verifier

PATTERN, LIMIT = r"[0-9]+", {"low": 1, "high": [2.5, None]}
handle = open(__file__)

class Found:
    def __init__(self, text): self.text = text

def helper(text):
    return Found(text) if re.search(PATTERN, text) else again(text, 0)

def again(text, depth):
    return helper("1") if depth == 0 else None

@verifier(needs=("answer",))
def verify(task, text):
    return maths.floor(LIMIT["high"][0]) * float(helper(text).text == task["answer"])

def uses_a_file(task, text):
    return handle.read()

def outer():
    def inner(task, text): return 1.0
    return inner

if __name__ == "__main__":
    folder = Path("made")
    print(reference_of(verify, folder))
    for broken in (uses_a_file, outer(), lambda task, text: 1.0):
        try:
            print(reference_of(broken, folder))
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
"""


def test_a_function_of_the_main_script_is_sent_by_its_source_with_all_it_uses(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    reference, *refused = done.stdout.splitlines()
    verify = imports.load(reference)
    assert verify({"answer": "7"}, "7") == 2.0 and verify({"answer": "7"}, "8") == 0.0
    assert verify.needs == ("answer",)
    assert "ConfigError: uses_a_file uses handle, a TextIOWrapper, which cannot be sent" in refused[0]
    assert "ConfigError: inner is defined inside a function" in refused[1]
    assert "ConfigError" in refused[2] and "give it a name with `def`" in refused[2]


def test_a_function_of_a_file_is_named_by_file_and_name(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def verify(task, text):\n    return 1.0\n")
    verify = imports.load(f"{tmp_path}/task.py:verify")
    assert reference_of(verify, tmp_path / "made") == f"{tmp_path}/task.py:verify"
    assert not (tmp_path / "made").exists()


def test_a_function_without_source_is_refused_by_name(tmp_path: Path) -> None:
    space: dict[str, object] = {"__name__": "__main__"}
    exec("def typed(task, text): return 1.0", space)
    with pytest.raises(ConfigError, match="the source of typed is not to be found"):
        reference_of(space["typed"], tmp_path)  # type: ignore[arg-type]
