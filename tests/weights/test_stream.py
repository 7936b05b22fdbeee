"""Weights over real connections: that they arrive, and what is said when their publisher moves on or ends.

Invariant 11: verified weight sync at every load. Invariant 13: non-blocking generation. Invariant 15: nothing
hangs.
"""

import asyncio
import dataclasses
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from driving import complete, make_request, plain_model, prompt
from relay import Relay
from serving import opened, run
from streams import DEADLINE_S, by_way_of, large, pass_on, unreachable
from test_weights import equal, numbered, receiver

from headway import codec
from headway.engine.embedded import live_weights
from headway.errors import ConfigError, DeadlineExceeded, InvariantBroken, WeightsUnreachable
from headway.model.loading import named_weights
from headway.types import TensorInfo, WeightPlace, WeightUpdate
from headway.weights import stream
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.publish import Publisher
from headway.weights.receive import open_update, receive
from headway.weights.shadow import ShadowWeights

# Arriving


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_buckets")
def test_an_update_arrives_as_it_was_published(publisher: Publisher, dtype: torch.dtype) -> None:
    for version, tensors in enumerate((numbered(2.5, dtype), large(), numbered(3.5, dtype))):
        update = publisher.publish(version, tensors)
        assert (update.transport, update.host, update.elsewhere) == ("stream", "", ())
        arrived = open_update(update)
        assert equal(arrived, tensors) and fingerprints(arrived) == update.fingerprints


@pytest.mark.usefixtures("small_buckets")
def test_bytes_land_in_the_memory_that_is_swapped_in_and_each_travels_once(publisher: Publisher) -> None:
    live, update = receiver(tied=True), publisher.publish(0, numbered(1.0))
    shadow = ShadowWeights(live)
    shadow.stage(update)
    before = shadow.staged(live["norm"]).data_ptr()
    with Relay(update.location, pass_on) as relay:
        shadow.stage(by_way_of(update, relay))
    tensors = {id(tensor): tensor for tensor in numbered(1.0).values()}
    assert relay.num_bytes < sum(t.numel() * t.element_size() for t in tensors.values()) + 200
    assert shadow.swap() == update.fingerprints
    assert live["norm"].data_ptr() == before and equal(live, numbered(1.0))


def test_a_tensor_whose_memory_is_in_another_order_is_filled_as_it_reads(publisher: Publisher) -> None:
    tensors = {"turned": torch.arange(6.0).view(2, 3)}
    into = {"turned": torch.empty(3, 2).T}
    receive(publisher.publish(0, tensors), into)
    assert equal(into, tensors)


@pytest.mark.usefixtures("small_buckets")
def test_many_receivers_at_once_each_get_everything(publisher: Publisher) -> None:
    update = publisher.publish(0, large())
    with ThreadPoolExecutor(12) as pool:
        assert all(equal(arrived, large()) for arrived in pool.map(open_update, [update] * 24))


FETCH = """
import sys
from headway import codec, types
from headway.weights import stream
update = codec.decode(sys.stdin.buffer.read())
memory = bytearray(update.tensors[0].num_bytes)
spans = [(update.tensors[0], start, 1000) for start in range(0, len(memory), 1000)]
pieces = (memoryview(memory)[start : start + 1000] for _, start, _ in spans)
stream.fetch(update, update.places[0], spans, pieces)
sys.stdout.buffer.write(memory)
"""


def test_another_process_receives_the_same_bytes(publisher: Publisher) -> None:
    """It needs no torch: what it imports is the stream alone."""
    update = publisher.publish(0, large())
    done = subprocess.run(
        [sys.executable, "-c", FETCH], input=codec.encode(update), check=True, timeout=DEADLINE_S, capture_output=True
    )
    assert done.stdout == large()["matrix"].numpy().tobytes()


@pytest.mark.usefixtures("quick_retries")
def test_a_receiver_on_the_publishers_machine_takes_the_memory_itself() -> None:
    publisher = Publisher(["shared_memory", "stream"])
    update = publisher.publish(0, large())
    assert [place.transport for place in update.places] == ["shared_memory", "stream"]
    with Relay(update.elsewhere[0].location, pass_on) as relay:
        here = dataclasses.replace(update, elsewhere=(WeightPlace("stream", relay.location),))
        assert equal(open_update(here), large()) and relay.num_connections == 0
        elsewhere = dataclasses.replace(here, host="another machine")
        assert equal(open_update(elsewhere), large()) and relay.num_connections == 1
        into = {name: torch.empty_like(tensor) for name, tensor in large().items()}
        receive(elsewhere, into)
        assert equal(into, large()) and relay.num_connections == 2
    publisher.close()
    elsewhere = dataclasses.replace(update, host="another machine")
    said = unreachable(elsewhere)
    assert said.startswith("its memory is on another machine; ") and said.endswith("(Connection refused)")


