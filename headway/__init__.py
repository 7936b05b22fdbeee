"""Headway: asynchronous reinforcement learning for language models that reason.

`train`, `load_run` and `generate` are the Python API (`headway.api`); they are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.api import generate as generate
    from headway.api import load_run as load_run
    from headway.api import train as train

__version__ = "0.1.0"
__all__ = ["__version__", "generate", "load_run", "train"]


def __getattr__(name: str) -> Any:
    if name in ("generate", "load_run", "train"):
        from headway import api

        return getattr(api, name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
