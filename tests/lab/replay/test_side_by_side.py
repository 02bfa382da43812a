"""Runs judged side by side get, word for word, what each gets by itself."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from evalstop_detectors import POLICIES, MetricRole, Policy, policy_from_document
from evalstop_lab.replay import Roles, Run, judge
from evalstop_lab.replay.side_by_side import can_judge, judge_together
from evalstop_lab.worlds import World, sample
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.replay.conftest import patiently

ROLES = Roles(minimized=frozenset())
DROP: dict[str, Any] = {"detector": "plateau_drop", "suspect_at": 0.01, "stop_at": 0.1}
DECLINE: dict[str, Any] = {"detector": "k_decline", "params": {"k": 2, "min_delta": 0.01, "warmup_evals": 4}}
MIXED: list[dict[str, Any]] = [
    {"name": "all", "members": [DROP, DECLINE], "at_least": "all", "min_evals": 12},
    {"name": "gated", "members": [DROP, DECLINE | {"id": "falls"}], "gate": ["falls"]},
    {"name": "gold-alone", "members": [DROP | {"params": {"sigmas": 0.0, "use_proxy": False}}]},
    {"name": "watchful", "members": [DECLINE, {"detector": "non_finite", "params": {"role": "kl"}}]},
]


def logged(world: World, lost: float = 0.0) -> Run:
    """The world as a log; of the proxies the share `lost` is missing, and some are logged between evals."""
    run = Run(world.name, roles=ROLES)
    for number, row in enumerate(world.rows()):
        for role in MetricRole:
            if role in row and not (role is MetricRole.PROXY and (number * 7 % 10) / 10 < lost):
                run.add(role, 2 * row["step"], row[role], row.get(f"{role}_stderr"))
        if lost and number % 3 == 0:
            run.add(MetricRole.PROXY, 2 * row["step"] + 1, row[MetricRole.PROXY] + 0.1, None)
    return run


def policies() -> list[Policy]:
    shipped = [policy for policy in POLICIES.values() if can_judge(policy)]
    return [*shipped, *(policy_from_document(document) for document in MIXED)]


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_side_by_side_is_one_by_one(policy: Policy, lost: float) -> None:
    """Verdict, steps, reason and the evidence of each detector are the same, over runs of all lengths and noises."""
    runs = [logged(world, lost) for world in sample(60, 77)]
    assert judge_together(policy, runs) == [judge(policy, run) for run in runs]


@patiently
@given(
    policy=st.sampled_from(policies()),
    scale=st.sampled_from([1.0, 1e-300, 1e150, 1e308]),
    seed=st.integers(0, 2**32 - 1),
)
def test_so_it_is_for_runs_of_any_shape(policy: Policy, scale: float, seed: int) -> None:
    """Coarse scores, ties, huge and tiny ones, missing evals, standard errors of zero, and runs that do not fit."""
    chance = random.Random(seed)
    runs = []
    for number in range(40):
        run, level = Run(str(number), roles=ROLES), 0.0
        for step in range(chance.choice([1, 5, 30, 70])):
            level += chance.choice([0.0, 0.25, 0.25, -0.25])
            stderr = chance.choice([None, None, 0.0, 0.1])
            for role in MetricRole:
                if chance.random() < 0.9:
                    run.add(role, step, level * scale, stderr)
        if number % 9 == 0:
            run.add(MetricRole.EVAL, 100, chance.choice([math.nan, 1.0]), None)
        if run.series:
            runs.append(run)
    assert judge_together(policy, runs) == [judge(policy, run) for run in runs]


def test_what_cannot_be_judged_so_is_judged_one_by_one() -> None:
    """Policies with other detectors, or whose verdict moves with steps, get the same results, too."""
    runs = [logged(world) for world in sample(40, 5, length=20)]
    for document in (MIXED[2] | {"warmup_steps": 5}, {"name": "floor", "members": [{"detector": "floor"}]}):
        policy = policy_from_document(document)
        assert not can_judge(policy)
        assert judge_together(policy, runs) == [judge(policy, run) for run in runs]