# A publisher that moves on, or ends


def test_a_version_that_was_written_over_is_named_with_the_newest(publisher: Publisher) -> None:
    updates = [publisher.publish(version, large(float(version))) for version in range(3)]
    assert unreachable(updates[0]) == "its publisher has overwritten it with version 2"
    assert equal(open_update(updates[1]), large(1.0)) and equal(open_update(updates[2]), large(2.0))


@pytest.mark.parametrize("bucket", [1, 100, 199])
@pytest.mark.usefixtures("small_buckets")
def test_invariant_11_a_version_written_over_while_it_is_read_is_never_taken_for_whole(
    publisher: Publisher, bucket: int
) -> None:
    """At its beginning, in its middle, and after its last byte has arrived, when only the last question can tell."""
    info, update = one_tensor(publisher.publish(0, {"matrix": large()["matrix"]}))
    memory = bytearray(info.num_bytes)
    spans = [(info, start, 1000) for start in range(0, info.num_bytes, 1000)]

    def pieces() -> Iterator[memoryview]:
        for number, (_, start, _) in enumerate(spans):
            yield memoryview(memory)[start : start + 1000]
            if number == bucket:
                for version in (1, 2):
                    publisher.publish(version, {"matrix": large(-1.0)["matrix"]})

    with pytest.raises(WeightsUnreachable, match="its publisher has overwritten it with version 2"):
        stream.fetch(update, update.places[0], spans, pieces())


def one_tensor(update: WeightUpdate) -> tuple[TensorInfo, WeightUpdate]:
    (info,) = update.tensors
    return info, update


@pytest.mark.usefixtures("small_buckets")
def test_invariant_11_readers_of_a_hasty_publisher_get_one_version_or_a_sentence(publisher: Publisher) -> None:
    """Every attempt ends in exactly the published weights, or in an error; never in a mix of two versions."""
    stop, outcomes = threading.Event(), list[str]()
    newest = [publisher.publish(0, large(0.0))]

    def read() -> None:
        live = {name: torch.nn.Parameter(tensor) for name, tensor in large(-1.0).items()}
        shadow = ShadowWeights(live)
        while not stop.is_set():
            update = newest[0]
            try:
                shadow.stage(update)
            except WeightsUnreachable:
                outcomes.append("moved on")
                continue
            shadow.swap()
            assert equal(live, large(float(update.version)))
            outcomes.append("whole")

    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read) for _ in range(3)]
        for version in range(1, 150):
            newest[0] = publisher.publish(version, large(float(version)))
        deadline = time.monotonic() + DEADLINE_S
        while "whole" not in outcomes:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        stop.set()
        for future in reading:
            future.result()


@pytest.mark.usefixtures("quick_retries")
def test_a_publisher_that_closed_refuses_everybody(publisher: Publisher) -> None:
    update = publisher.publish(0, large())
    with stream._connect(update.location, update.token) as server:
        publisher.close()
        assert server.recv(10) == b""
    said = unreachable(update)
    assert said == f"{update.location} could not be read in 4 connections (Connection refused)"
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]


