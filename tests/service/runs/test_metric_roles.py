"""Metric roles by metric names."""

from __future__ import annotations

from evalstop_detectors.roles.recognition import NO_EVAL
from evalstop_service.runs import metric_roles
from hypothesis import given
from hypothesis import strategies as st

from tests.service.project_fixture import ProjectFixture

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


def test_direction_that_contradicts_the_name_is_a_warning(project: ProjectFixture) -> None:
    """An error rate that is maximized, as by a default of transformers, and a score that is minimized are warned of."""
    for metric, direction, is_wrong in (
        *(("eval_wer", "maximize", True), ("eval_wer", "minimize", False), ("eval_f1", "minimize", True)),
        *(("odd", "minimize", False), ("odd", "maximize", False)),
    ):
        run = project.open_run(metrics={metric: {"role": "eval", "direction": direction}})
        warnings = metric_roles.describe_roles(run).warnings
        assert [metric in warning and "worst checkpoint" in warning for warning in warnings] == [True] * is_wrong


@given(names=NAMES)
def test_each_role_has_at_most_one_metric(names: list[str]) -> None:
    """Whatever the order of names, each role has at most one metric, and each metric its source."""
    assigned = metric_roles.assign_roles(names, {}, load_no_values)
    roles = [role["role"] for role in assigned.metrics.values()]
    assert len(roles) == len(set(roles))
    assert set(assigned.recognition.sources) == set(assigned.metrics)
    assert assigned == metric_roles.assign_roles(names[::-1], {}, load_no_values)
