"""The rate of false stops by kind of disturbance, for networks with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
from evalstop_detectors.posterior.features import FEATURES
from evalstop_detectors.posterior.network import HIDDEN, OUTPUTS, Network, load_network
from evalstop_lab.posterior.left_out import FALSE_STOPS, judge_runs, measure_false_stops
from evalstop_lab.posterior.prior import KINDS

pytestmark = pytest.mark.slow


def test_threshold_stops_the_requested_share() -> None:
    """With the shipped network about 1 % of the healthy runs are stopped, and many more of those that turned."""
    shares = measure_false_stops(load_network("gru-1"), (), 600)
    assert shares["healthy runs"].low <= FALSE_STOPS <= shares["healthy runs"].high
    assert shares["recall"].low > 0.3
    assert set(KINDS) <= set(shares)


def test_excluded_kinds_are_not_in_the_runs() -> None:
    """Runs drawn without a kind have none of it, and other runs have some."""
    network = load_network("gru-1")
    assert not any("dips" in run.kinds for run, _ in judge_runs(network, 1, 100, ("dips",)))
    assert any("dips" in run.kinds for run, _ in judge_runs(network, 1, 100, ()))


def test_only_evals_between_peak_and_end_count() -> None:
    """An always certain network has finite odds only between the peak and the last eval."""
    rows = 3 * HIDDEN
    always_certain = Network(
        np.zeros((rows, FEATURES)), np.zeros(rows), np.zeros((rows, HIDDEN)), np.zeros(rows),
        np.zeros((OUTPUTS, HIDDEN)), np.full(OUTPUTS, 1e6),
    )  # fmt: skip
    for run, odds in judge_runs(always_certain, 2, 200, ()):
        first = max(2, run.peak + 1 if run.turned else 0)
        assert np.isfinite(odds) == (first < len(run.scores) - 1)
