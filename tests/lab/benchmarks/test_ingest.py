"""The ingestion benchmark: its load, the order of contenders, its medians and targets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from evalstop_lab.benchmarks.ingest.command import compute_targets, main, measure_in_turns, rotate
from evalstop_lab.benchmarks.ingest.contenders import AGAINST, BOUND, EVALSTOP, Measurement, Shape, is_wanted
from evalstop_lab.benchmarks.load import Load, run_load
from evalstop_lab.benchmarks.processes import JobFailed
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.http_handler import serve_handler

ROOT = Path(__file__).parents[3]
needs_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")


def build_measurement(observations: int = 100, server_us: float = 1.0, database_us: float = 1.0) -> Measurement:
    load = Load(observations=observations, requests=observations, refused=0, seconds=1.0, p50_ms=1.0, p99_ms=2.0)
    return Measurement(load, server_us, database_us)


@dataclass
class FakeContender:
    """Has two loads, can fail under one of them in the second round, and records its turns."""

    name: str
    turns: list[str]
    fails: bool = False
    shapes: tuple[Shape, ...] = (Shape(1, 8), Shape(10, 8))

    def measure(self, shape: Shape, seconds: int) -> Measurement:
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
    cells, failures = measure_in_turns(contenders, shapes, 3, 1, progress.append)
    assert " ".join(turns) == "a1 b1 b10 a10 b1 a1 a10 b10 a1 b1 a10"
    assert {key: len(rounds) for key, rounds in cells.items()} == {
        ("a", Shape(1, 8)): 3,
        ("b", Shape(1, 8)): 3,
        ("a", Shape(10, 8)): 3,
    }
    assert failures == ["it broke"]
    assert len(progress) == 12


class FakeService(BaseHTTPRequestHandler):
    """Acknowledges observations, or refuses every second request, and keeps the bodies."""

    protocol_version = "HTTP/1.1"
    bodies: dict[str, list[dict[str, object]]]
    refuses = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        received = self.bodies.setdefault(self.path, [])
        received += body["observations"]
        refused = self.refuses and len(received) % 2 == 1
        self.send_response(503 if refused else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve(refuses: bool = False) -> Iterator[tuple[tuple[str, int], dict[str, list[dict[str, object]]]]]:
    """Serve a fake service; yields its address and the observations by path."""
    bodies: dict[str, list[dict[str, object]]] = {}
    with serve_handler(type("Handler", (FakeService,), {"bodies": bodies, "refuses": refuses})) as url:
        yield ("127.0.0.1", int(url.rpartition(":")[2])), bodies


@needs_wrk
@pytest.mark.parametrize("batch", [1, 30])
def test_each_run_gets_every_step_once_in_order(batch: int) -> None:
    """Runs take turns; steps increase by one from the first, and 1 observation in 20 is an eval."""
    with serve() as (address, bodies):
        load = run_load([address], ["a", "b"], "esk_x", clients=1, batch=batch, requests=80, first_step=60)
    assert (load.requests, load.observations, load.refused) == (80, 80 * batch, 0)
    assert set(bodies) == {"/api/v1/runs/a/observations", "/api/v1/runs/b/observations"}
    for observations in bodies.values():
        assert len(observations) >= 40 * batch
        assert [item["step"] for item in observations] == list(range(60, 60 + len(observations)))
        assert all((item["metric"] == "eval") == (int(str(item["step"])) % 20 == 0) for item in observations)


@needs_wrk
def test_refused_requests_are_not_acknowledged() -> None:
    """A refused request counts as such, and its observations don't."""
    with serve(refuses=True) as (address, _):
        load = run_load([address], ["a"], "esk_x", clients=1, batch=1, requests=10)
    assert (load.requests, load.observations, load.refused) == (10, 5, 5)


@needs_wrk
def test_load_fails_without_a_server() -> None:
    """A load on a port where nobody listens raises JobFailed."""
    with pytest.raises(JobFailed):
        run_load([("127.0.0.1", 9)], ["a"], "esk_x", clients=1, batch=1, seconds=1)


@given(st.lists(st.text(), min_size=1), st.integers(0, 100))
def test_each_item_is_first_in_turn(items: list[str], turn: int) -> None:
    """A rotation keeps all items and their order, and starts with the next one each turn."""
    start = turn % len(items)
    assert rotate(items, turn) == items[start:] + items[:start]
    assert rotate([], turn) == []


def test_targets_are_medians_of_ratios_within_each_round() -> None:
    """A target compares two cells round by round; it is met at its limit, and absent if one was not measured."""
    shape = Shape(1, 64)
    ours = [build_measurement(rate, 2.0, 1.4) for rate in (65, 50, 90)]
    bound = [build_measurement(rate) for rate in (100, 100, 100)]
    targets = {item.name: item for item in compute_targets({(EVALSTOP, shape): ours, (BOUND, shape): bound})}
    rate = targets["1 x 64: rate, EvalStop to bound"]
    assert (rate.median, rate.lowest, rate.highest, rate.met) == (0.65, 0.5, 0.9, True)
    assert targets["1 x 64: CPU time of the service, EvalStop to bound"].met
    assert not targets["1 x 64: CPU time of PostgreSQL, EvalStop to bound"].met
    assert len(targets) == 3


def test_figure_too_small_to_measure_gives_no_ratio() -> None:
    """There is no ratio to a CPU time of 0, which is below the clock's resolution."""
    shape = Shape(1, 64)
    ours = [build_measurement()]
    bound = [build_measurement(database_us=0.0)]
    names = {item.name for item in compute_targets({(EVALSTOP, shape): ours, (BOUND, shape): bound})}
    assert names == {"1 x 64: rate, EvalStop to bound", "1 x 64: CPU time of the service, EvalStop to bound"}


@needs_wrk
@pytest.mark.real
def test_benchmark_measures_service_bound_and_another_checkout(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Service, bound and a checkout at a path store what they acknowledge, and the report has all figures."""
    names = [EVALSTOP, BOUND, AGAINST]
    arguments = ["--database-url", postgres_url, "--rounds", "1", "--seconds", "1", "--loads", "1 x 64", "--json"]
    assert main([*arguments, "--against", str(ROOT), "--only", *names]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == []
    assert {cell["contender"] for cell in report["cells"]} == set(names)
    for cell in report["cells"]:
        (measured,) = cell["rounds"]
        assert measured["load"]["observations"] > 0
        assert measured["server_us"] > 0
        assert measured["database_us"] > 0
    assert report["targets"]


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
