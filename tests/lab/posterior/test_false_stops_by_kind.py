"""False stops by kind of disturbance, of networks whose answer is known."""

from __future__ import annotations

import numpy as np
from evalstop_detectors.posterior.features import FEATURES
from evalstop_detectors.posterior.network import HIDDEN, OUTPUTS, Network, load_network
from evalstop_lab.posterior.left_out import FALSE_STOPS, judge_runs, measure_false_stops
from evalstop_lab.posterior.prior import KINDS


def test_the_threshold_stops_the_share_that_it_was_set_for() -> None:
    """Of the shipped network about 1 % of the healthy runs are stopped, and of those that turned many more."""
    shares = measure_false_stops(load_network("gru-1"), (), 600)
    assert shares["healthy runs"].low <= FALSE_STOPS <= shares["healthy runs"].high
    assert shares["recall"].low > 0.3
    assert set(KINDS) <= set(shares)


def test_kinds_left_out_have_no_part_in_the_threshold() -> None:
    """Calibration runs have none of them, others do."""
    network = load_network("gru-1")
    assert not any("dips" in run.kinds for run, _ in judge_runs(network, 1, 100, ("dips",)))
    assert any("dips" in run.kinds for run, _ in judge_runs(network, 1, 100, ()))


def test_what_comes_too_soon_or_at_the_end_does_not_count() -> None:
    """A network that is always sure has nothing to say of a run before its peak or at its last eval."""
    rows = 3 * HIDDEN
    sure = Network(
        np.zeros((rows, FEATURES)), np.zeros(rows), np.zeros((rows, HIDDEN)), np.zeros(rows),
        np.zeros((OUTPUTS, HIDDEN)), np.full(OUTPUTS, 1e6),
    )  # fmt: skip
    for run, odds in judge_runs(sure, 2, 200, ()):
        first = max(2, run.peak + 1 if run.turned else 0)
        assert np.isfinite(odds) == (first < len(run.scores) - 1)
