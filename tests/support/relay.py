"""A relay between a client and a server that does to a connection what networks do: cut, stall, corrupt."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

DEADLINE_S = 30.0
_CHUNK_BYTES = 4096


class Relay:
    """Passes on what either side sends; `on_chunk(connection, first_byte, chunk)` sees what the server sends and
    returns what is passed on in its place, or None to cut the connection there."""

    def __init__(self, server: str, on_chunk: Callable[[int, int, bytes], bytes | None]) -> None:
        host, _, port = server.rpartition(":")
        self._server, self._on_chunk = (host, int(port)), on_chunk
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.location = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self.num_bytes = 0
        self.from_client = bytearray()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for open_socket in (self._listener, *self._open):
            _cut(open_socket)
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        for open_socket in (self._listener, *self._open):
            open_socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                number, self.num_connections = self.num_connections, self.num_connections + 1
                for target, *arguments in ((self._ask, client, server), (self._answer, server, client, number)):
                    thread = threading.Thread(target=target, args=arguments, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while chunk := client.recv(_CHUNK_BYTES):
                self.from_client += chunk
                server.sendall(chunk)
        _cut(client, server)

    def _answer(self, server: socket.socket, client: socket.socket, number: int) -> None:
        first = 0
        with suppress(OSError):
            while chunk := server.recv(_CHUNK_BYTES):
                passed_on = self._on_chunk(number, first, chunk)
                if passed_on is None:
                    break
                client.sendall(passed_on)
                first += len(chunk)
                self.num_bytes += len(chunk)
        _cut(client, server)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
