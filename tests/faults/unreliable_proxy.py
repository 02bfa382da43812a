"""An HTTP proxy in front of a receiver that loses, delays, repeats and reorders events."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from typing import Self

import httpx

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import serve_handler

FAULTS = {"lost": 0.06, "unanswered": 0.06, "twice": 0.06, "later": 0.06, "slow": 0.02}
"""Probability of each fault: answered 500 and not delivered; delivered and answered 500; delivered twice; answered 503
and delivered 0.5 s later; delayed for longer than the sender waits."""


class UnreliableProxy:
    """A proxy in front of the URL that `receiver_url()` returns; `fault_counts` counts the faults by kind."""

    def __init__(self, rng: random.Random, receiver_url: Callable[[], str], slow_seconds: float) -> None:
        self.fault_counts: Counter[str] = Counter()
        self._rng, self._receiver_url, self._slow_seconds = rng, receiver_url, slow_seconds
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = proxy.deliver(dict(self.headers), body)
                try:
                    self.send_response(status)
                    self.send_header("content-length", "0")
                    self.end_headers()
                except OSError:
                    pass  # the sender timed out

        client = httpx.Client(verify=get_ssl_context(), timeout=30, trust_env=False)
        self._client = self._stack.enter_context(client)
        self.url = f"{self._stack.enter_context(serve_handler(Handler))}/"
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def deliver(self, headers: dict[str, str], body: bytes) -> int:
        """Deliver an event with a random fault; returns the status for its sender."""
        kinds = [*FAULTS, "none"]
        with self._lock:
            (kind,) = self._rng.choices(kinds, [*FAULTS.values(), 1 - sum(FAULTS.values())])
            self.fault_counts[kind] += 1
        if kind == "lost":
            return 500
        if kind == "later":
            threading.Timer(0.5, self._forward, (headers, body)).start()
            return 503
        if kind == "slow":
            time.sleep(self._slow_seconds)
        status = self._forward(headers, body)
        if kind == "twice":
            self._forward(headers, body)
        return 500 if kind == "unanswered" else status

    def _forward(self, headers: dict[str, str], body: bytes) -> int:
        forwarded = {
            name: value for name, value in headers.items() if name.lower().startswith(("webhook-", "content-type"))
        }
        try:
            return self._client.post(self._receiver_url(), content=body, headers=forwarded).status_code
        except (httpx.TransportError, RuntimeError):  # the receiver is down, or the proxy is closed
            return 502
