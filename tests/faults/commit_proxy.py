"""A proxy in front of PostgreSQL that can close a connection right after a commit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa

COMMIT_MESSAGES = (b"COMMIT\x00", b"COMMIT;\x00")
OBSERVATIONS = b"\x00\x00\x00\x05proxy"
"""A metric's name in a statement that inserts observations, which may be a transaction by itself."""
IDLE, IN_TRANSACTION = b"Z\x00\x00\x00\x05I", b"Z\x00\x00\x00\x05T"
"""ReadyForQuery, which ends an answer: outside a transaction, or inside one."""


class CommitProxy:
    """A TCP proxy in front of a PostgreSQL that listens on a Unix socket.

    When armed, it forwards the next commit of observations (a COMMIT after a statement that inserts some, or such a
    statement by itself), waits for PostgreSQL's answer, does not forward it, calls `action` and closes the connection.
    What the service commits in the background passes. `cut_count` counts the connections closed.
    """

    def __init__(self, listener: socket.socket, server: Path) -> None:
        self._listener, self._server = listener, server
        self._lock = threading.Lock()
        self._action: Callable[[], None] | None = None
        self._sockets: list[socket.socket] = []
        self.cut_count = 0

    def arm(self, action: Callable[[], None] = lambda: None) -> None:
        """Close the next connection that commits observations, after calling `action`."""
        with self._lock:
            self._action = action

    def accept(self) -> None:
        """Forward connections until the listening socket is closed."""
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            server_socket = socket.socket(socket.AF_UNIX)
            with self._lock:
                self._sockets += [client, server_socket]
            try:
                server_socket.connect(str(self._server))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._forward_requests, args=(client, server_socket), daemon=True).start()

    def close(self) -> None:
        """Close all connections."""
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _forward_requests(self, client: socket.socket, server_socket: socket.socket) -> None:
        commit = threading.Event()
        answers = threading.Thread(target=self._forward_answers, args=(server_socket, client, commit), daemon=True)
        answers.start()
        inserts = False
        with suppress(OSError):
            while data := client.recv(65536):
                inserts = inserts or OBSERVATIONS in data
                commits = data.endswith(COMMIT_MESSAGES)
                if inserts and (commits or OBSERVATIONS in data) and self._is_armed():
                    commit.set()
                if commits:
                    inserts = False
                server_socket.sendall(data)
        _shut_down(client, server_socket)

    def _forward_answers(self, server_socket: socket.socket, client: socket.socket, commit: threading.Event) -> None:
        with suppress(OSError):
            while data := server_socket.recv(65536):
                if data.endswith(IN_TRANSACTION):
                    commit.clear()
                if commit.is_set() and data.endswith(IDLE):
                    with self._lock:
                        action, self._action = self._action, None
                    if action is not None:
                        action()
                        self.cut_count += 1
                        break
                client.sendall(data)
        _shut_down(client, server_socket)

    def _is_armed(self) -> bool:
        with self._lock:
            return self._action is not None


def _shut_down(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def start_commit_proxy(database_url: str) -> Iterator[tuple[CommitProxy, str]]:
    """Start a proxy in front of this database; yields it and the database's URL through it."""
    url = sa.make_url(database_url)
    server = Path(str(url.query["host"])) / ".s.PGSQL.5432"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = CommitProxy(listener, server)
        thread = threading.Thread(target=proxy.accept)
        thread.start()
        port: int = listener.getsockname()[1]
        proxied = url.set(drivername="postgresql", host="127.0.0.1", port=port, query={"sslmode": "disable"})
        try:
            yield proxy, proxied.render_as_string(hide_password=False)
        finally:
            proxy.close()
            thread.join()
