"""A way between the service and PostgreSQL that can be cut right behind a commit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa

COMMIT = (b"COMMIT\x00", b"COMMIT;\x00")
POINTS = b"\x00\x00\x00\x05proxy"
"""The name of a metric, in a statement that stores points, which may be a transaction of its own."""
IDLE, IN_TRANSACTION = b"Z\x00\x00\x00\x05I", b"Z\x00\x00\x00\x05T"
"""How PostgreSQL ends an answer: nothing is uncommitted, or something is."""


class CommitCutter:
    """A TCP proxy in front of a PostgreSQL that listens on a socket in a folder.

    Armed, it lets the next commit through, be it said or that of a statement which stores points by itself, waits until
    PostgreSQL says that it is done, keeps that to itself, does what it was armed with, and cuts the connection.
    """

    def __init__(self, listening: socket.socket, server: Path) -> None:
        self._listening, self._server = listening, server
        self._lock = threading.Lock()
        self._act: Callable[[], None] | None = None
        self._ends: list[socket.socket] = []
        self.cuts = 0

    def arm(self, act: Callable[[], None] = lambda: None) -> None:
        """Cut the next connection that commits, after `act`."""
        with self._lock:
            self._act = act

    def accept(self) -> None:
        """Carry connections until the listening socket is closed."""
        while True:
            try:
                near = self._listening.accept()[0]
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            with self._lock:
                self._ends += [near, far]
            try:
                far.connect(str(self._server))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def close(self) -> None:
        """Cut everything."""
        for end in (self._listening, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        commit = threading.Event()
        back = threading.Thread(target=self._back, args=(far, near, commit), daemon=True)
        back.start()
        with suppress(OSError):
            while data := near.recv(65536):
                if (data.endswith(COMMIT) or POINTS in data) and self._is_armed():
                    commit.set()
                far.sendall(data)
        _cut(near, far)

    def _back(self, far: socket.socket, near: socket.socket, commit: threading.Event) -> None:
        with suppress(OSError):
            while data := far.recv(65536):
                if data.endswith(IN_TRANSACTION):
                    commit.clear()
                if commit.is_set() and data.endswith(IDLE):
                    with self._lock:
                        act, self._act = self._act, None
                    if act is not None:
                        act()
                        self.cuts += 1
                        break
                near.sendall(data)
        _cut(near, far)

    def _is_armed(self) -> bool:
        with self._lock:
            return self._act is not None


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def commit_cutter(database_url: str) -> Iterator[tuple[CommitCutter, str]]:
    """A proxy in front of this database, and the URL that leads through it."""
    url = sa.make_url(database_url)
    server = Path(str(url.query["host"])) / ".s.PGSQL.5432"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        cutter = CommitCutter(listening, server)
        thread = threading.Thread(target=cutter.accept)
        thread.start()
        port: int = listening.getsockname()[1]
        through = url.set(drivername="postgresql", host="127.0.0.1", port=port, query={"sslmode": "disable"})
        try:
            yield cutter, through.render_as_string(hide_password=False)
        finally:
            cutter.close()
            thread.join()
