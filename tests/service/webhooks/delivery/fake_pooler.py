"""A fake connection pooler that accepts LISTEN but forwards no notifications, as poolers do in transaction mode."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import sqlalchemy as sa

NOTIFICATION = b"A"


@contextmanager
def run_fake_pooler(url: sa.URL) -> Iterator[sa.URL]:
    """Yield a URL of the same database behind a pooler that forwards all messages but notifications."""
    socket_folder = url.query["host"]
    assert isinstance(socket_folder, str)
    sockets: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                server = socket.socket(socket.AF_UNIX)
                server.connect(f"{socket_folder}/.s.PGSQL.5432")
                sockets.extend((client, server))
                threading.Thread(target=_forward_bytes, args=(client, server), daemon=True).start()
                threading.Thread(target=_forward_messages, args=(server, client), daemon=True).start()

        accepting = threading.Thread(target=serve, daemon=True)
        accepting.start()
        host, port = listening.getsockname()
        try:
            yield url.set(host=host, port=port, username="postgres", query={"sslmode": "disable"})
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # a client that connects again would open sockets that nobody closes
            accepting.join()
            for end in sockets:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def _forward_bytes(client: socket.socket, server: socket.socket) -> None:
    with suppress(OSError):
        while data := client.recv(65536):
            server.sendall(data)
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)


def _forward_messages(server: socket.socket, client: socket.socket) -> None:
    with suppress(OSError, EOFError), server.makefile("rb") as reading:
        while header := reading.read(5):
            (length,) = struct.unpack("!I", header[1:])
            payload = reading.read(length - 4)
            if header[:1] != NOTIFICATION:
                client.sendall(header + payload)
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