SERVE = """
import sys
from headway.weights.stream import WeightServer
class Source:
    version = 7
    def memory_of(self, version):
        return memoryview(bytes(range(250)) * 4000) if version == 7 else None
server = WeightServer("127.0.0.1", Source())
sys.stdout.buffer.write(server.token + server.location.encode() + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_invariant_15_a_server_process_that_dies_or_hangs_in_mid_transfer_is_named(
    end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "ANSWER_S", 2.0)
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    token, location = process.stdout.read(32), process.stdout.readline().decode().strip()
    info = TensorInfo("matrix", "uint8", (1_000_000,), 0, 1_000_000, "")
    update = WeightUpdate(7, "full", "stream", location, (info,), token=token)
    memory = bytearray(info.num_bytes)
    spans = [(info, start, 10_000) for start in range(0, info.num_bytes, 10_000)]

    def pieces(hit: int) -> Iterator[memoryview]:
        for number, (_, start, _) in enumerate(spans):
            if number == hit:
                process.send_signal(end)
            yield memoryview(memory)[start : start + 10_000]

    try:
        stream.fetch(update, update.places[0], spans, pieces(hit=-1))
        assert memory == bytes(range(250)) * 4000
        with pytest.raises(WeightsUnreachable) as error:
            stream.fetch(update, update.places[0], spans, pieces(hit=20))
        expected = "sent no answer within 2 s" if end == signal.SIGSTOP else "could not be read in 4 connections"
        assert str(error.value).startswith(f"{location} {expected}")
    finally:
        process.kill()
        process.communicate()


# Where it listens


def test_the_server_listens_on_loopback_unless_told_otherwise(publisher: Publisher) -> None:
    assert publisher.publish(0, large()).location.startswith("127.0.0.1:")
    everywhere = Publisher(["stream"], "0.0.0.0")
    update = everywhere.publish(0, large())
    assert update.location.rpartition(":")[0] == stream.own_address()
    assert equal(open_update(update), large())
    everywhere.close()


def test_an_address_of_another_machine_is_a_sentence_at_the_start() -> None:
    with pytest.raises(ConfigError) as error:
        Publisher(["stream"], "192.0.2.7")
    assert str(error.value) == (
        "weights.address = 192.0.2.7 cannot be listened on (Cannot assign requested address); name an address of the "
        "trainer's machine, or 0.0.0.0 for all of them"
    )


def test_loopback_is_known_by_all_its_names() -> None:
    assert all(map(stream.is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(stream.is_loopback, ("0.0.0.0", "10.0.0.1", "trainer.local")))


# An engine that fetches


def test_invariant_13_generation_goes_on_while_weights_are_in_transfer(tiny_model: str) -> None:
    """Non-blocking generation: whole completions are written while the first byte of the weights has not come."""
    in_transfer, go_on = threading.Event(), threading.Event()

    def hold(number: int, first: int, chunk: bytes) -> bytes:
        if first > 80:
            in_transfer.set()
            go_on.wait(DEADLINE_S)
        return chunk

    async def scenario(update: WeightUpdate) -> None:
        async with opened(tiny_model) as engine:
            staging = asyncio.create_task(engine.stage_weights(update))
            while not in_transfer.is_set():
                await asyncio.sleep(0.001)
            _, completion = await complete(engine, make_request(prompt(10), max_tokens=60))
            assert set(completion.versions.tolist()) == {0} and not staging.done()
            with pytest.raises(InvariantBroken):
                await engine.swap(1, "recompute")
            go_on.set()
            await staging
            assert (await engine.swap(1, "recompute")).fingerprints == update.fingerprints
            _, completion = await complete(engine, make_request(prompt(10), group=1, max_tokens=20))
            assert set(completion.versions.tolist()) == {1}

    publisher = Publisher(["stream"])
    update = publisher.publish(1, named_weights(plain_model(tiny_model, noise_seed=1)))
    with Relay(update.location, hold) as relay:
        run(scenario(by_way_of(update, relay)))
    publisher.close()


def test_a_transfer_whose_caller_gave_up_never_writes_into_the_next(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_transfer, go_on = threading.Event(), threading.Event()

    def hold_the_first(number: int, first: int, chunk: bytes) -> bytes:
        if number == 0 and first > 80:
            in_transfer.set()
            go_on.wait(DEADLINE_S)
        return chunk

    async def scenario(first: WeightUpdate, second: WeightUpdate) -> None:
        async with opened(tiny_model) as engine:
            given_up = asyncio.create_task(engine.stage_weights(first))
            while not in_transfer.is_set():
                await asyncio.sleep(0.001)
            given_up.cancel()
            with pytest.raises(DeadlineExceeded) as error:
                await engine.stage_weights(second)
            assert str(error.value) == "version 2 waited 0.1 s for the transfer of an earlier one to end"
            monkeypatch.setattr(live_weights, "_STAGING_S", DEADLINE_S)
            waiting = asyncio.create_task(engine.stage_weights(second))
            await asyncio.sleep(0.01)
            go_on.set()
            await waiting
            assert (await engine.swap(2, "keep")).fingerprints == second.fingerprints

    monkeypatch.setattr(live_weights, "_STAGING_S", 0.1)
    publisher = Publisher(["stream"])
    models = [plain_model(tiny_model, noise_seed=seed) for seed in (1, 2)]
    with Relay(publisher.publish(0, large()).location, hold_the_first) as relay:
        first, second = (
            by_way_of(publisher.publish(version, named_weights(model)), relay)
            for version, model in enumerate(models, start=1)
        )
        assert digest(first.fingerprints) != digest(second.fingerprints)
        run(scenario(first, second))
    publisher.close()
