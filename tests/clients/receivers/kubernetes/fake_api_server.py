"""A fake Kubernetes API server over real HTTP."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.clients.receivers.kubernetes.fake_cluster import FakeCluster
from tests.clients.receivers.kubernetes.fake_requests import Request
from tests.clients.receivers.kubernetes.fake_storage import Json, StatusError


class FakeApiServer(ThreadingHTTPServer):
    """A fake cluster behind a socket."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, cluster: FakeCluster, port: int = 0) -> None:
        self.cluster = cluster
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that disconnects; report other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def __enter__(self) -> FakeApiServer:
        self.cluster.closing = False
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with self.cluster.storage.changed:
            self.cluster.closing = True
            self.cluster.storage.changed.notify_all()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeApiServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # buffer the answer, so that it is sent at once
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        url = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        request = Request(self.command, url.path, query, headers, raw)
        try:
            if self.server.cluster.closing:
                self.close_connection = True
                return
            code, body = self.server.cluster.answer(request)
            self._send(code, body)
        except StatusError as status:
            self._send(status.code, status.body, status.headers)

    def _send(self, code: int, body: Json | str, headers: dict[str, str] | None = None) -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("content-length", str(len(raw)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def finish(self) -> None:
        """Close the connection even if the last answer cannot be sent, so that its reader does not keep it open."""
        try:
            super().finish()
        finally:
            self.rfile.close()

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle  # noqa: N815  # the names that the standard library looks for

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the standard library's name
        """Stay silent."""
