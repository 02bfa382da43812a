"""The roles of a run's metrics: given by its trainer, matched by the project's patterns, or recognized by name. Pure.

    none yet ──> recognized ──> recognized again, whenever a metric is reported for the first time
         └───────────┴────────> corrected by a person, final

Recognition depends only on the set of names, not on their order. Its result is stored with the run. No run is stopped
on a guess (`origins`) until a person gives the role: a correction that repeats the guess confirms it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from evalstop_detectors import MetricRole, Role, RoleOrigin, match_role, recognize_roles
from evalstop_detectors.roles.recognition import NO_EVAL
from msgspec.structs import replace

from evalstop_service.domain.run import MetricFields, Recognition
from evalstop_service.domain.run import RoleOrigin as RecordedOrigin
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS
from evalstop_service.store.runs import Run

Roles = dict[str, MetricFields]

MOST_NAMES = 1000
"""A run with more metrics keeps its roles: recognition compares each new name with all others."""

MOST_REASONS = 100

ASSIGNMENT_FAILED = "the roles of new metrics could not be assigned"

NOTHING_YET = Recognition(open=True, warnings=[NO_EVAL])


class RoleAssignment(NamedTuple):
    """The roles of a run's metrics, and how they were assigned."""

    metrics: Roles
    recognition: Recognition


def is_open(run: Run) -> bool:
    """Whether new names may change the roles of the run."""
    return run.recognition is not None and run.recognition.open


def is_corrected(run: Run) -> bool:
    """Whether a person corrected the roles of the run, which is final."""
    return run.recognition is not None and not run.recognition.open


def assign_roles(
    names: Collection[str], labels: Mapping[str, str], patterns: Sequence[Mapping[str, str]]
) -> RoleAssignment:
    """The roles of metrics with these names: by the first pattern that matches, else by recognition."""
    by_pattern, matched = _match_patterns(names, patterns)
    recognized = recognize_roles(names, labels)
    assigned = {role.role for role in by_pattern.values()}
    by_name = {
        metric: role for metric, role in recognized.roles.items() if role.role not in assigned and metric not in matched
    }
    source = f"preset {recognized.preset}" if recognized.preset else "names"
    reasons = {metric: f"{role.role}: by the project's pattern" for metric, role in by_pattern.items()}
    reasons |= {metric: reason for metric, reason in recognized.reasons.items() if metric not in matched}
    with_role = by_pattern | by_name
    first = sorted(reasons, key=lambda metric: (metric not in with_role, metric))[:MOST_REASONS]
    has_eval = any(role.role == MetricRole.EVAL for role in with_role.values())
    origins: dict[str, RecordedOrigin] = {
        metric: (RoleOrigin.DECLARED if metric in by_pattern else recognized.origins[metric]).value
        for metric in sorted(with_role)
    }
    guessed = [(metric, with_role[metric]) for metric, origin in origins.items() if origin == "guessed"]
    warnings = [warning for warning in recognized.warnings if warning != NO_EVAL] + ([] if has_eval else [NO_EVAL])
    return RoleAssignment(
        {metric: {"role": role.role.value, "direction": role.direction} for metric, role in sorted(with_role.items())},
        Recognition(
            open=True,
            preset=recognized.preset,
            sources={metric: "pattern" if metric in by_pattern else source for metric in sorted(with_role)},
            origins=origins,
            reasons={metric: reasons[metric] for metric in first},
            warnings=[*map(_ask_for_confirmation, guessed), *warnings],
        ),
    )


def keep_roles(run: Run, warning: str) -> RoleAssignment:
    """The roles that the run has, with a warning that begins with `ASSIGNMENT_FAILED`."""
    recognition = describe_roles(run)
    others = [other for other in recognition.warnings if not other.startswith(ASSIGNMENT_FAILED)]
    return RoleAssignment(run.metrics, replace(recognition, warnings=[*others, warning]))


def _ask_for_confirmation(guess: tuple[str, Role]) -> str:
    metric, role = guess
    better = "lower" if role.direction == "minimize" else "higher"
    return f"{metric}: role {role.role} and direction ({better} is better) guessed: confirm to let it stop the run."


def correct_roles(run: Run, metrics: Roles) -> RoleAssignment:
    """The roles that a person gave."""
    preset = run.recognition.preset if run.recognition else None
    return RoleAssignment(metrics, _describe_fixed_roles(metrics, "person", preset))


def describe_roles(run: Run) -> Recognition:
    """How the roles of the run were assigned."""
    if run.recognition is not None:
        return run.recognition
    return _describe_fixed_roles(run.metrics, "default" if run.metrics == DEFAULT_METRICS else "trainer")


def _describe_fixed_roles(metrics: Roles, source: str, preset: str | None = None) -> Recognition:
    has_eval = any(role["role"] == MetricRole.EVAL for role in metrics.values())
    warnings = [] if has_eval else [NO_EVAL]
    return Recognition(
        open=False,
        preset=preset,
        sources=dict.fromkeys(metrics, source),
        origins=dict.fromkeys(metrics, RoleOrigin.DECLARED.value),
        warnings=warnings,
    )


def _match_patterns(
    names: Iterable[str], patterns: Sequence[Mapping[str, str]]
) -> tuple[dict[str, Role], Mapping[str, Role]]:
    """At most one metric for each role, by the order of patterns and names; and all metrics that match."""
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
