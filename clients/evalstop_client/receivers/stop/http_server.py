"""The receiver's HTTP server, optionally with TLS: webhooks by POST to any path, /livez and /metrics."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import socketserver
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from evalstop_client.receivers.stop.webhook_handler import Receiver, Reply
from evalstop_client.version import __version__

logger = logging.getLogger("evalstop_client.receivers")

BODY_LIMIT_BYTES = 2**20
DISCARD_SECONDS = 2.0
SHUTDOWN_SECONDS = 0.05
"""How often the server checks for `shutdown`."""


class ReceiverServer(ThreadingHTTPServer):
    """The receiver's HTTP server; a webhook may be posted to any path.

    `tls`: its certificate; None: plain HTTP. `metrics_key`: the bearer token that /metrics requires.
    """

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        read_seconds: float = 10.0,
        tls: ssl.SSLContext | None = None,
        metrics_key: str | None = None,
    ) -> None:
        self.read_seconds, self.tls, self.metrics_key = read_seconds, tls, metrics_key
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without a reverse DNS lookup, which may be slow and is not needed."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection, including the TLS handshake, in its own thread: a slow sender blocks no other."""
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        with self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as secured:
            super().finish_request(secured, client_address)

    def serve(self, receiver: Receiver) -> None:
        """Pass requests to `receiver` from a thread, including those that arrived since the socket was bound."""
        self.receiver = receiver
        threading.Thread(target=self.serve_forever, args=(SHUTDOWN_SECONDS,), name="receiver", daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"{'http' if self.tls is None else 'https'}://{host!s}:{port}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReceiverServer
    server_version = f"evalstop-receiver/{__version__}"

    def handle(self) -> None:
        """Serve one request; disconnects a sender that has not finished within `read_seconds`."""
        self._deadline = threading.Timer(self.server.read_seconds, self._hang_up)
        self._deadline.daemon = True
        self._deadline.start()
        try:
            if isinstance(self.connection, ssl.SSLSocket):
                self.connection.do_handshake()
            super().handle()
        except OSError as error:
            logger.info("a sender disconnected: %s", error)
        finally:
            self._deadline.cancel()

    def do_GET(self) -> None:
        if self.path == "/livez":
            self._reply(Reply(200, {"status": "ok"}))
        elif self.path == "/metrics" and not self._may_read_metrics():
            self._reply(Reply(401, {"error": "Send Authorization: Bearer with the key from --metrics-key-env."}))
        elif self.path == "/metrics":
            self._send_response(
                200, "text/plain; version=0.0.4; charset=utf-8", self.server.receiver.metrics.text().encode()
            )
        else:
            self._reply(Reply(404, {"error": "Send webhooks by POST; /livez checks that the receiver runs."}))

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            self._reply(Reply(411, {"error": "The header content-length is required."}))
        elif len(length) > 12 or int(length) > BODY_LIMIT_BYTES:
            self._reply(Reply(413, {"error": f"The body may have at most {BODY_LIMIT_BYTES} bytes."}))
            self._discard_body()
        else:
            body = self.rfile.read(int(length))
            self._deadline.cancel()
            if len(body) == int(length):  # else the sender disconnected midway
                self._reply(self.server.receiver.receive(dict(self.headers.items()), body, time.time()))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name in the standard library
        logger.debug("%s %s", self.address_string(), format % args)

    def _may_read_metrics(self) -> bool:
        key, authorization = self.server.metrics_key, self.headers.get("authorization", "")
        return key is None or hmac.compare_digest(authorization.encode(errors="replace"), f"Bearer {key}".encode())

    def _reply(self, reply: Reply) -> None:
        self._send_response(reply.status, "application/json", json.dumps(reply.body).encode())

    def _send_response(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _discard_body(self) -> None:
        """Keep reading briefly: closing immediately would reset the connection before the sender has read the
        response."""
        until = time.monotonic() + DISCARD_SECONDS
        while time.monotonic() < until and self.rfile.read1(2**16):
            pass

    def _hang_up(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("a slow sender had already disconnected")
