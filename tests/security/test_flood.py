"""Floods: what a veto waits beside one."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest
from evalstop_lab.benchmarks.veto import floods
from evalstop_lab.benchmarks.veto.routes import list_floods


def test_every_route_is_flooded() -> None:
    """Each route of the API, of MLflow and of the pages is in the table, but those that end what floods them."""
    floods_by_part = Counter(flood.path.split("/")[1] for flood in list_floods())
    assert floods_by_part["api"] > 50
    assert floods_by_part["mlflow"] > 15
    assert sum(floods_by_part.values()) > 130


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_veto_beside_a_flood_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Two keys of one project open runs without a pause; the other project's vetoes and pauses are answered."""
    floods.main(["--json", "--times", "2", "--only", "POST /api/v1/runs$"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["keys"] for row in rows] == [1, 2]
    for row in rows:
        assert row["statuses"]["201"] > 0
        assert not [status for status in row["statuses"] if status.startswith("5")]
