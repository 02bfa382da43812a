"""Receives webhooks over HTTP: verify, seen before?, answer at once, act in the background, report back."""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from evalstop_client.errors import EventMalformed, SignatureError
from evalstop_client.receivers.action import (
    STOP_REQUESTED,
    Action,
    Failed,
    NotMine,
    StopRequest,
    event_in,
    stop_request_in,
)
from evalstop_client.receivers.report import Reports
from evalstop_client.signature import verify
from evalstop_client.version import __version__

logger = logging.getLogger("evalstop_client.receivers")

BODY_LIMIT_BYTES = 2**20
REMEMBERED_IDS = 10_000
DISCARD_SECONDS = 2.0


@dataclass(frozen=True)
class Reply:
    """An HTTP answer of the receiver."""

    status: int
    body: Mapping[str, Any]


class Receiver:
    """What happens to a webhook, without the HTTP around it.

    `secrets` is asked at every webhook, so that a secret can be replaced while a job of many days is running.
    """

    def __init__(self, action: Action, secrets: Callable[[], Sequence[str]], reports: Reports) -> None:
        self._action = action
        self._secrets = secrets
        self._reports = reports
        self._changed = threading.Condition()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._acting = 0
        self._obeyed = False

    def receive(self, headers: Mapping[str, str], body: bytes, now: float) -> Reply:
        """Verify one webhook and set in motion what it asks for."""
        secrets = self._secrets()
        if not secrets:
            return Reply(503, {"error": "The receiver has no secret yet."})
        try:
            webhook_id = verify(secrets, headers, body, now)
            event = event_in(body)
            if event["type"] != STOP_REQUESTED:
                return Reply(200, {"ignored": event["type"]})
            request = stop_request_in(webhook_id, event)
        except SignatureError as error:
            logger.warning("a webhook was turned away: %s", error)
            return Reply(401, {"error": str(error)})
        except EventMalformed as error:
            return Reply(422, {"error": str(error)})
        if not self._is_new(webhook_id):
            return Reply(200, {"repeat": webhook_id})
        threading.Thread(target=self._obey, args=(request,), name=f"stop {request.decision_id}", daemon=True).start()
        return Reply(202, {"accepted": webhook_id})

    def wait_obeyed(self, timeout_seconds: float) -> bool:
        """Wait until a stop of a job of ours was carried out; False when none was."""
        with self._changed:
            return self._changed.wait_for(lambda: self._obeyed, timeout_seconds)

    def wait_idle(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no stop is being carried out or reported; False when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._acting == 0, timeout_seconds)

    def _is_new(self, webhook_id: str) -> bool:
        with self._changed:
            if webhook_id in self._seen:
                return False
            self._seen[webhook_id] = None
            if len(self._seen) > REMEMBERED_IDS:
                self._seen.popitem(last=False)
            self._acting += 1
            return True

    def _obey(self, request: StopRequest) -> None:
        try:
            logger.info("asked to stop run %s (decision %s)", request.run_name, request.decision_id)
            try:
                result = self._action.stop(request)
            except Exception as error:  # the service must learn of it, whatever it is
                logger.exception("the action failed")
                result = Failed(f"{type(error).__name__}: {error}")
            if isinstance(result, NotMine):
                logger.info("run %s is not one of mine", request.run_name)
            else:
                with self._changed:
                    self._obeyed = True
                    self._changed.notify_all()
                self._reports.send(request, result)
        finally:
            with self._changed:
                self._acting -= 1
                self._changed.notify_all()


class ReceiverServer(ThreadingHTTPServer):
    """A receiver behind a socket; a webhook may be posted to any path."""

    daemon_threads = True

    def __init__(self, host: str, port: int, read_seconds: float = 10.0) -> None:
        self.read_seconds = read_seconds
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking the name service who we are: it may take its time, and nobody wants to know."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self, receiver: Receiver) -> None:
        """Hand what arrives to `receiver`, from a thread; what arrived since the socket was bound has waited."""
        self.receiver = receiver
        threading.Thread(target=self.serve_forever, name="receiver", daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReceiverServer
    server_version = f"evalstop-receiver/{__version__}"

    def handle(self) -> None:
        """Serve one request; a sender that has not come to its end in `read_seconds` is hung up on."""
        self._deadline = threading.Timer(self.server.read_seconds, self._hang_up)
        self._deadline.daemon = True
        self._deadline.start()
        try:
            super().handle()
        except OSError as error:
            logger.info("a sender went away: %s", error)
        finally:
            self._deadline.cancel()

    def do_GET(self) -> None:
        """Answer /livez."""
        if self.path == "/livez":
            self._reply(Reply(200, {"status": "ok"}))
        else:
            self._reply(Reply(404, {"error": "Webhooks are received by POST; /livez tells whether this runs."}))

    def do_POST(self) -> None:
        """Take one webhook."""
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            self._reply(Reply(411, {"error": "The header content-length is needed."}))
        elif len(length) > 12 or int(length) > BODY_LIMIT_BYTES:
            self._reply(Reply(413, {"error": f"The body may have {BODY_LIMIT_BYTES} bytes at most."}))
            self._discard()
        else:
            body = self.rfile.read(int(length))
            self._deadline.cancel()
            if len(body) == int(length):  # else the sender hung up in the middle
                self._reply(self.server.receiver.receive(dict(self.headers.items()), body, time.time()))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the standard library's name
        """Requests are told to the log, at a level that is not shown unless asked for."""
        logger.debug("%s %s", self.address_string(), format % args)

    def _reply(self, reply: Reply) -> None:
        body = json.dumps(reply.body).encode()
        self.send_response(reply.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _discard(self) -> None:
        """Read on for a moment: closing at once would reset the connection before the sender has read the answer."""
        until = time.monotonic() + DISCARD_SECONDS
        while time.monotonic() < until and self.rfile.read1(2**16):
            pass

    def _hang_up(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("a slow sender was gone already")
