"""Roles that a run's metrics get by the project's patterns and by their names."""

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


def test_patterns_come_first() -> None:
    """A pattern's word counts for more than what is recognised, and each role tells where it comes from."""
    found = metric_roles.assign_roles({"eval_accuracy", "odd/mean@1", "reward", "kl"}, {}, PATTERNS)
    assert found.metrics["odd/mean@1"] == {"role": "eval", "direction": "maximize"}
    assert "eval_accuracy" not in found.metrics
    assert found.recognition.sources["odd/mean@1"] == "pattern"
    assert found.recognition.sources["reward"] != "pattern"
    assert found.recognition.warnings == []


def test_first_pattern_that_fits() -> None:
    """Of two patterns that fit a name the first counts, also when the second gives another role."""
    patterns = [{"pattern": "a", "role": "proxy"}, {"pattern": "*", "role": "eval", "direction": "minimize"}]
    found = metric_roles.assign_roles({"a", "b", "c"}, {}, patterns)
    assert found.metrics == {
        "a": {"role": "proxy", "direction": "maximize"},
        "b": {"role": "eval", "direction": "minimize"},
    }


def test_no_gold_is_told() -> None:
    """Where no metric is gold, that is a warning."""
    assert NO_EVAL in metric_roles.assign_roles({"reward", "kl"}, {}, []).recognition.warnings
    assert NO_EVAL in metric_roles.NOTHING_YET.warnings


@given(names=NAMES, patterns=st.sampled_from([[], PATTERNS, PATTERNS[1:]]))
def test_law(names: list[str], patterns: list[dict[str, str]]) -> None:
    """At most one metric a role, each with its source, whatever the order of the names."""
    found = metric_roles.assign_roles(names, {}, patterns)
    roles = [role["role"] for role in found.metrics.values()]
    assert len(roles) == len(set(roles))
    assert set(found.recognition.sources) == set(found.metrics)
    assert found == metric_roles.assign_roles(names[::-1], {}, patterns)
