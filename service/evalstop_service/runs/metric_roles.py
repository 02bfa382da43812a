"""How the metrics of a run come by their roles: said by its trainer, matched by the project's patterns, or recognised
by their names. Pure.

    nothing yet ──> recognised ──> recognised anew, with each name that comes in for the first time
         └──────────────┴────────> corrected by a person, whose word stands

What is found depends on the names alone, not on the order in which they came. It is kept beside the run as a document:
`open` (new names may still change it), `preset` (the trainer whose names they are), `sources` and `reasons` by metric,
`warnings`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from evalstop_detectors import MetricRole, Role, match_role, recognize_roles
from evalstop_detectors.roles.recognition import NO_EVAL

from evalstop_service.runs.watched_metrics import DEFAULT_METRICS
from evalstop_service.store.runs import Run

Roles = dict[str, dict[str, str]]

MOST_NAMES = 1000
"""A run with more metrics than these keeps the roles it has: each new name is held against all others."""

MOST_REASONS = 100

NOTHING_YET: dict[str, Any] = {"open": True, "preset": None, "sources": {}, "reasons": {}, "warnings": [NO_EVAL]}


class RoleAssignment(NamedTuple):
    """Which metrics of a run play which role, and how that was found."""

    metrics: Roles
    recognition: dict[str, Any]


def is_open(run: Run) -> bool:
    """Whether the run's roles are still to be recognised when it comes with new names."""
    return run.recognition is not None and bool(run.recognition["open"])


def is_corrected(run: Run) -> bool:
    """Whether a person said the roles, so that nobody else's word about them counts."""
    return run.recognition is not None and not run.recognition["open"]


def assign_roles(
    names: Collection[str], labels: Mapping[str, str], patterns: Sequence[Mapping[str, str]]
) -> RoleAssignment:
    """The roles of metrics with these names: by the first pattern that fits, else as they are recognised."""
    by_pattern, matched = _by_pattern(names, patterns)
    found = recognize_roles(names, labels)
    taken = {role.role for role in by_pattern.values()}
    by_name = {metric: role for metric, role in found.roles.items() if role.role not in taken and metric not in matched}
    by_whom = f"preset {found.preset}" if found.preset else "names"
    reasons = {metric: f"{role.role}: by the project's pattern" for metric, role in by_pattern.items()}
    reasons |= {metric: reason for metric, reason in found.reasons.items() if metric not in matched}
    with_role = by_pattern | by_name
    first = sorted(reasons, key=lambda metric: (metric not in with_role, metric))[:MOST_REASONS]
    has_gold = any(role.role == MetricRole.EVAL for role in with_role.values())
    warnings = [warning for warning in found.warnings if warning != NO_EVAL] + ([] if has_gold else [NO_EVAL])
    return RoleAssignment(
        {metric: _written(role) for metric, role in sorted(with_role.items())},
        {
            "open": True,
            "preset": found.preset,
            "sources": {metric: "pattern" if metric in by_pattern else by_whom for metric in sorted(with_role)},
            "reasons": {metric: reasons[metric] for metric in first},
            "warnings": warnings,
        },
    )


def correct_roles(run: Run, metrics: Roles) -> RoleAssignment:
    """The roles as a person says them."""
    preset = run.recognition["preset"] if run.recognition else None
    return RoleAssignment(metrics, _settled(metrics, "person") | {"preset": preset})


def describe_roles(run: Run) -> dict[str, Any]:
    """How the run's roles were found, as it is shown."""
    if run.recognition is not None:
        return run.recognition
    return _settled(run.metrics, "default" if run.metrics == DEFAULT_METRICS else "trainer")


def _settled(metrics: Roles, source: str) -> dict[str, Any]:
    has_gold = any(role["role"] == MetricRole.EVAL for role in metrics.values())
    warnings = [] if has_gold else [NO_EVAL]
    sources = dict.fromkeys(metrics, source)
    return {"open": False, "preset": None, "sources": sources, "reasons": {}, "warnings": warnings}


def _by_pattern(
    names: Iterable[str], patterns: Sequence[Mapping[str, str]]
) -> tuple[dict[str, Role], Mapping[str, Role]]:
    """At most one metric a role, that of the earlier pattern and name; and all that fit."""
    matched: dict[str, Role] = {}
    for pattern in patterns:
        for name in sorted(names):
            role = match_role([pattern], name)
            if role is not None:
                matched.setdefault(name, role)
    first: dict[MetricRole, str] = {}
    for name, role in matched.items():
        first.setdefault(role.role, name)
    return {name: matched[name] for name in first.values()}, matched


def _written(role: Role) -> dict[str, str]:
    return {"role": role.role.value, "direction": role.direction}
