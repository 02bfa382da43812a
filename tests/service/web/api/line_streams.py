"""Streams of lines: their encoding, sending them, and what is stored of them."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.service.web.api.api_calls import expect_json, open_run

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

HEADERS = {"content-type": "application/x-ndjson"}
DEADLINE_SECONDS = 60.0

Point = dict[str, Any]

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "gzip": gzip.compress,
    "zstd": zstd.compress,
}


def open_runs(client: httpx.Client, number: int = 1) -> list[str]:
    """The ids of new runs."""
    return [open_run(client)["id"] for _ in range(number)]


def encode_line(run_id: str, point: Point) -> bytes:
    return json.dumps({"run_id": run_id} | point).encode()


def post_lines(client: httpx.Client, body: Any, encoding: str = "identity") -> httpx.Response:
    return client.post("/observations", content=body, headers=HEADERS | {"content-encoding": encoding})


def list_steps(client: httpx.Client, run_id: str, metric: str = "eval") -> list[int]:
    items = expect_json(client.get(f"/runs/{run_id}/observations", params={"metric": metric}), 200)["items"]
    return [item["step"] for item in items]


def wait_for_steps(client: httpx.Client, run_id: str, expected: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (stored_steps := list_steps(client, run_id)) != expected:
        assert time.monotonic() < deadline, f"{stored_steps} are stored"
        time.sleep(0.01)


@contextmanager
def open_stream(client: httpx.Client, path: str = "/observations") -> Iterator[socket.socket]:
    """A connection on which the request of a chunked stream was sent, without its body."""
    address = client.base_url
    head = f"POST /api/v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: {client.headers['authorization']}\r\n"
    head += "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(head.encode())
        yield connection


def read_response(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def encode_chunk(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)
