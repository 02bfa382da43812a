"""A webhook receiver on loopback that verifies each signature as documented, and records the events."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.fixtures.http_server import serve_handler


class FakeReceiver:
    """Answers late and fails one request in ten, so that a killed worker leaves deliveries sent but not settled."""

    def __init__(self, rng: random.Random) -> None:
        self.url = self.secret = ""
        self.bodies: dict[str, set[bytes]] = defaultdict(set)
        self.invalid_signatures = 0
        self.received_count = 0
        self._rng = rng
        self._changed = threading.Condition()

    def record_request(self, headers: dict[str, str], body: bytes) -> int:
        """Record a request; returns the status to answer."""
        headers = {name.lower(): value for name, value in headers.items()}
        with self._changed:
            if not self._is_signed(headers, body):
                self.invalid_signatures += 1
                return 401
            self.bodies[headers["webhook-id"]].add(body)
            self.received_count += 1
            self._changed.notify_all()
            failing, seconds = self._rng.random() < 0.1, self._rng.uniform(0.0, 0.05)
        time.sleep(seconds)
        return 500 if failing else 200

    def wait_for(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait until the condition holds, checked after each request; False on timeout."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_seconds)

    def events(self, event_type: str) -> list[dict[str, Any]]:
        """The data of the events of a type, each once."""
        with self._changed:
            documents = [json.loads(next(iter(bodies))) for bodies in self.bodies.values()]
        return [document["data"] for document in documents if document["type"] == event_type]

    def _is_signed(self, headers: dict[str, str], body: bytes) -> bool:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(self.secret.removeprefix("whsec_"))
        expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        return expected in headers["webhook-signature"].split(" ")


@contextmanager
def start_fake_receiver(rng: random.Random) -> Iterator[FakeReceiver]:
    """Run a receiver until the end of the block."""
    receiver = FakeReceiver(rng)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            body = self.rfile.read(length)
            if len(body) < length:
                return  # the sender has been killed between head and body
            status = receiver.record_request(dict(self.headers), body)
            with suppress(OSError):  # the sender has been killed
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

    with serve_handler(Handler) as receiver.url:
        yield receiver
