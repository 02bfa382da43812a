"""The benchmark of ingestion: its load generator against a real server, its turns, its statistics, its targets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import pytest
from evalstop_lab.benchmarks import dialects, wire
from evalstop_lab.benchmarks.generator import Job, Load, LoadRefused, bring
from evalstop_lab.benchmarks.ingest import in_turns
from evalstop_lab.benchmarks.ingest_contenders import COPY, EVALSTOP, Copies, evalstop_run, in_sqlite
from evalstop_lab.benchmarks.planted import api
from evalstop_lab.benchmarks.rounds import Shape, cell, document, rotated
from evalstop_lab.benchmarks.servers import Server, bare_route
from evalstop_lab.benchmarks.slow_disk import compiled, sync_ms
from evalstop_lab.benchmarks.worker import JobFailed, Worker, worker
from evalstop_lab.service_process import running_service
from hypothesis import given, settings
from hypothesis import strategies as st

T = TypeVar("T")

SOON = 600.0  # seconds that end with the requests, not with the clock


def load(observations: int = 100, seconds: float = 1.0, p50_ms: float = 1.0, p99_ms: float = 2.0) -> Load:
    return Load(
        observations=observations,
        requests=observations,
        refused=0,
        seconds=seconds,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        generator_cpu=0.1,
    )


@dataclass
class FakeContender:
    """Takes two loads, fails at one of them in its second round, and writes down when it was its turn."""

    name: str
    turns: list[str]
    fails: bool = False

    def takes(self, shape: Shape) -> bool:
        return shape.batch < 100

    def measure(self, shape: Shape, seconds: float) -> Load:
        self.turns.append(f"{self.name}{shape.batch}")
        if self.fails and shape.batch == 10 and self.turns.count(f"{self.name}10") == 2:
            raise JobFailed("it is out of breath")
        return load()


def test_contenders_take_turns_and_whoever_fails_at_a_load_is_out_of_it() -> None:
    """Another one is first at each load and in each round; a failure costs one cell, and is told."""
    turns: list[str] = []
    said: list[str] = []
    contenders = [FakeContender("a", turns), FakeContender("b", turns, fails=True)]
    taken, failures = in_turns(contenders, [Shape(1, 8), Shape(10, 8), Shape(100, 8)], 3, 0.1, said.append)
    assert " ".join(turns) == "a1 b1 b10 a10 b1 a1 a10 b10 a1 b1 a10"
    assert {key: len(found) for key, found in taken.items()} == {
        ("a", Shape(1, 8)): 3,
        ("b", Shape(1, 8)): 3,
        ("a", Shape(10, 8)): 3,
    }
    assert failures == ["it is out of breath"]
    assert len(said) == 12


class FakeWorker(Worker):
    """Has an answer ready."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def ask(self, job: Any, answer: type[T]) -> T:
        assert isinstance(self._answer, answer)
        return self._answer


@pytest.mark.parametrize("stored", [99, 101])
def test_what_is_acknowledged_and_not_stored_is_no_measurement(stored: int) -> None:
    """A load counts only when exactly as much is stored as was acknowledged."""
    copies = Copies(COPY, FakeWorker(load(100)), "copied", lambda runs: 100 if len(runs) == 64 else 0)
    assert copies.measure(Shape(100, 8), 0.1) == load(100)
    lossy = Copies(COPY, FakeWorker(load(100)), "copied", lambda _: stored)
    with pytest.raises(JobFailed, match=f"acknowledged 100 observations and stores {stored}"):
        lossy.measure(Shape(100, 8), 0.1)


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx: y\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"


@settings(deadline=None)
@given(st.sampled_from([ANSWER, CHUNKED]), st.lists(st.integers(1, 120), max_size=6))
def test_an_answer_is_read_however_it_is_cut(whole: bytes, cuts: list[int]) -> None:
    """Whatever the segments an answer arrives in, it is there with the last of them and not before."""
    answers = wire.Answers()
    places = sorted({cut for cut in cuts if cut < len(whole)})
    parts = [whole[begin:end] for begin, end in zip([0, *places], [*places, len(whole)], strict=True)]
    found = [answers.feed(part) for part in parts]
    assert found[:-1] == [None] * (len(parts) - 1)
    assert found[-1] is not None
    assert (found[-1].status, found[-1].body) == (200, b"hello")


