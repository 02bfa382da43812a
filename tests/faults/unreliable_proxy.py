"""A road between the service's workers and a receiver on which events are lost, held up, repeated and out of order."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx

from tests.fixtures.certificates import get_ssl_context

TROUBLE = {"lost": 0.06, "unanswered": 0.06, "twice": 0.06, "later": 0.06, "slow": 0.02}
"""Of a hundred events: answered 500 without arriving; arrived and answered 500; arrived twice; arrived half a second
after it was answered 503; held up for longer than the sender waits."""


class Road:
    """An HTTP proxy in front of whatever listens at `receiver()`; `troubles` counts what it did."""

    def __init__(self, chance: random.Random, receiver: Callable[[], str], slow_seconds: float) -> None:
        self.troubles: Counter[str] = Counter()
        self._chance, self._receiver, self._slow_seconds = chance, receiver, slow_seconds
        self._lock = threading.Lock()
        self._client = httpx.Client(verify=get_ssl_context(), timeout=30, trust_env=False)
        road = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = road.carry(dict(self.headers), body)
                try:
                    self.send_response(status)
                    self.send_header("content-length", "0")
                    self.end_headers()
                except OSError:
                    pass  # the sender has gone meanwhile

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._client.close()

    def carry(self, headers: dict[str, str], body: bytes) -> int:
        """Take an event to the receiver, or not; gives what its sender is answered."""
        kinds = [*TROUBLE, "none"]
        with self._lock:
            (kind,) = self._chance.choices(kinds, [*TROUBLE.values(), 1 - sum(TROUBLE.values())])
            self.troubles[kind] += 1
        if kind == "lost":
            return 500
        if kind == "later":
            threading.Timer(0.5, self._pass_on, (headers, body)).start()
            return 503
        if kind == "slow":
            time.sleep(self._slow_seconds)
        status = self._pass_on(headers, body)
        if kind == "twice":
            self._pass_on(headers, body)
        return 500 if kind == "unanswered" else status

    def _pass_on(self, headers: dict[str, str], body: bytes) -> int:
        kept = {name: value for name, value in headers.items() if name.lower().startswith(("webhook-", "content-type"))}
        try:
            return self._client.post(self._receiver(), content=body, headers=kept).status_code
        except (httpx.TransportError, RuntimeError):  # it is away, or this road has been closed
            return 502
