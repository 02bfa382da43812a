"""Streams that are made to fill the memory of a real server process: it stays small, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from backports import zstd

from tests.service.web.api.test_bulk import LINES, chunk, line, opened, sending, steps, wait_for

MEBIBYTE = 2**20
MOST_BYTES = 32 * MEBIBYTE
"""That a bomb may cost: a window of 8 MiB, what is read ahead, and what allocators do not give back."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux alone")


@dataclass
class Server:
    """A process of its own, and a client that may do everything in its project."""

    process: subprocess.Popen[str]
    client: httpx.Client

    def peak(self) -> int:
        """The most memory that it has held since it was last forgotten, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmHWM:"))

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@contextmanager
def up(folder: Path, **environment: str) -> Iterator[Server]:
    """`evalstop up` on an embedded database of its own."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("EVALSTOP_")}
    command = [sys.executable, "-m", "evalstop_service.cli", "up", "--json", "--port", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=plain | environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        headers = {"Authorization": f"Bearer {ready['key']}"}
        with httpx.Client(base_url=f"{ready['url']}/api/v1", headers=headers, timeout=280, trust_env=False) as client:
            yield Server(process, client)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server, warmed up by streams of all kinds."""
    with up(tmp_path_factory.mktemp("bombs")) as server:
        for pack in (bytes, gzipped, zstd.compress):
            (run_id,) = opened(server.client)
            posted(server, pack(many(run_id, 10_000)), pack).raise_for_status()
        yield server


def gzipped(content: bytes) -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return packer.compress(content) + packer.flush()


def many(run_id: str, number: int) -> bytes:
    return b"\n".join(line(run_id, {"metric": "loss", "step": step, "value": 0.5}) for step in range(number))


def posted(server: Server, body: bytes, pack: Callable[[bytes], bytes]) -> httpx.Response:
    encoding = {gzipped: "gzip", zstd.compress: "zstd"}.get(pack, "identity")
    return server.client.post("/observations", content=body, headers=LINES | {"content-encoding": encoding})


def repeated(part: bytes, times: int, pack: Callable[[bytes], bytes]) -> bytes:
    """Many times the same, packed without ever being held."""
    packer = zlib.compressobj(1, wbits=31) if pack is gzipped else zstd.ZstdCompressor()
    return b"".join([*(packer.compress(part) for _ in range(times)), packer.flush()])


NESTED = b'{"a":' * 200_000 + b"\n"
LISTS = b"[" * (MEBIBYTE - 1) + b"\n"
ENDLESS = b" " * MEBIBYTE
BAD = b"bad\n" * 1000


@pytest.mark.parametrize("pack", [gzipped, zstd.compress])
@pytest.mark.parametrize(
    ("part", "times", "status"),
    [(ENDLESS, 200, 200), (ENDLESS, 400, 413), (NESTED, 100, 200), (LISTS, 100, 200)],
    ids=["a line without end", "more than may be", "nested objects", "nested lists"],
)
def test_packed_bombs(server: Server, pack: Callable[[bytes], bytes], part: bytes, times: int, status: int) -> None:
    """Hundreds of mebibytes in a few kilobytes cost little memory, and the lines after them are stored."""
    (run_id,) = opened(server.client)
    good = line(run_id, {"metric": "loss", "step": 1, "value": 1}) + b"\n"
    bomb = pack(good) + repeated(part, times, pack) + pack(b"\n" + good.replace(b'"loss"', b'"kl"'))
    survived(server, lambda: posted(server, bomb, pack), status)
    assert steps(server.client, run_id, "loss") == [1]
    assert steps(server.client, run_id, "kl") == ([1] if status == 200 else [])


def test_a_huge_window(server: Server) -> None:
    """A zstd file that asks for a window of 128 MiB is refused before it gets one."""
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    bomb = b"".join([*(packer.compress(os.urandom(MEBIBYTE)) for _ in range(40)), packer.flush()])
    survived(server, lambda: posted(server, bomb, zstd.compress), 400)


def test_bad_lines_without_end(server: Server) -> None:
    """A stream of hundreds of thousands of lines that are no JSON: the errors that are told are the first ones."""
    answer = survived(server, lambda: posted(server, repeated(BAD, 300, gzipped), gzipped), 200)
    assert answer.json()["error_count"] == 300_000
    assert [error["line"] for error in answer.json()["errors"]] == list(range(1, 1001))


def test_runs_without_end(server: Server) -> None:
    """A stream that names hundreds of thousands of runs that are not there."""
    point = {"metric": "loss", "step": 1, "value": 1}
    body = b"\n".join(line(f"{number:08x}-0000-7000-8000-000000000000", point) for number in range(300_000))
    answer = survived(server, lambda: posted(server, gzipped(body), gzipped), 200)
    assert answer.json()["error_count"] == 300_000
    assert len(answer.json()["errors"]) == 1000


def survived(server: Server, send: Callable[[], httpx.Response], status: int) -> httpx.Response:
    """The answer to a bomb, which had this status, cost little memory, and was not the last."""
    server.forget_peak()
    before = server.peak()
    answer = send()
    assert answer.status_code == status, answer.text[:1000]
    assert server.peak() < before + MOST_BYTES
    (run_id,) = opened(server.client)
    assert posted(server, many(run_id, 10), bytes).json()["accepted"] == 10
    return answer


def test_a_stream_is_given_its_time(tmp_path: Path) -> None:
    """A stream goes on for longer than other requests may; one that was refused is not waited for."""
    with up(tmp_path, EVALSTOP_REQUEST_SECONDS="0.5") as server:
        (run_id,) = opened(server.client)
        with sending(server.client) as slow:
            slow.sendall(chunk(line(run_id, {"metric": "eval", "step": 0, "value": 1}) + b"\n"))
            wait_for(server.client, run_id, [0])
            refused = httpx.Client(base_url=server.client.base_url, headers={"Authorization": "Bearer esk_none"})
            with refused, sending(refused) as other:  # began later, and is closed before the stream ends
                assert b"".join(iter(lambda: other.recv(65536), b"")).startswith(b"HTTP/1.1 401 ")
            with sending(server.client, path="/runs") as other:
                assert b"".join(iter(lambda: other.recv(65536), b"")).startswith(b"HTTP/1.1 408 ")
            slow.sendall(chunk(line(run_id, {"metric": "eval", "step": 1, "value": 1})) + chunk(b""))
            answer = b"".join(iter(lambda: slow.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["accepted"] == 2