def test_answers_follow_each_other_on_one_connection() -> None:
    """What is left of one answer has no part in the next; an interim answer and an empty one are no stumbling block."""
    answers = wire.Answers()
    assert answers.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER) == wire.Answer(200, ANSWER[:-9], b"hello")
    empty = answers.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert empty is not None
    assert (empty.status, empty.body) == (204, b"")
    refused = answers.feed(b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\ncontent-length: 0\r\n\r\n")
    assert refused is not None
    assert (refused.status, refused.retry_after_seconds) == (503, 2.0)


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxy"]
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    """A server that speaks something else, or whose answer has no end, is not measured."""
    with pytest.raises(wire.BrokenAnswer):
        wire.Answers().feed(data)


@settings(deadline=None)
@given(st.sampled_from([1, 10, 100, 1000]), st.integers(0, 50))
def test_requests_carry_every_step_once_in_order(batch: int, requests: int) -> None:
    """The steps of a run's requests go up by one from the first on, 1 in 20 is an eval, and lengths are as declared."""
    made = dialects.requests(dialects.DIALECTS["evalstop"], "r", batch, "h:1", "esk_x", first=60)
    points = []
    for _ in range(requests):
        head, _, body = next(made).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        assert head.startswith(
            b"POST /api/v1/runs/r/observations HTTP/1.1\r\nHost: h:1\r\nAuthorization: Bearer esk_x\r"
        )
        points += json.loads(body)["observations"]
    assert [point["step"] for point in points] == list(range(60, 60 + len(points)))
    assert all((point["metric"] == "eval") == (point["step"] % 20 == 0) for point in points)


def test_both_dialects_say_the_same_numbers() -> None:
    """MLflow is posted the same metrics, steps and values as the service."""
    ours = next(dialects.requests(dialects.DIALECTS["evalstop"], "r", 100, "h", None)).partition(b"\r\n\r\n")[2]
    theirs = next(dialects.requests(dialects.DIALECTS["mlflow"], "r", 100, "h", None)).partition(b"\r\n\r\n")[2]
    said = json.loads(theirs)
    assert said["run_id"] == "r"
    assert [(item["key"], item["step"], item["value"]) for item in said["metrics"]] == [
        (item["metric"], item["step"], item["value"]) for item in json.loads(ours)["observations"]
    ]


@given(st.lists(st.integers(), min_size=1), st.integers(0, 100))
def test_everybody_is_first_in_turn(items: list[int], turn: int) -> None:
    """A rotation loses nobody, keeps the order, and begins with the next one each turn."""
    found = rotated(items, turn)
    begin = turn % len(items)
    assert found == items[begin:] + items[:begin]
    assert rotated([], turn) == []


def test_rounds_come_to_medians() -> None:
    """A cell is the median of its rounds, with the extremes beside it."""
    rates = [load(observations) for observations in (100, 500, 200)]
    found = cell(EVALSTOP, Shape(1, 8), rates)
    assert (found.per_second, found.lowest, found.highest, found.rounds) == (200, 100, 500, (100, 500, 200))
    assert document(found)["batch"] == 1


def test_the_generator_counts_what_a_real_server_acknowledged(tmp_path: Path) -> None:
    """Every request is answered once, and a bare server has counted as many observations as the load says."""
    with bare_route(tmp_path) as server:
        found = asyncio.run(
            bring(
                Job(
                    addresses=(server.address,),
                    dialect="evalstop",
                    runs=tuple("abcdefgh"),
                    clients=4,
                    batch=10,
                    seconds=SOON,
                    requests=7,
                    expects='"accepted":10',
                )
            )
        )
    assert (found.requests, found.observations, found.refused) == (28, 280, 0)
    assert 0 < found.p50_ms <= found.p99_ms


def test_what_the_service_acknowledges_it_stores(tmp_path: Path) -> None:
    """The service on its embedded database holds every row that sprayed clients were told of, watched or not."""
    count = in_sqlite(tmp_path / "evalstop.db", "observations", "run_id")
    with (
        running_service(tmp_path) as service,
        worker([sys.executable, "-m", "evalstop_lab.benchmarks.generator"]) as generator,
    ):
        url = urlsplit(service.url)
        assert url.hostname is not None
        assert url.port is not None
        address = (url.hostname, url.port)
        with api(Server(address, 0, service.key)) as client:
            runs = [evalstop_run(watched)(client) for watched in (True, False, True)]
        job = Job(
            addresses=(address, address),
            dialect="evalstop",
            runs=tuple(runs),
            clients=2,
            batch=10,
            seconds=SOON,
            requests=6,
            key=service.key,
            sprayed=True,
            expects='"should_stop":',
        )
        for first, stored in ((0, 120), (60, 240)):
            assert generator.ask(msgspec.structs.replace(job, first=first), Load).observations == 120
            assert count(runs) == stored
        with pytest.raises(JobFailed, match="It answered 4"):
            generator.ask(msgspec.structs.replace(job, runs=("x",), clients=1), Load)


class FakeBusyServer(BaseHTTPRequestHandler):
    """Refuses every other request, and closes the connection after each answer."""

    protocol_version = "HTTP/1.1"
    seen: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append(body)
        busy = len(self.seen) % 2 == 1
        self.send_response(503 if busy else 200)
        if busy:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def busy_server(seen: list[bytes]) -> Iterator[tuple[str, int]]:
    handler = type("Handler", (FakeBusyServer,), {"seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield ("127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_refused_request_is_sent_again() -> None:
    """503 is waited out: the same observations go out again, and are counted once."""
    seen: list[bytes] = []
    with busy_server(seen) as address:
        job = Job(addresses=(address,), dialect="evalstop", runs=("a",), clients=1, batch=1, seconds=SOON, requests=3)
        found = asyncio.run(bring(job))
    assert (found.observations, found.refused) == (3, 3)
    assert seen[::2] == seen[1::2]
    assert len(set(seen)) == 3


def test_a_connection_that_ends_early_fails_the_load() -> None:
    """An answer that never comes is no measurement."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def hear_and_hang_up() -> None:
            with closing(listening.accept()[0]) as heard:
                heard.recv(10)

        threading.Thread(target=hear_and_hang_up, daemon=True).start()
        job = Job(
            addresses=(listening.getsockname(),), dialect="evalstop", runs=("a",), clients=1, batch=1, seconds=SOON
        )
        with pytest.raises(LoadRefused, match="closed before the answer"):
            asyncio.run(bring(job))


def test_a_disk_can_be_made_slower(tmp_path: Path) -> None:
    """The library waits after each fsync of a process that it is loaded into; what is written is durable as before."""
    library = compiled(tmp_path, delay_ms=50)
    if library is None:
        pytest.skip("no C compiler")
    code = (
        "import sys; from pathlib import Path; from evalstop_lab.benchmarks.slow_disk import sync_ms;"
        " print(sync_ms(Path(sys.argv[1]), 3))"
    )
    slower = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(slower.stdout) >= 50
    assert sync_ms(tmp_path, 3) > 0
