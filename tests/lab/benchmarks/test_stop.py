"""`make bench-stop` stops real trainers and measures the time on their clocks."""

from __future__ import annotations

import json
from itertools import product

import pytest
from evalstop_lab.benchmarks import stop

pytestmark = pytest.mark.real


def test_stops_and_parks_are_timed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One trainer per action and database gets SIGTERM after its eval and reports the time."""
    monkeypatch.setattr("sys.argv", ["bench-stop", "--database-url", postgres_url, "--stops", "1", "--json"])
    assert stop.main() == 0
    report = json.loads(capsys.readouterr().out)["from_eval_to_sigterm"]
    assert {(row["database"], row["action"]) for row in report} == set(
        product(("SQLite", "PostgreSQL"), ("stop", "park"))
    )
    for row in report:
        assert 0 < row["median_ms"] == row["p90_ms"]
