"""A fake MLflow server: knows experiments and runs, remembers what it was told, can be away, and can move."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class FakeMlflow:
    """What it was told, in order: verb and body. While `away` is set it answers 503.

    A tag `unwanted` is refused, a tag `deadly` fails each time. `moved`: where requests are redirected to.
    """

    def __init__(self) -> None:
        self.moved: str | None = None
        self.runs: dict[str, dict[str, Any]] = {}
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.tokens: set[str | None] = set()
        self.experiments: dict[str, str] = {}
        self.away = threading.Event()
        self.url = ""

    def answer(self, verb: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.away.is_set():
            return 503, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "away"}
        self.told.append((verb, body))
        match verb:
            case "experiments/get-by-name":
                found = self.experiments.get(body["experiment_name"])
                missing = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no"}
                return missing if found is None else (200, {"experiment": {"experiment_id": found}})
            case "experiments/create" if body["name"] in self.experiments:
                return 400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": "it is there"}
            case "experiments/create":
                self.experiments[body["name"]] = str(len(self.experiments) + 1)
                return 200, {"experiment_id": self.experiments[body["name"]]}
            case "runs/create":
                run_id = f"twin-{len(self.runs) + 1}"
                self.runs[run_id] = {"info": {"run_id": run_id}, "data": {"tags": body["tags"]}}
                return 200, {"run": self.runs[run_id]}
            case "runs/get":
                return 200, {"run": self.runs[body["run_id"]]}
            case "runs/set-tag" if body["key"] == "unwanted":
                return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "unwanted"}
            case "runs/set-tag" if body["key"] == "deadly":
                return 500, {"error_code": "INTERNAL_ERROR", "message": "deadly"}
        return 200, {}


@contextmanager
def fake_mlflow() -> Iterator[FakeMlflow]:
    """A fake MLflow server on a real socket, which ends with the block."""
    fake = FakeMlflow()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = {key: value[0] for key, value in parse_qs(urlsplit(self.path).query).items()}
            self._answer(query)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            fake.tokens.add(self.headers["Authorization"])
            status, document = fake.answer(urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/"), body)
            content = json.dumps(document).encode()
            self.send_response(status if fake.moved is None else 302)
            if fake.moved is not None:
                self.send_header("Location", fake.moved)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
