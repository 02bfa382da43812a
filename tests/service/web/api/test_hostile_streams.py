"""Streams meant to exhaust a server's memory: the process stays small and keeps serving."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.fixtures.forked_commands import ForkedCommand
from tests.service.web.api.line_streams import (
    HEADERS,
    encode_chunk,
    encode_line,
    list_steps,
    open_runs,
    open_stream,
    read_response,
    wait_for_steps,
    zstd,
)

MEBIBYTE = 2**20
MAX_GROWTH_BYTES = 32 * MEBIBYTE
"""Allowed growth for one stream: a window of 8 MiB, read-ahead, and what allocators keep."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only"),
]


@dataclass
class Server:
    """A server process, and a client with an admin key to its project."""

    process: ForkedCommand
    client: httpx.Client

    def read_peak_bytes(self) -> int:
        """The highest resident memory since the last reset."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmHWM:"))

    def reset_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@contextmanager
def run_server(folder: Path, **environment: str) -> Iterator[Server]:
    """Run `evalstop up` on a new SQLite database."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    command = ["up", "--json", "--port", "0", "--data-folder", str(folder)]
    process = ForkedCommand(command, plain | environment, folder / "log")
    try:
        ready = json.loads(process.stdout.readline())
        headers = {"Authorization": f"Bearer {ready['key']}"}
        with httpx.Client(base_url=f"{ready['url']}/api/v1", headers=headers, timeout=280, trust_env=False) as client:
            yield Server(process, client)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has handled one stream of each encoding."""
    with run_server(tmp_path_factory.mktemp("bombs")) as server:
        for compress in (bytes, gzip_compress, zstd.compress):
            (run_id,) = open_runs(server.client)
            post_compressed(server, compress(encode_numbered_lines(run_id, 10_000)), compress).raise_for_status()
        yield server


def gzip_compress(content: bytes) -> bytes:
    compressor = zlib.compressobj(1, wbits=31)
    return compressor.compress(content) + compressor.flush()


def encode_numbered_lines(run_id: str, number: int) -> bytes:
    return b"\n".join(encode_line(run_id, {"metric": "loss", "step": step, "value": 0.5}) for step in range(number))


def post_compressed(server: Server, body: bytes, compress: Callable[[bytes], bytes]) -> httpx.Response:
    encoding = {gzip_compress: "gzip", zstd.compress: "zstd"}.get(compress, "identity")
    return server.client.post("/observations", content=body, headers=HEADERS | {"content-encoding": encoding})


def compress_repeated(part: bytes, times: int, compress: Callable[[bytes], bytes]) -> bytes:
    """Compress `times` copies of a part without holding them all."""
    compressor = zlib.compressobj(1, wbits=31) if compress is gzip_compress else zstd.ZstdCompressor()
    return b"".join([*(compressor.compress(part) for _ in range(times)), compressor.flush()])


NESTED_OBJECTS = b'{"a":' * 200_000 + b"\n"
NESTED_LISTS = b"[" * (MEBIBYTE - 1) + b"\n"
BLANKS = b" " * MEBIBYTE
BAD_LINES = b"bad\n" * 1000


@pytest.mark.parametrize("compress", [gzip_compress, zstd.compress])
@pytest.mark.parametrize(
    ("part", "times", "status"),
    [(BLANKS, 80, 200), (BLANKS, 400, 413), (NESTED_OBJECTS, 60, 200), (NESTED_LISTS, 60, 200)],
    ids=["blanks", "blanks over the size limit", "nested objects", "nested lists"],
)
def test_compressed_bomb_takes_little_memory(
    server: Server, compress: Callable[[bytes], bytes], part: bytes, times: int, status: int
) -> None:
    """Scores of MiB in a few KiB take little memory, and valid lines after them are stored within the size limit."""
    (run_id,) = open_runs(server.client)
    valid_line = encode_line(run_id, {"metric": "loss", "step": 1, "value": 1}) + b"\n"
    bomb = (
        compress(valid_line)
        + compress_repeated(part, times, compress)
        + compress(b"\n" + valid_line.replace(b'"loss"', b'"kl"'))
    )
    assert_survives(server, lambda: post_compressed(server, bomb, compress), status)
    assert list_steps(server.client, run_id, "loss") == [1]
    assert list_steps(server.client, run_id, "kl") == ([1] if status == 200 else [])


def test_zstd_window_of_128_mib_is_refused(server: Server) -> None:
    """The server refuses the file before it allocates the window."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    bomb = b"".join([*(compressor.compress(os.urandom(MEBIBYTE)) for _ in range(40)), compressor.flush()])
    assert_survives(server, lambda: post_compressed(server, bomb, zstd.compress), 400)


def test_150000_invalid_lines_are_counted(server: Server) -> None:
    """All errors are counted and the first 1,000 are listed."""
    answer = assert_survives(
        server, lambda: post_compressed(server, compress_repeated(BAD_LINES, 150, gzip_compress), gzip_compress), 200
    )
    assert answer.json()["error_count"] == 150_000
    assert [error["line"] for error in answer.json()["errors"]] == list(range(1, 1001))


def test_150000_unknown_runs_are_counted(server: Server) -> None:
    """Lines of runs that do not exist are counted, and the first 1,000 errors are listed."""
    point = {"metric": "loss", "step": 1, "value": 1}
    body = b"\n".join(encode_line(f"{number:08x}-0000-7000-8000-000000000000", point) for number in range(150_000))
    answer = assert_survives(server, lambda: post_compressed(server, gzip_compress(body), gzip_compress), 200)
    assert answer.json()["error_count"] == 150_000
    assert len(answer.json()["errors"]) == 1000


def assert_survives(server: Server, send: Callable[[], httpx.Response], status: int) -> httpx.Response:
    """Send a request and check its status, the memory it took, and that the server then stores another stream."""
    server.reset_peak()
    before = server.read_peak_bytes()
    answer = send()
    assert answer.status_code == status, answer.text[:1000]
    assert server.read_peak_bytes() < before + MAX_GROWTH_BYTES
    (run_id,) = open_runs(server.client)
    assert post_compressed(server, encode_numbered_lines(run_id, 10), bytes).json()["accepted"] == 10
    return answer


def test_streams_are_exempt_from_the_request_timeout(tmp_path: Path) -> None:
    """A stream may outlast other requests; a refused stream is closed at once."""
    with run_server(tmp_path, EVALSTOP_REQUEST_SECONDS="0.5") as server:
        (run_id,) = open_runs(server.client)
        with open_stream(server.client) as slow:
            slow.sendall(encode_chunk(encode_line(run_id, {"metric": "eval", "step": 0, "value": 1}) + b"\n"))
            wait_for_steps(server.client, run_id, [0])
            refused = httpx.Client(
                base_url=server.client.base_url, headers={"Authorization": "Bearer esk_none"}, timeout=60
            )
            with refused, open_stream(refused) as other:  # began later, and is closed before the stream ends
                assert read_response(other).startswith(b"HTTP/1.1 401 ")
            with open_stream(server.client, path="/runs") as other:
                assert read_response(other).startswith(b"HTTP/1.1 408 ")
            slow.sendall(
                encode_chunk(encode_line(run_id, {"metric": "eval", "step": 1, "value": 1})) + encode_chunk(b"")
            )
            answer = read_response(slow)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["accepted"] == 2
