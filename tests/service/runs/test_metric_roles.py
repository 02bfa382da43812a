"""Metric roles by the project's patterns and by metric names."""

from __future__ import annotations

from evalstop_detectors.roles.recognition import NO_EVAL
from evalstop_service.runs import metric_roles
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.lists(
    st.sampled_from(["loss", "reward", "kl", "eval_reward", "eval_accuracy", "val-core/x/mean@4", "critic/score/mean"]),
    unique=True,
)
PATTERNS = [{"pattern": "*/mean@*", "role": "eval"}, {"pattern": "critic/*", "role": "proxy"}]


def test_patterns_take_precedence_over_names() -> None:
    """A pattern overrides recognition by name, and each role records its source."""
    assigned = metric_roles.assign_roles({"eval_accuracy", "odd/mean@1", "reward", "kl"}, {}, PATTERNS)
    assert assigned.metrics["odd/mean@1"] == {"role": "eval", "direction": "maximize"}
    assert "eval_accuracy" not in assigned.metrics
    assert assigned.recognition.sources["odd/mean@1"] == "pattern"
    assert assigned.recognition.sources["reward"] != "pattern"
    assert assigned.recognition.warnings == []


def test_first_matching_pattern_counts() -> None:
    """Of two patterns that match a name the first one counts."""
    patterns = [{"pattern": "a", "role": "proxy"}, {"pattern": "*", "role": "eval", "direction": "minimize"}]
    assigned = metric_roles.assign_roles({"a", "b", "c"}, {}, patterns)
    assert assigned.metrics == {
        "a": {"role": "proxy", "direction": "maximize"},
        "b": {"role": "eval", "direction": "minimize"},
    }


def test_missing_eval_is_a_warning() -> None:
    """Without an eval metric there is a warning."""
    assert NO_EVAL in metric_roles.assign_roles({"reward", "kl"}, {}, []).recognition.warnings
    assert NO_EVAL in metric_roles.NOTHING_YET.warnings


@given(names=NAMES, patterns=st.sampled_from([[], PATTERNS, PATTERNS[1:]]))
def test_each_role_has_at_most_one_metric(names: list[str], patterns: list[dict[str, str]]) -> None:
    """Whatever the order of names, each role has at most one metric, and each metric its source."""
    assigned = metric_roles.assign_roles(names, {}, patterns)
    roles = [role["role"] for role in assigned.metrics.values()]
    assert len(roles) == len(set(roles))
    assert set(assigned.recognition.sources) == set(assigned.metrics)
    assert assigned == metric_roles.assign_roles(names[::-1], {}, patterns)
