"""A fake MLflow server that records requests and can be unavailable, fail or redirect."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fixtures.http_handler import serve_handler


class FakeMlflow:
    """Answers requests and records them in order, as (verb, body).

    While `unavailable` is set it answers 503. The tag `refused` is answered with 400, the tag `failing` with 500. If
    `redirect_url` is set, every response redirects there.
    """

    def __init__(self) -> None:
        self.redirect_url: str | None = None
        self.runs: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.tokens: set[str | None] = set()
        self.experiments: dict[str, str] = {}
        self.unavailable = threading.Event()
        self.url = ""

    def handle(self, verb: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.unavailable.is_set():
            return 503, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "unavailable"}
        self.requests.append((verb, body))
        match verb:
            case "experiments/get-by-name":
                experiment_id = self.experiments.get(body["experiment_name"])
                missing = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no"}
                return missing if experiment_id is None else (200, {"experiment": {"experiment_id": experiment_id}})
            case "experiments/create" if body["name"] in self.experiments:
                return 400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": "it is there"}
            case "experiments/create":
                self.experiments[body["name"]] = str(len(self.experiments) + 1)
                return 200, {"experiment_id": self.experiments[body["name"]]}
            case "runs/create":
                run_id = f"forwarded-{len(self.runs) + 1}"
                self.runs[run_id] = {"info": {"run_id": run_id}, "data": {"tags": body["tags"]}}
                return 200, {"run": self.runs[run_id]}
            case "runs/get":
                return 200, {"run": self.runs[body["run_id"]]}
            case "runs/set-tag" if body["key"] == "refused":
                return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "refused"}
            case "runs/set-tag" if body["key"] == "failing":
                return 500, {"error_code": "INTERNAL_ERROR", "message": "failing"}
        return 200, {}


@contextmanager
def run_fake_mlflow() -> Iterator[FakeMlflow]:
    """Run a fake MLflow server on a socket until the end of the block."""
    fake = FakeMlflow()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = {key: value[0] for key, value in parse_qs(urlsplit(self.path).query).items()}
            self._answer(query)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            fake.tokens.add(self.headers["Authorization"])
            status, document = fake.handle(urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/"), body)
            content = json.dumps(document).encode()
            self.send_response(status if fake.redirect_url is None else 302)
            if fake.redirect_url is not None:
                self.send_header("Location", fake.redirect_url)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with serve_handler(Handler) as fake.url:
        yield fake
