"""The command line in this process, and what it refuses before anything starts."""

import os
import signal
import sys
from pathlib import Path

import pytest
from commands import Command, Refused, start_nothing

from headway import cli


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`headway ARGUMENTS` in this process: exit code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headway", *map(str, arguments)])
        code, umask = 0, os.umask(0)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os.umask(umask)
            for number, handler in handlers.items():  # a command that has ended ignores them, and so would later runs
                signal.signal(number, handler)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """The one line that `headway train ARGUMENTS` ends with; no worker was started and no run begun."""

    def run(*arguments: str | Path) -> str:
        with monkeypatch.context() as patch:
            start_nothing(patch)
            code, _, error = command("train", *arguments)
        assert code == 1
        assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n"), error
        return error.removeprefix("error: ").rstrip()

    return run
