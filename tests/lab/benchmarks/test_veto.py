"""Vetoes that a fault refused are heard when they are repeated: `make bench-veto`, in small."""

from __future__ import annotations

import subprocess

import pytest
from evalstop_lab.benchmarks.veto.cycles import run_kind

pytestmark = pytest.mark.real


@pytest.mark.parametrize(("database", "fault"), [("PostgreSQL", "outage"), ("SQLite", "full disk")])
def test_refused_veto_is_heard_when_it_is_repeated(database: str, fault: str) -> None:
    """No stop is handed over before the veto is repeated, and none after it."""
    if fault == "full disk" and subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("mounting a small disk is not permitted")
    counts = run_kind(database, fault, cycles=1, runs=2, window_seconds=4.0, seed=1)
    assert (counts["heard"], counts["still vetoed"], counts["arrived"], counts["error"]) == (2, 2, 0, 0)
