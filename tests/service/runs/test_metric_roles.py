"""Metric roles by metric names."""

from __future__ import annotations

from evalstop_detectors.roles.recognition import NO_EVAL
from evalstop_service.runs import metric_roles
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.lists(
    st.sampled_from(["loss", "reward", "kl", "eval_reward", "eval_accuracy", "val-core/x/mean@4", "critic/score/mean"]),
    unique=True,
)


def load_no_values(metric: str) -> list[float]:
    return []


def test_missing_eval_is_a_warning() -> None:
    """Without an eval metric there is a warning."""
    assert NO_EVAL in metric_roles.assign_roles({"reward", "kl"}, {}, load_no_values).recognition.warnings
    assert NO_EVAL in metric_roles.NOTHING_YET.warnings


@given(names=NAMES)
def test_each_role_has_at_most_one_metric(names: list[str]) -> None:
    """Whatever the order of names, each role has at most one metric, and each metric its source."""
    assigned = metric_roles.assign_roles(names, {}, load_no_values)
    roles = [role["role"] for role in assigned.metrics.values()]
    assert len(roles) == len(set(roles))
    assert set(assigned.recognition.sources) == set(assigned.metrics)
    assert assigned == metric_roles.assign_roles(names[::-1], {}, load_no_values)
