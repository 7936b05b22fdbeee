"""A function of a script or notebook → a reference that every process of the run can load.

A function that lives in a file which can be imported is named by file and name. One of `__main__`, or of a notebook,
is written to a file of its own: its source, with the imports, constants, functions and classes that it uses. What
cannot be written so is one sentence that names it.
"""

import ast
import builtins
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, translated


def reference_of(function: Callable[..., Any] | type, folder: Path) -> str:
    """A reference for `tasks.imports`; sources are written to `folder`, under a name that changes with them."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ConfigError(f"{name or function!r} cannot be sent to a worker process; give it a name with `def`")
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if function.__module__ != "__main__" and path and getattr(module, name, None) is function:
        return f"{Path(path).resolve()}:{name}"
    if "<locals>" in function.__qualname__:
        raise ConfigError(f"{name} is defined inside a function; define it at the top of the script, notebook or file")
    text = _Source(function).text()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    file.write_text(text, encoding="utf-8")
    return f"{file.resolve()}:{name}"


class _Source:
    """Collects what a function needs, in the order in which it has to stand."""

    def __init__(self, function: Any) -> None:
        self._imports: dict[str, str] = {}
        self._constants: dict[str, str] = {}
        self._definitions: dict[str, str] = {}
        self._owner = function.__name__
        self._add_definition(function.__name__, function)

    def text(self) -> str:
        parts = [*self._imports.values(), *self._constants.values(), *self._definitions.values()]
        return "\n\n".join(["from __future__ import annotations", *parts]) + "\n"

    def _add_definition(self, name: str, value: Any) -> None:
        if name in self._definitions:
            return
        with translated(
            (OSError, TypeError),
            ConfigError,
            f"the source of {name} is not to be found, so it cannot be sent to a worker process; put it into a .py "
            "file and name it file.py:function",
        ):
            source = textwrap.dedent(inspect.getsource(value))
        self._definitions[name] = ""  # its place: what it needs may need it
        for used in sorted(_names(source)):
            self._add(used, vars(sys.modules[value.__module__]))
        del self._definitions[name]
        self._definitions[name] = source

    def _add(self, name: str, known: dict[str, Any]) -> None:
        if name not in known or hasattr(builtins, name):
            return  # its own, or a builtin; a name that does not exist is the function's own error when it runs
        value = known[name]
        if isinstance(value, types.ModuleType):
            self._imports[name] = f"import {value.__name__} as {name}"
        elif getattr(value, "__module__", None) == known["__name__"] and callable(value):
            self._add_definition(name, value)
        elif callable(value) and hasattr(value, "__name__") and getattr(value, "__module__", None):
            self._imports[name] = f"from {value.__module__} import {value.__name__} as {name}"
        else:
            self._add_constant(name, value)

    def _add_constant(self, name: str, value: Any) -> None:
        text = repr(value)
        same = False
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            same = bool(ast.literal_eval(text) == value)
        if not same:
            raise ConfigError(
                f"{self._owner} uses {name}, a {type(value).__name__}, which cannot be sent to a worker process; make "
                f"it inside the function, or put both into a .py file and name it file.py:{self._owner}"
            )
        self._constants[name] = f"{name} = {text}"


def _names(source: str) -> set[str]:
    """Every name that the source reads, in annotations and decorators too."""
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
