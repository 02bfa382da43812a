"""The roles of a run's metrics: given by its trainer, or recognized by name. Pure.

    none yet ──> recognized ──> recognized again, whenever a metric is reported for the first time
         └───────────┴────────> corrected by a person, final

Recognition depends on the set of names, not on their order, and on whether an eval changes in its first evals.
Its result is stored with the run. No run is stopped on a guess (`origins`) until a person gives the role: a correction
that repeats the guess confirms it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from evalstop_detectors import MetricRole, Role, RoleOrigin
from evalstop_detectors.roles.recognition import NO_EVAL, recognize_by_values, warn_of_direction

from evalstop_service.domain.run import MetricFields, Recognition
from evalstop_service.domain.run import RoleOrigin as RecordedOrigin
from evalstop_service.runs.watched_metrics import DEFAULT_METRICS, list_evals
from evalstop_service.store.runs import Run

Roles = dict[str, MetricFields]

MOST_NAMES = 1000
"""A run with more metrics keeps its roles: recognition compares each new name with all others."""

MOST_REASONS = 100

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


def depends_on_values(run: Run) -> bool:
    """Whether the first values of an eval may change the roles of the run: unless its trainer declared it."""
    origins = run.recognition.origins if run.recognition is not None else {}
    return any(origins.get(metric) != "declared" for metric in list_evals(run.metrics))


def assign_roles(
    names: Collection[str], labels: Mapping[str, str], load_values: Callable[[str], Sequence[float]]
) -> RoleAssignment:
    """The roles of metrics with these names, by recognition; `load_values`: the first values of a metric by step."""
    recognized = recognize_by_values(names, labels, load_values)
    roles, reasons = recognized.roles, recognized.reasons
    origins: dict[str, RecordedOrigin] = {metric: recognized.origins[metric].value for metric in sorted(roles)}
    guessed = dict[Role, list[str]]()
    for metric, origin in origins.items():
        if origin == "guessed":
            guessed.setdefault(roles[metric], []).append(metric)
    source = f"preset {recognized.preset}" if recognized.preset else "names"
    shown = sorted(reasons, key=lambda metric: (metric not in roles, metric))[:MOST_REASONS]
    return RoleAssignment(
        {metric: {"role": role.role.value, "direction": role.direction} for metric, role in sorted(roles.items())},
        Recognition(
            open=True,
            preset=recognized.preset,
            sources={metric: "trainer" if origin == "declared" else source for metric, origin in origins.items()},
            origins=origins,
            reasons={metric: reasons[metric] for metric in shown},
            warnings=[*map(_ask_for_confirmation, guessed.items()), *recognized.warnings],
        ),
    )


def _ask_for_confirmation(guess: tuple[Role, list[str]]) -> str:
    role, metrics = guess
    better = "lower" if role.direction == "minimize" else "higher"
    names = ", ".join(metrics)
    return f"{names}: role {role.role} and direction ({better} is better) guessed: confirm to let it stop the run."


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
    evals = [(metric, role["direction"]) for metric, role in metrics.items() if role["role"] == MetricRole.EVAL]
    warnings = [text for declared in evals if (text := warn_of_direction(*declared))] if evals else [NO_EVAL]
    return Recognition(
        open=False,
        preset=preset,
        sources=dict.fromkeys(metrics, source),
        origins=dict.fromkeys(metrics, RoleOrigin.DECLARED.value),
        warnings=warnings,
    )
