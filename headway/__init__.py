"""Headway: asynchronous reinforcement learning for language models that reason."""

__version__ = "0.1.0"
