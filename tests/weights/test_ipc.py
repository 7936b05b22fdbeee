"""Mappings of a publisher's GPU buffers are released when another process publishes. The mapping itself needs a GPU."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.types import WeightUpdate
from headway.weights import ipc


def update_of(process: int, number: int, parts: tuple[WeightUpdate, ...] = ()) -> WeightUpdate:
    location = json.dumps({"process": process, "offset": 0, "storage": [number]})
    return WeightUpdate(number, "full", "cuda", location, (), parts=parts)


def test_a_restarted_trainers_update_releases_the_buffers_of_the_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: dict[str, weakref.ref[Tensor]] = {}

    def fake_map(location: str) -> Tensor:
        buffer = torch.zeros(8, dtype=torch.uint8)
        buffers[location] = weakref.ref(buffer)
        return buffer

    monkeypatch.setattr(ipc, "_map", fake_map)

    def receive(update: WeightUpdate) -> int:
        ipc.release_other_publishers(update)
        for part in update.parts or (update,):
            ipc.open_on_device(part)
        return sum(buffer() is not None for buffer in buffers.values())

    assert [receive(update_of(100, number)) for number in (1, 2, 1, 2)] == [1, 2, 2, 2], "two buffers by turns"
    assert receive(update_of(200, 3)) == 1, "the dead trainer's two are gone"
    ranks = update_of(201, 4), update_of(202, 4)
    assert receive(replace(ranks[0], parts=ranks)) == 2, "ranks publish one update together"
    ranks = update_of(201, 5), update_of(202, 5)
    assert receive(replace(ranks[0], parts=ranks)) == 4
    monkeypatch.setattr(ipc, "_mapped", {})
