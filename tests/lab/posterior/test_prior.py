"""Runs of the prior: correct labels, and batches for training."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from evalstop_lab.posterior.train import draw_batches, to_batch
from evalstop_lab.worlds.prior import draw_run
from evalstop_lab.worlds.truth import LEAST_FALL


@pytest.mark.parametrize("seed", range(60))
def test_labels_agree_with_the_curve(seed: int) -> None:
    """A run that turned ends more than a tenth of its gain or range below its peak, another does not."""
    run = draw_run(np.random.default_rng(seed))
    span = float(np.ptp(run.truth))
    gain = float(run.truth.max() - run.truth[0])
    fall = float(run.truth.max() - run.truth[-1]) / (gain if gain > 0.05 * span else span)
    assert fall > LEAST_FALL - 0.02 if run.turned else fall <= LEAST_FALL + 1e-9
    assert run.truth[run.peak] >= run.truth.max() - 0.05 * span or not run.turned
    assert np.isfinite(run.scores).all()


def test_same_seed_draws_the_same_run() -> None:
    """A run depends on its generator alone."""
    first, second = (draw_run(np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first.scores, second.scores)


def test_about_half_of_the_runs_turn() -> None:
    """Of 400 runs 150 to 250 turn."""
    rng = np.random.default_rng(0)
    turned = sum(draw_run(rng, evals=40).turned for _ in range(400))
    assert 150 < turned < 250


def test_batch_labels_follow_the_runs() -> None:
    """Up to its peak no run has turned, after it a turning one has; the last eval has weight 0."""
    runs = [draw_run(np.random.default_rng(seed), evals=30) for seed in range(16)]
    batch = to_batch(runs)
    for index, run in enumerate(runs):
        n = len(run.scores)
        assert not batch.turned_for_good[: run.peak + 1, index].any()
        assert batch.turned_for_good[run.peak + 1 : n, index].all() == (run.turned or run.peak + 1 >= n)
        assert (batch.will_turn[:n, index] == run.turned).all()
        assert (batch.weight[n - 1 :, index] == 0).all()
        assert (batch.weight[: n - 1, index] > 0).all()
    assert np.array_equal(batch.features * 256, np.floor(batch.features * 256))


def test_batches_group_runs_by_length() -> None:
    """The ranges of lengths of two batches do not overlap, so that batches need little padding."""
    batches = draw_batches(np.random.default_rng(1), 64, 16)
    lengths = [(batch.weight > 0).sum(axis=0) for batch in batches]
    ranges = sorted((int(batch_lengths.min()), int(batch_lengths.max())) for batch_lengths in lengths)
    assert all(shorter[1] <= longer[0] for shorter, longer in pairwise(ranges))
