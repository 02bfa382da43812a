"""The ingestion benchmark: its load generator, the order of contenders, its medians and targets."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evalstop_lab.benchmarks.ingest.command import (
    Cell,
    build_parser,
    compute_targets,
    main,
    measure_in_turns,
    print_report,
    rotate,
    run,
)
from evalstop_lab.benchmarks.ingest.contenders import AGAINST, BOUND, EVALSTOP, Contender, Measurement, Shape, is_wanted
from evalstop_lab.benchmarks.ingest.load import Job, Load, find_percentile, generate_load, generate_requests
from evalstop_lab.benchmarks.processes import JobFailed, Server
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.fixtures.http_handler import serve_handler

ROOT = Path(__file__).parents[3]
LONG_SECONDS = 600.0  # loads end much earlier, after their requests


def build_measurement(observations: int = 100, server_us: float = 1.0, database_us: float = 1.0) -> Measurement:
    load = Load(
        observations=observations,
        requests=observations,
        retried=0,
        seconds=1.0,
        p50_ms=1.0,
        p99_ms=2.0,
        generator_cpu=0.1,
    )
    return Measurement(load, server_us, database_us)


@dataclass
class FakeContender:
    """Has two loads, can fail under one of them in the second round, and records its turns."""

    name: str
    turns: list[str]
    fails: bool = False
    shapes: tuple[Shape, ...] = (Shape(1, 8), Shape(10, 8))

    def measure(self, shape: Shape, seconds: float) -> Measurement:
        self.turns.append(f"{self.name}{shape.batch}")
        if self.fails and shape.batch == 10 and self.turns.count(f"{self.name}10") == 2:
            raise JobFailed("it broke")
        return build_measurement()


def test_contenders_take_turns_and_a_failure_costs_one_cell() -> None:
    """The order rotates with each load and round, and a failed contender loses only the cell of its load."""
    turns: list[str] = []
    progress: list[str] = []
    contenders = [FakeContender("a", turns), FakeContender("b", turns, fails=True)]
    shapes = [Shape(1, 8), Shape(10, 8), Shape(100, 8)]
    cells, failures = measure_in_turns(contenders, shapes, 3, 0.1, progress.append)
    assert " ".join(turns) == "a1 b1 b10 a10 b1 a1 a10 b10 a1 b1 a10"
    assert {key: len(cell.rounds) for key, cell in cells.items()} == {
        ("a", Shape(1, 8)): 3,
        ("b", Shape(1, 8)): 3,
        ("a", Shape(10, 8)): 3,
    }
    assert failures == ["it broke"]
    assert len(progress) == 12


class FakeLoadGenerator(Executor):
    """Returns a prepared result."""

    def __init__(self, result: Load) -> None:
        self._result = result

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class FakeRunServer(BaseHTTPRequestHandler):
    """Answers each request with the id of a run."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"id": "x"}')


@pytest.mark.parametrize("stored", [99, 100, 101])
def test_load_fails_unless_acknowledged_observations_are_stored(stored: int) -> None:
    """The number of stored observations must equal the number of acknowledged ones."""
    with serve(FakeRunServer) as address:
        server = Server(address, 1)
        contender = Contender("x", FakeLoadGenerator(build_measurement(100).load), (), server, lambda _: stored)
        if stored == 100:
            assert contender.measure(Shape(100, 8), 0.1).load.observations == 100
        else:
            with pytest.raises(JobFailed, match=f"acknowledged 100 observations and stored {stored}"):
                contender.measure(Shape(100, 8), 0.1)


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[tuple[str, int]]:
    """Answer requests with this handler; yields host and port."""
    with serve_handler(handler) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


@given(st.sampled_from([1, 10, 100, 1000]), st.integers(0, 50))
def test_requests_carry_every_step_once_in_order(batch: int, count: int) -> None:
    """Steps increase by one from the first, 1 observation in 20 is an eval, and Content-Length is correct."""
    requests = generate_requests("r", batch, "h:1", "esk_x", first=60)
    observations = []
    for _ in range(count):
        head, _, body = next(requests).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        assert head.startswith(
            b"POST /api/v1/runs/r/observations HTTP/1.1\r\nHost: h:1\r\nAuthorization: Bearer esk_x\r"
        )
        observations += json.loads(body)["observations"]
    assert [item["step"] for item in observations] == list(range(60, 60 + len(observations)))
    assert all((item["metric"] == "eval") == (item["step"] % 20 == 0) for item in observations)


@given(st.lists(st.text(), min_size=1), st.integers(0, 100))
def test_each_item_is_first_in_turn(items: list[str], turn: int) -> None:
    """A rotation keeps all items and their order, and starts with the next one each turn."""
    start = turn % len(items)
    assert rotate(items, turn) == items[start:] + items[:start]
    assert rotate([], turn) == []


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_percentile_is_a_value_that_was_measured(values: list[float], share: float) -> None:
    """At least this share of the values does not exceed it, and it is the smallest such value."""
    percentile = find_percentile(sorted(values), share)
    assert sum(value <= percentile for value in values) >= share * len(values)
    assert sum(value < percentile for value in values) < share * len(values) or percentile == min(values)


def test_percentile_of_no_values_is_nan() -> None:
    """Without latencies the percentile is NaN."""
    assert math.isnan(find_percentile([], 0.5))


