"""A fake MLflow server with answers recorded from a real one (3.17) in tests/data/mlflow_server.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from tests.fixtures.http_server import serve_handler

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "mlflow_server.json").read_text())
TOKEN = "let-me-in"
MAX_ITEMS_PER_PAGE = 3
"""The maximum number of items per page, whatever is requested, so that every list has several pages."""


@contextmanager
def run_fake_mlflow() -> Iterator[str]:
    """Run a server that accepts `TOKEN` and fails the first request of each path; yields its address."""

    class Handler(_Handler):
        requested_paths: ClassVar[set[str]] = set()

    with serve_handler(Handler) as address:
        yield address


@contextmanager
def run_invalid_mlflow(answer: object) -> Iterator[str]:
    """Run a server that answers every request with `answer`; yields its address."""

    class Handler(_Handler):
        def _answer(self, path: str, requested: dict[str, Any]) -> None:
            self._send(200, answer)

    with serve_handler(Handler) as address:
        yield address


class _Handler(BaseHTTPRequestHandler):
    requested_paths: ClassVar[set[str]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(urlsplit(self.path).path, body)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self._answer(parts.path, {key: values[0] for key, values in parse_qs(parts.query).items()})

    def _answer(self, path: str, requested: dict[str, Any]) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"message": "You are not authenticated."})
        elif path not in self.requested_paths:
            self.requested_paths.add(path)
            self._send(503, {})
        elif path == "/api/2.0/mlflow/experiments/search":
            self._page("experiments", RECORDED["experiments"]["experiments"], requested)
        elif path == "/api/2.0/mlflow/runs/search":
            runs = RECORDED["runs"]["runs"]
            self._page(
                "runs", [run for run in runs if run["info"]["experiment_id"] in requested["experiment_ids"]], requested
            )
        elif path == "/api/2.0/mlflow/metrics/get-history":
            self._page("metrics", RECORDED["histories"][f"{requested['run_id']} {requested['metric_key']}"], requested)
        else:
            self._send(404, {"error_code": "ENDPOINT_NOT_FOUND"})

    def _page(self, name: str, items: list[Any], requested: dict[str, Any]) -> None:
        start = int(requested.get("page_token", 0))
        end = start + min(MAX_ITEMS_PER_PAGE, int(requested["max_results"]))
        self._send(200, {name: items[start:end]} | ({"next_page_token": str(end)} if end < len(items) else {}))

    def _send(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
