"""A name in a config to the thing it names: `path/to/file.py:name`, relative to the working directory, or
`package.module:name`. What cannot be loaded is a sentence for the user, with its cause.
"""

import difflib
import hashlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.errors import ConfigError, describe


def load(reference: str) -> Any:
    """The object `reference` names; its file or module is imported once per process."""
    where, _, name = reference.rpartition(":")
    is_file = where.endswith(".py")
    if not name.isidentifier() or not (is_file or all(part.isidentifier() for part in where.split("."))):
        raise ConfigError(f"{reference!r} is not of the form path/to/file.py:name or package.module:name")
    module = _import_file(where, reference) if is_file else _import_module(where, reference)
    if name in vars(module):
        return vars(module)[name]
    nearest = difflib.get_close_matches(name, [known for known in vars(module) if not known.startswith("__")], n=1)
    raise ConfigError(f"{reference}: {where} has no {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))


def call(function: Callable[[], Any]) -> Any:
    """What a function of the user's returns; signal handlers that it installs are taken back."""
    if threading.current_thread() is not threading.main_thread():
        return function()
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return function()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _import_file(where: str, reference: str) -> ModuleType:
    path = Path(where).resolve()
    if not path.is_file():
        raise ConfigError(f"{reference}: file {where} does not exist in {Path.cwd()}")
    # The whole path is in the name: two files called reward.py in different folders are two modules.
    name = f"headway_file_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _make_findable(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{reference}: {where} does not import: {describe(error)}") from error
    return module


def _import_module(where: str, reference: str) -> ModuleType:
    _make_findable(Path.cwd())
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
            sentence = f"there is no module {error.name}; install it, or run where it can be found, not in {Path.cwd()}"
            raise ConfigError(f"{reference}: {sentence}") from error
        raise ConfigError(f"{reference}: {where} does not import: {describe(error)}") from error


def _make_findable(folder: Path) -> None:
    # Last, so that a user's random.py or types.py never takes the place of the one others import.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