def test_targets_are_medians_of_ratios_within_each_round() -> None:
    """A target compares two cells round by round; it is met at its limit, and absent if one was not measured."""
    shape = Shape(1, 64)
    ours = Cell(EVALSTOP, shape, tuple(build_measurement(rate, 2.0, 1.4) for rate in (65, 50, 90)))
    bound = Cell(BOUND, shape, tuple(build_measurement(rate) for rate in (100, 100, 100)))
    targets = {item.name: item for item in compute_targets({(EVALSTOP, shape): ours, (BOUND, shape): bound})}
    rate = targets["1 x 64: rate, EvalStop to bound"]
    assert (rate.median, rate.lowest, rate.highest, rate.met) == (0.65, 0.5, 0.9, True)
    assert targets["1 x 64: CPU time of the service, EvalStop to bound"].met
    assert not targets["1 x 64: CPU time of PostgreSQL, EvalStop to bound"].met
    assert len(targets) == 3


def test_figure_too_small_to_measure_gives_no_ratio() -> None:
    """There is no ratio to a CPU time of 0, which is below the clock's resolution."""
    shape = Shape(1, 64)
    ours = Cell(EVALSTOP, shape, (build_measurement(),))
    bound = Cell(BOUND, shape, (build_measurement(database_us=0.0),))
    names = {item.name for item in compute_targets({(EVALSTOP, shape): ours, (BOUND, shape): bound})}
    assert names == {"1 x 64: rate, EvalStop to bound", "1 x 64: CPU time of the service, EvalStop to bound"}


@pytest.mark.nightly
@pytest.mark.real
def test_benchmark_measures_service_bound_and_another_checkout(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Service, bound and a checkout at a path store what they acknowledge, and the report has all figures."""
    names = [EVALSTOP, BOUND, AGAINST]
    arguments = ["--database-url", postgres_url, "--rounds", "1", "--seconds", "0.2", "--loads", "1 x 64"]
    measured_report = run(build_parser().parse_args([*arguments, "--against", str(ROOT), "--only", *names]))
    report = json.loads(msgspec.json.encode(measured_report))
    assert report["failures"] == []
    assert {cell["contender"] for cell in report["cells"]} == set(names)
    for cell in report["cells"]:
        (measured,) = cell["rounds"]
        assert measured["load"]["observations"] > 0
        assert measured["server_us"] > 0
        assert measured["database_us"] > 0
    print_report(Console(width=160), measured_report)
    assert "of the bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("only", "wanted"),
    [(None, {EVALSTOP, BOUND, AGAINST}), ([EVALSTOP], {EVALSTOP, AGAINST}), ([AGAINST], {AGAINST}), ([BOUND], {BOUND})],
)
def test_other_checkout_is_measured_with_this_one(only: list[str] | None, wanted: set[str]) -> None:
    """A selection of this checkout includes the other one, which is there on request only."""
    assert {name for name in (EVALSTOP, BOUND, AGAINST) if is_wanted(only, name)} == wanted


def test_missing_database_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without PostgreSQL the exit code is 2, and the message says what to set."""
    monkeypatch.delenv("TEST_DATABASE_URL", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["--quick"])
    assert "TEST_DATABASE_URL" in capsys.readouterr().err


class FakeBusyServer(BaseHTTPRequestHandler):
    """Refuses every other request, and closes the connection after each answer."""

    protocol_version = "HTTP/1.1"
    bodies: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append(body)
        busy = len(self.bodies) % 2 == 1
        self.send_response(503 if busy else 200)
        if busy:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_refused_request_is_sent_again() -> None:
    """After a 503 the same observations are sent again, and counted once."""
    bodies: list[bytes] = []
    with serve(type("Handler", (FakeBusyServer,), {"bodies": bodies})) as address:
        job = Job(addresses=(address,), runs=("a",), clients=1, batch=1, seconds=LONG_SECONDS, requests=3)
        result = asyncio.run(generate_load(job))
    assert (result.observations, result.retried) == (3, 3)
    assert bodies[::2] == bodies[1::2]
    assert len(set(bodies)) == 3


@contextmanager
def answer_once(*segments: bytes) -> Iterator[Job]:
    """Answer one request with these segments, and close the connection; yields a job of one request."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def answer() -> None:
            with closing(listening.accept()[0]) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.recv(10_000)
                for segment in segments:
                    connection.sendall(segment)
                    time.sleep(0.01)

        threading.Thread(target=answer, daemon=True).start()
        address = listening.getsockname()
        yield Job(addresses=(address,), runs=("a",), clients=1, batch=1, seconds=LONG_SECONDS, requests=1)


def test_split_response_is_read_to_its_end() -> None:
    """A response that arrives in several segments acknowledges its request."""
    with answer_once(b"HTTP/1.1 200 OK\r\ncontent-le", b"ngth: 5\r\n\r\nhe", b"llo") as job:
        assert asyncio.run(generate_load(job)).requests == 1


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((), "closed before the response"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe",), "closed before the response"),
        ((b"SSH-2.0\r\n\r\n",), "did not answer in HTTP"),
        ((b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\ngone",), "answered 404: gone"),
    ],
)
def test_wrong_answer_fails_the_load(segments: tuple[bytes, ...], message: str) -> None:
    """A load fails if a connection is closed before the response, or the response is none, or an error."""
    with answer_once(*segments) as job, pytest.raises(JobFailed, match=message):
        asyncio.run(generate_load(job))
