"""What is known of k-decline from elsewhere: how often it stops flat runs, and how it does on real ones."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_detectors import POLICIES, MetricRole, Observation, Policy, policy_from_document, replay

from tests.detectors.strategies import eval_series

RUNS = Path(__file__).parent.parent / "data" / "rlhf_runs_public.jsonl"
FLAT_EVALS = 50
SIMULATED_RUNS = 2000


def k_decline_policy(k: int) -> Policy:
    return policy_from_document({"name": f"k{k}", "members": [{"detector": "k_decline", "params": {"k": k}}]})


def share_of_orders_with_a_fall(n: int, k: int) -> float:
    """The share of all orders of n distinct values with k declines in a row somewhere.

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


@pytest.mark.parametrize(("k", "known"), [(3, 0.83), (5, 0.053)])
def test_flat_runs_are_stopped_by_chance_alone(k: int, known: float) -> None:
    """Of runs of 50 flat noisy evals k = 3 stops .83 and k = 5 .05, as orders are counted and as simulated."""
    exact = share_of_orders_with_a_fall(FLAT_EVALS, k)
    assert exact == pytest.approx(known, abs=0.0005)
    scores = np.random.default_rng(20260101).normal(size=(SIMULATED_RUNS, FLAT_EVALS))
    stopped = sum(replay(k_decline_policy(k), eval_series(run.tolist())).verdict.stops for run in scores)
    four_standard_errors = 4 * math.sqrt(exact * (1 - exact) / SIMULATED_RUNS)
    assert stopped / SIMULATED_RUNS == pytest.approx(exact, abs=four_standard_errors)


def test_the_size_of_the_noise_does_not_matter() -> None:
    """On a plateau k-decline stops the same runs at the same step, be the noise large or small."""
    scores = np.random.default_rng(7).normal(size=(50, FLAT_EVALS))
    for run in scores:
        loud, quiet = (
            replay(POLICIES["paper"], eval_series((run * scale).tolist())).verdict for scale in (2**9, 2**-9)
        )
        assert (loud.verdict, loud.step, loud.turn_step) == (quiet.verdict, quiet.step, quiet.turn_step)


def test_the_level_rule_needs_a_tolerance() -> None:
    """Without a tolerance the level rule stops every flat noisy run; with five times the noise it stops none."""
    tolerant = level_policy(5.0)
    for run in np.random.default_rng(11).normal(size=(100, FLAT_EVALS)):
        evals = eval_series(run.tolist())
        assert replay(level_policy(0.0), evals).verdict.stops
        assert not replay(tolerant, evals).verdict.stops


def level_policy(tolerance: float) -> Policy:
    member = {"detector": "k_below_best", "params": {"k": 5, "tolerance": tolerance}}
    return policy_from_document({"name": "tolerant", "members": [member]})


@pytest.fixture(scope="module")
def real_runs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RUNS.read_text().splitlines()]


def stop_index(run: dict[str, Any], policy: Policy) -> int | None:
    """At which eval the policy stops the logged run, counted from 0."""
    log = run["log"]
    observations = [
        Observation(role, step, value)
        for role, key in ((MetricRole.EVAL, "gold"), (MetricRole.PROXY, "proxy"), (MetricRole.KL, "kl"))
        for step, value in zip(log["step"], log[key], strict=True)
    ]
    verdict = replay(policy, observations).verdict
    return log["step"].index(verdict.step) if verdict.stops else None


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (POLICIES["paper"], (47, 7, 69)),
        (level_policy(0.0), (45, 11, 95)),
        (level_policy(0.1), (50, 6, 71)),
        (level_policy(0.2), (53, 2, 31)),
        (level_policy(0.3), (48, 1, 20)),
        (level_policy(0.5), (40, 0, 3)),
    ],
)
def test_stops_of_real_runs(real_runs: list[dict[str, Any]], policy: Policy, expected: tuple[int, int, int]) -> None:
    """Of 56 real runs that turn, so many are stopped from the peak on and before it, and of 97 others so many."""
    found = [(run["truth_label"], stop_index(run, policy)) for run in real_runs]
    turned = [(label["peak_eval"], stop) for label, stop in found if label["label"] == "hacking"]
    others = [stop for label, stop in found if label["label"] != "hacking"]
    right = sum(stop is not None and stop >= peak for peak, stop in turned)
    too_early = sum(stop is not None and stop < peak for peak, stop in turned)
    assert (len(turned), len(others)) == (56, 97)
    assert (right, too_early, sum(stop is not None for stop in others)) == expected
