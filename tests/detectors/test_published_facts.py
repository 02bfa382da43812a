"""Known results of k_decline: how often they stop flat runs, and how they do on recorded runs."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from evalstop_detectors import POLICIES, Policy, policy_from_document, replay

from tests.detectors.strategies import eval_series
from tests.fixtures.recorded_runs import build_observations, load_run_records

FLAT_EVALS = 50
SIMULATED_RUNS = 2000


def build_k_decline_policy(k: int) -> Policy:
    return policy_from_document({"name": f"k{k}", "members": [{"detector": "k_decline", "params": {"k": k}}]})


def share_of_orders_with_k_declines(n: int, k: int) -> float:
    """The share of the orders of n distinct values that contain k consecutive declines.

    Orders without them have the exponential generating function 1 / sum_j (x^(jm) / (jm)! - x^(jm+1) / (jm+1)!) with
    m = k + 1 (David and Barton, Combinatorial Chance, 1962).
    """
    m = k + 1
    signs = {0: 1, 1: -1}
    denominator = [Fraction(signs.get(power % m, 0), math.factorial(power)) for power in range(n + 1)]
    inverse = [Fraction(1)]
    for power in range(1, n + 1):
        terms = (denominator[other] * inverse[power - other] for other in range(1, power + 1))
        inverse.append(-sum(terms, Fraction(0)))
    return float(1 - inverse[n])


@pytest.mark.parametrize(("k", "published"), [(3, 0.83), pytest.param(5, 0.053, marks=pytest.mark.nightly)])
def test_share_of_flat_runs_stopped_by_k_decline(k: int, published: float) -> None:
    """Of flat noisy runs of 50 evals, k = 3 stops 83 % and k = 5 stops 5 %, by counting orders and by simulation."""
    exact = share_of_orders_with_k_declines(FLAT_EVALS, k)
    assert exact == pytest.approx(published, abs=0.0005)
    scores = np.random.default_rng(20260101).normal(size=(SIMULATED_RUNS, FLAT_EVALS))
    stopped = sum(replay(build_k_decline_policy(k), eval_series(run.tolist())).verdict.stops for run in scores)
    four_standard_errors = 4 * math.sqrt(exact * (1 - exact) / SIMULATED_RUNS)
    assert stopped / SIMULATED_RUNS == pytest.approx(exact, abs=four_standard_errors)


@pytest.fixture(scope="module")
def recorded_runs() -> list[dict[str, Any]]:
    return load_run_records()


def find_stop_index(record: dict[str, Any], policy: Policy) -> int | None:
    """The index of the eval at which the policy stops a recorded run, or None."""
    verdict = replay(policy, build_observations(record["log"])).verdict
    return record["log"]["step"].index(verdict.step) if verdict.stops else None


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (POLICIES["paper"], (47, 7, 69)),
    ],
)
def test_stops_of_recorded_runs(
    recorded_runs: list[dict[str, Any]], policy: Policy, expected: tuple[int, int, int]
) -> None:
    """The numbers of stops from the peak on and before it in 56 runs that turn, and in 97 others."""
    outcomes = [(run["truth_label"], find_stop_index(run, policy)) for run in recorded_runs]
    turned = [(label["peak_eval"], stop) for label, stop in outcomes if label["label"] == "hacking"]
    others = [stop for label, stop in outcomes if label["label"] != "hacking"]
    right = sum(stop is not None and stop >= peak for peak, stop in turned)
    too_early = sum(stop is not None and stop < peak for peak, stop in turned)
    assert (len(turned), len(others)) == (56, 97)
    assert (right, too_early, sum(stop is not None for stop in others)) == expected
