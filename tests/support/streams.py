"""What tests of weights in transfer share."""

import dataclasses
import time

import pytest
import torch
from relay import Relay
from torch import Tensor

from headway.errors import WeightsUnreachable
from headway.types import WeightUpdate
from headway.weights.receive import open_update

DEADLINE_S = 30.0


def large(value: float = 1.0, num_bytes: int = 200_000) -> dict[str, Tensor]:
    matrix = value + torch.arange(num_bytes // 4, dtype=torch.float32)
    return {"matrix": matrix.view(-1, 10), "norm": torch.arange(7.0), "empty": torch.zeros(0), "number": torch.ones(())}


def by_way_of(update: WeightUpdate, relay: Relay) -> WeightUpdate:
    return dataclasses.replace(update, location=relay.location)


def unreachable(update: WeightUpdate) -> str:
    """Why nothing can be fetched, within a bounded time and in one sentence."""
    started = time.monotonic()
    with pytest.raises(WeightsUnreachable) as error:
        open_update(update)
    assert time.monotonic() - started < DEADLINE_S
    said = str(error.value)
    assert "\n" not in said and said.startswith(f"version {update.version} cannot be fetched: ")
    return said.partition(": ")[2]


def pass_on(number: int, first: int, chunk: bytes) -> bytes:
    return chunk
