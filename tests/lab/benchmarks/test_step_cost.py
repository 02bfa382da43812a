"""The benchmark of what a step costs."""

from __future__ import annotations

import pytest
from evalstop_lab.benchmarks import step_cost

pytestmark = pytest.mark.slow


def test_step_costs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every detector in the benchmark has its row."""
    assert step_cost.main(["--evals", "14", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    for name in step_cost.list_detectors():
        assert name in printed
