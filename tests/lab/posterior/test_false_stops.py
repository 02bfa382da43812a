"""The rates of false and right stops in runs of the prior, for networks with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
from evalstop_detectors.posterior.features import FEATURES
from evalstop_detectors.posterior.network import HIDDEN, OUTPUTS, PLAN_TERMS, Network, load_network
from evalstop_lab.posterior.train import FALSE_STOPS, REPORTING_SEED, judge_runs, measure_false_stops

pytestmark = pytest.mark.slow

ALL_OUTPUTS = OUTPUTS * (1 + PLAN_TERMS)
ALWAYS_CERTAIN = Network(
    np.zeros((4 * HIDDEN, FEATURES + HIDDEN)),
    np.zeros(4 * HIDDEN),
    np.zeros((ALL_OUTPUTS, HIDDEN)),
    np.repeat([1e6, 0.0], [OUTPUTS, ALL_OUTPUTS - OUTPUTS]),
)


def test_threshold_stops_the_requested_share() -> None:
    """With the shipped network about 1 % of the healthy runs are stopped, and many more of those that turned."""
    shares = measure_false_stops(load_network(), 600)
    assert shares["healthy runs"].low <= FALSE_STOPS <= shares["healthy runs"].high
    assert shares["recall"].low > 0.3


def test_only_evals_between_peak_and_end_count() -> None:
    """An always certain network has finite odds only between the peak and the last eval."""
    for run, odds, early in judge_runs(ALWAYS_CERTAIN, 2, 60):
        first = max(2, run.peak + 1 if run.turned else 0)
        assert np.isfinite(odds) == (first < len(run.scores) - 1)
        assert np.isfinite(early) == (first > 2)


def test_turn_that_is_stopped_before_its_peak_is_not_found() -> None:
    """A network that stops every run at once finds only the turns that it could not have stopped too early."""
    turned = [run for run, *_ in judge_runs(ALWAYS_CERTAIN, REPORTING_SEED, 50) if run.turned]
    found = measure_false_stops(ALWAYS_CERTAIN, 50)["recall"].hits
    assert found == sum(run.peak < 2 <= len(run.scores) - 2 for run in turned) < len(turned)
