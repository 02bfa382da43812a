"""Measures a trained network on kinds of disturbance that were left out of its training prior."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np
from evalstop_detectors.posterior.network import HIDDEN, Network, round_features
from numpy.typing import NDArray

from evalstop_lab.posterior.batches import to_batch
from evalstop_lab.posterior.prior import KINDS, DrawnRun, draw_run
from evalstop_lab.worlds.scoring import Share, wilson

FALSE_STOPS = 0.01
CALIBRATION_SEED, REPORTING_SEED = 997, 998
_BATCH = 128
_SOONEST = 3  # the detector gives no evidence before this many evals


def measure_false_stops(network: Network, without: Collection[str], runs: int) -> dict[str, Share]:
    """False stops among healthy runs of the whole prior, and among those with each kind of `KINDS`; recall in the rest.

    The threshold stops `FALSE_STOPS` of `runs` calibration runs that have nothing of the kinds `without`, as those that
    the network was trained on; the shares are of `runs` others, in which every kind occurs. A turned run that would be
    stopped before its peak is not found.
    """
    calibration = np.array(
        [odds for run, odds, _ in judge_runs(network, CALIBRATION_SEED, runs, without) if not run.turned]
    )
    threshold = float(np.quantile(calibration, 1 - FALSE_STOPS)) if len(calibration) else math.inf
    judged = [
        (run, early < threshold <= odds if run.turned else odds >= threshold)
        for run, odds, early in judge_runs(network, REPORTING_SEED, runs, ())
    ]
    healthy = [(run.kinds, stopped) for run, stopped in judged if not run.turned]
    turned = [stopped for run, stopped in judged if run.turned]
    shares = {"recall": wilson(turned.count(True), len(turned)), "healthy runs": _share([s for _, s in healthy])}
    return shares | {kind: _share([stopped for kinds, stopped in healthy if kind in kinds]) for kind in KINDS}


def judge_runs(
    network: Network, seed: int, runs: int, without: Collection[str]
) -> Iterator[tuple[DrawnRun, float, float]]:
    """Draw runs; with each comes the highest log odds of having turned, of a run that turned those from its peak on and
    those before. The last eval does not count: to stop there saves nothing."""
    rng = np.random.default_rng(seed)
    drawn = sorted((draw_run(rng, without=tuple(without)) for _ in range(runs)), key=lambda run: len(run.scores))
    for begin in range(0, runs, _BATCH):
        group = drawn[begin : begin + _BATCH]
        odds = _log_odds(network, group)
        for index, run in enumerate(group):
            first = max(_SOONEST - 1, run.peak + 1 if run.turned else 0)
            early, late = odds[_SOONEST - 1 : first, index], odds[first : len(run.scores) - 1, index]
            yield run, float(np.max(late, initial=-math.inf)), float(np.max(early, initial=-math.inf))


def _log_odds(network: Network, runs: list[DrawnRun]) -> NDArray[np.float64]:
    """Of shape (evals, runs)."""
    features = to_batch(runs).features
    hidden = np.zeros((HIDDEN, len(runs)))
    odds = np.empty(features.shape[:2])
    for at, row in enumerate(features):
        hidden = network.step(hidden, round_features(row.T))
        odds[at] = network.read(hidden)[0]
    return odds


def _share(stopped: list[bool]) -> Share:
    return wilson(stopped.count(True), len(stopped))
