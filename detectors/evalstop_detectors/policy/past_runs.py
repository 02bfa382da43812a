"""Many finished runs at once: the verdicts of `monitor.step` up to each one's first stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from evalstop_detectors.detectors.detector import Evidence, Trace
from evalstop_detectors.observation import Columns
from evalstop_detectors.policy.catalog import NOTHING_SEEN, Call, Verdict
from evalstop_detectors.policy.monitor import Openings, judge_changes, list_finite_evals
from evalstop_detectors.policy.policy import Policy
from evalstop_detectors.policy.state import start


class PastRun(NamedTuple):
    """The result of a run: the verdict at its first stop, else at its end, and the evidence of each member then.

    `suspect_step` is the first step at which the verdict was more than `continue`.
    """

    verdict: Verdict
    suspect_step: int | None
    evidence: tuple[Evidence | None, ...]


def replay_runs(policy: Policy, runs: Sequence[Columns]) -> list[PastRun]:
    """The results of the policy, without critical evals, on each of these whole runs; columns are in step order."""
    watched = [{role: column for role, column in columns.items() if role in policy.deciding_roles} for columns in runs]
    traces: list[dict[int, Trace]] = [{} for _ in runs]
    for number, member in enumerate(policy.members):
        role_columns = [{role: columns[role] for role in member.roles if role in columns} for columns in watched]
        seeing = [index for index, columns in enumerate(role_columns) if columns]
        member_traces = member.detector.trace_runs([role_columns[index] for index in seeing])
        for index, trace in zip(seeing, member_traces, strict=True):
            traces[index][number] = trace
    return [_judge_run(policy, *item) for item in zip(runs, watched, traces, strict=True)]


def _judge_run(policy: Policy, run: Columns, columns: Columns, traces: Mapping[int, Trace]) -> PastRun:
    state = start(policy)
    evidence, verdict, suspect_step = list(state.evidence), NOTHING_SEEN, None
    places = sorted(
        (order, member, place) for member, trace in traces.items() for place, order in enumerate(trace.orders)
    )
    changes = ((order, member, traces[member].word(place)) for order, member, place in places)
    openings = Openings(state, run)
    for verdict in judge_changes(policy, state, columns, openings, list_finite_evals(columns), evidence, changes):
        if suspect_step is None and verdict.verdict is not Call.CONTINUE:
            suspect_step = verdict.step
        if verdict.stops:
            break
    if columns and not verdict.stops:
        verdict = replace(verdict, step=max(column.steps[-1] for column in columns.values()))
    return PastRun(verdict, suspect_step, tuple(evidence))


def find_calls(policy: Policy, runs: Sequence[Columns]) -> list[dict[str, int | None]]:
    """The first step at which each member of the panel called for a stop, by name, on each of these whole runs."""
    calls: list[dict[str, int | None]] = [dict.fromkeys(policy.panel) for _ in runs]
    for name, member in policy.panel.items():
        level = math.inf if member.thresholds.stop_at is None else member.thresholds.stop_at
        columns = [{role: run[role] for role in member.roles if role in run} for run in runs]
        seeing = [index for index, watched in enumerate(columns) if watched]
        traces = member.detector.trace_runs([columns[index] for index in seeing])
        for index, trace in zip(seeing, traces, strict=True):
            reached = np.flatnonzero(trace.values >= level)
            calls[index][name] = trace.orders[reached[0]][0] if len(reached) else None
    return calls
