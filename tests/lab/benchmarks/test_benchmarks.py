"""The benchmarks: the load of ingestion, the runs of pages, the steps of detectors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from evalstop_lab.benchmarks.ingest import Shape, main, run_load
from evalstop_lab.benchmarks.pages import RUNNING, copy_runs
from evalstop_lab.benchmarks.processes import libpq_url
from evalstop_lab.service_process import Service
from evalstop_service.store.database import Database

from tests.conftest import ClonePostgres
from tests.fixtures.http_server import serve_handler
from tests.service.project_fixture import set_up_project

ROOT = Path(__file__).parents[3]
needs_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")


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
def serve(refuses: bool = False) -> Iterator[tuple[Service, dict[str, list[dict[str, object]]]]]:
    """Serve a fake service; yields it and the observations by path."""
    bodies: dict[str, list[dict[str, object]]] = {}
    with serve_handler(type("Handler", (FakeService,), {"bodies": bodies, "refuses": refuses})) as url:
        yield Service(url, "esk_x"), bodies


@needs_wrk
@pytest.mark.parametrize("batch", [1, 30])
def test_each_run_gets_every_step_once_in_order(batch: int) -> None:
    """Runs take turns; steps increase by one from the first, and 1 observation in 20 is an eval."""
    with serve() as (service, bodies):
        load = run_load(service, ["a", "b"], Shape(batch, 1), requests=80, first_step=60)
    assert (load.requests, load.observations, load.refused) == (80, 80 * batch, 0)
    assert set(bodies) == {"/api/v1/runs/a/observations", "/api/v1/runs/b/observations"}
    for observations in bodies.values():
        assert len(observations) >= 40 * batch
        assert [item["step"] for item in observations] == list(range(60, 60 + len(observations)))
        assert all((item["metric"] == "eval") == (int(str(item["step"])) % 20 == 0) for item in observations)


@needs_wrk
def test_refused_requests_are_not_acknowledged() -> None:
    """A refused request counts as such, and its observations don't."""
    with serve(refuses=True) as (service, _):
        load = run_load(service, ["a"], Shape(1, 1), requests=10)
    assert (load.requests, load.observations, load.refused) == (10, 5, 5)


@needs_wrk
@pytest.mark.real
def test_benchmark_compares_with_another_checkout(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """This checkout and one in a folder store what they acknowledge under the chosen load, and each has a row."""
    arguments = ["--database-url", postgres_url, "--rounds", "1", "--seconds", "1", "--loads", "1 x 64"]
    assert main([*arguments, "--against", str(ROOT)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("1 x 64") == 2
    assert "this checkout" in printed
    assert "the other" in printed


def test_missing_database_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without PostgreSQL the exit code is 2, and the message says what to set."""
    monkeypatch.delenv("TEST_DATABASE_URL", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "TEST_DATABASE_URL" in capsys.readouterr().err


@pytest.mark.nightly
def test_runs_are_copied_with_their_decisions(clone_postgres: ClonePostgres) -> None:
    """Ended runs are copied with all columns of their decisions, and running runs up to a fleet."""
    url = clone_postgres()
    database = Database(url)
    project = set_up_project(database)
    run, _ = project.open_declining_run("ended")
    project.finish_run(run)
    project.open_run("running")
    database.close()
    runs, decisions = copy_runs(libpq_url(url), 4, 3)
    assert (runs, decisions) == (3 + RUNNING, 3)
