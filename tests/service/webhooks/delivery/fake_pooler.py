"""A pooler in front of PostgreSQL that takes LISTEN and never passes a notification on, as in transaction pooling."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import sqlalchemy as sa

NOTIFICATION = b"A"


@contextmanager
def fake_pooler(url: sa.URL) -> Iterator[sa.URL]:
    """The URL of the same database through the pooler; each message of the server's is passed on but notifications."""
    folder = url.query["host"]
    assert isinstance(folder, str)
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                server = socket.socket(socket.AF_UNIX)
                server.connect(f"{folder}/.s.PGSQL.5432")
                ends.extend((client, server))
                threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
                threading.Thread(target=_pass_messages_on, args=(server, client), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        host, port = listening.getsockname()
        try:
            yield url.set(host=host, port=port, username="postgres", query={"sslmode": "disable"})
        finally:
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def _pass_on(client: socket.socket, server: socket.socket) -> None:
    with suppress(OSError):
        while data := client.recv(65536):
            server.sendall(data)
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)


def _pass_messages_on(server: socket.socket, client: socket.socket) -> None:
    with suppress(OSError, EOFError), server.makefile("rb") as reading:
        while head := reading.read(5):
            (length,) = struct.unpack("!I", head[1:])
            rest = reading.read(length - 4)
            if head[:1] != NOTIFICATION:
                client.sendall(head + rest)
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
