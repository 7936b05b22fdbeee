"""Weights over real connections: what a network or a stranger can do to them, and what the receiver then says.

Invariant 11: verified weight sync at every load. Invariant 15: bounded waits.
"""

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
from relay import Relay
from streams import DEADLINE_S, by_way_of, large, pass_on, unreachable
from test_weights import equal, is_untouched, mismatch, numbered, overwrite, receiver

from headway.weights import stream
from headway.weights.publish import Publisher
from headway.weights.receive import open_update
from headway.weights.shadow import ShadowWeights

PATIENCE_S = 0.3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "ANSWER_S", PATIENCE_S)


# Strangers


def handshake(location: str, proof: Callable[[bytes], bytes]) -> tuple[bytes, bytes]:
    """What a client is answered that sends `proof(challenge)`, and what comes after that."""
    host, _, port = location.rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as server:
        greeting = server.recv(48, socket.MSG_WAITALL)
        server.sendall(proof(greeting[16:]))
        answer = server.recv(32, socket.MSG_WAITALL)
        return answer, server.recv(1000)


def test_nothing_is_sent_to_a_client_that_does_not_prove_the_token(publisher: Publisher) -> None:
    update = publisher.publish(0, large())
    assert handshake(update.location, lambda challenge: bytes(64)) == (bytes(32), b"")
    theirs = os.urandom(32)
    guess = stream._proof(b"x" * 32, b"engine", theirs)
    assert handshake(update.location, lambda challenge: theirs + guess) == (bytes(32), b"")
    request = stream._REQUEST.pack(0, 0, 1000)
    assert handshake(update.location, lambda challenge: (request * 3)[:64]) == (bytes(32), b"")
    said = unreachable(dataclasses.replace(update, token=b"y" * 32))
    assert said == f"{update.location} refused this process's token"
    assert unreachable(dataclasses.replace(update, token=b"")) == said


def test_an_answer_overheard_cannot_be_given_again(publisher: Publisher) -> None:
    update = publisher.publish(0, large())
    with Relay(update.location, pass_on) as relay:
        open_update(by_way_of(update, relay))
    overheard = bytes(relay.from_client[:64])
    assert handshake(update.location, lambda challenge: overheard) == (bytes(32), b"")


def test_the_token_never_travels_and_does_not_show(publisher: Publisher) -> None:
    update = publisher.publish(0, large())
    with Relay(update.location, pass_on) as relay:
        open_update(by_way_of(update, relay))
    assert len(update.token) == 32 and update.token not in relay.from_client
    assert repr(update.token) not in repr(update) and "token" not in repr(update)


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"headway-weights1" + bytes(64), "does not know the run's token"),
        (b"HTTP/1.1 400 Bad Request" + bytes(64), "serves no weights"),
    ],
)
@pytest.mark.usefixtures("quick_retries")
def test_a_stranger_who_listens_is_recognised(publisher: Publisher, greeting: bytes, said: str) -> None:
    update = publisher.publish(0, large())
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(greeting[:48])
                client.recv(64)
                client.sendall(b"\x01" * 32)

        thread = threading.Thread(target=answer)
        thread.start()
        location = f"127.0.0.1:{listener.getsockname()[1]}"
        found = unreachable(dataclasses.replace(update, location=location))
        thread.join()
    assert found == f"the program that listens at {location} {said}"


@pytest.mark.parametrize("wanted", [(0, 0, 2**27), (0, 2**63, 10), (0, 190_000, 20_000), (2**64 - 1, 0, 10)])
def test_a_request_beyond_the_buffer_is_not_answered_and_harms_nobody(
    publisher: Publisher, wanted: tuple[int, int, int]
) -> None:
    update = publisher.publish(0, {"matrix": large()["matrix"]})
    with stream._connect(update.location, update.token) as server:
        server.sendall(stream._REQUEST.pack(*wanted))
        answer = server.recv(1000)
    assert answer in (b"", stream._ANSWER.pack(False, 0))
    assert equal(open_update(update), {"matrix": large()["matrix"]})


# Networks


@pytest.mark.usefixtures("small_buckets", "quick_retries")
def test_a_torn_connection_goes_on_where_it_broke(publisher: Publisher) -> None:
    tensors = large()
    update = publisher.publish(0, tensors)

    def cut_twice(number: int, first: int, chunk: bytes) -> bytes | None:
        return chunk if number >= 2 or first < 80_000 else None

    with Relay(update.location, cut_twice) as relay:
        assert equal(open_update(by_way_of(update, relay)), tensors)
    assert relay.num_connections == 3
    assert relay.num_bytes < 1.4 * update.num_bytes, "what had arrived was sent again"


@pytest.mark.usefixtures("small_buckets", "quick_retries")
def test_a_connection_that_keeps_breaking_is_given_up_and_named(publisher: Publisher) -> None:
    update = publisher.publish(5, large())

    def cut(number: int, first: int, chunk: bytes) -> bytes | None:
        return chunk if first < 10_000 else None

    with Relay(update.location, cut) as relay:
        said = unreachable(by_way_of(update, relay))
    assert said.startswith(f"{relay.location} could not be read in 4 connections (")
    assert relay.num_connections == 4


@pytest.mark.usefixtures("small_buckets", "impatient")
def test_invariant_15_a_silent_server_is_named_after_its_deadline(publisher: Publisher) -> None:
    update, heard = publisher.publish(0, large()), threading.Event()

    def stall(number: int, first: int, chunk: bytes) -> bytes:
        if first > 50_000:
            heard.wait(DEADLINE_S)
        return chunk

    with Relay(update.location, stall) as relay:
        assert unreachable(by_way_of(update, relay)) == f"{relay.location} sent no answer within {PATIENCE_S:g} s"
        heard.set()


def test_a_receiver_that_reads_nothing_is_dropped_and_holds_up_nobody(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"matrix": torch.zeros(2**25, dtype=torch.uint8)}
    update = publisher.publish(0, tensors)
    asks_for_everything = stream._REQUEST.pack(0, 0, 2**25) * 10
    server = publisher._server
    assert server is not None
    with stream._connect(update.location, update.token) as patiently_served:
        patiently_served.sendall(asks_for_everything)
        assert equal(open_update(update), tensors)
        monkeypatch.setattr(stream, "ANSWER_S", 1.0)
        with stream._connect(update.location, update.token) as sleeper:
            sleeper.sendall(asks_for_everything)
            deadline = time.monotonic() + DEADLINE_S
            while len(server._clients) > 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.mark.usefixtures("small_buckets")
def test_invariant_11_a_byte_changed_on_its_way_stops_the_load_and_names_the_tensor(publisher: Publisher) -> None:
    live = {"matrix": torch.nn.Parameter(torch.full((5000, 10), -1.0))}
    update = publisher.publish(3, {"matrix": large()["matrix"]})

    def corrupt(number: int, first: int, chunk: bytes) -> bytes:
        place = 60_000 - first
        return chunk if not 0 <= place < len(chunk) else chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]

    with Relay(update.location, corrupt) as relay:
        said = mismatch(ShadowWeights(live), by_way_of(update, relay))
    assert said == "version 3: matrix arrived with another checksum than published"
    assert is_untouched(live)


def test_invariant_11_a_bit_flipped_where_it_was_published_stops_the_load() -> None:
    publisher, live = Publisher(["shared_memory", "stream"]), receiver()
    update = publisher.publish(3, numbered(1.0))
    overwrite(update, "norm")
    said = mismatch(ShadowWeights(live), dataclasses.replace(update, host="another machine"))
    assert said == "version 3: norm arrived with another checksum than published" and is_untouched(live)
    publisher.close()
