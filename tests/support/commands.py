"""What tests of the command line share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.runtime.inline import InlineRuntime
from headway.runtime.local import LocalRuntime

Command = Callable[..., tuple[int, str, str]]
"""`headway ARGUMENTS`: exit code, standard output, standard error."""
Refused = Callable[..., str]
"""The sentence that `headway train ARGUMENTS` ends with."""


def start_nothing(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a worker would have been started")

    patch.setattr(InlineRuntime, "start", refuse)
    patch.setattr(LocalRuntime, "start", refuse)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)
