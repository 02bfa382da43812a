"""Many finished runs at once: the verdicts of `monitor.step` up to each one's first stop."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from evalstop_detectors.detectors.detector import Evidence, Trace
from evalstop_detectors.observation import Columns
from evalstop_detectors.policy.catalog import NOTHING_SEEN, Call, Verdict
from evalstop_detectors.policy.monitor import ORDER, Change, judge_changes, list_finite_evals
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
    traces: list[list[tuple[int, Trace]]] = [[] for _ in runs]
    for number, member in enumerate(policy.members):
        role_columns = [{role: columns[role] for role in member.roles if role in columns} for columns in watched]
        seeing = [index for index, columns in enumerate(role_columns) if columns]
        member_traces = member.detector.trace_runs([role_columns[index] for index in seeing])
        for index, trace in zip(seeing, member_traces, strict=True):
            traces[index].append((number, trace))
    return [_judge_run(policy, columns, run_traces) for columns, run_traces in zip(watched, traces, strict=True)]


def _judge_run(policy: Policy, columns: Columns, traces: Sequence[tuple[int, Trace]]) -> PastRun:
    state = start(policy)
    evidence, verdict, suspect_step = list(state.evidence), NOTHING_SEEN, None
    changes = heapq.merge(*(_name_member(member, trace) for member, trace in traces), key=ORDER)
    for verdict in judge_changes(policy, state, columns, list_finite_evals(columns), evidence, changes):
        if suspect_step is None and verdict.verdict is not Call.CONTINUE:
            suspect_step = verdict.step
        if verdict.stops:
            break
    if columns and not verdict.stops:
        verdict = replace(verdict, step=max(column.steps[-1] for column in columns.values()))
    return PastRun(verdict, suspect_step, tuple(evidence))


def _name_member(member: int, trace: Trace) -> Iterator[Change]:
    for order, item in trace:
        yield order, member, item


def find_calls(policy: Policy, runs: Sequence[Columns]) -> list[dict[str, int | None]]:
    """The first step at which each member of the panel called for a stop, by name, on each of these whole runs."""
    calls: list[dict[str, int | None]] = [dict.fromkeys(policy.panel) for _ in runs]
    for name, member in policy.panel.items():
        columns = [{role: run[role] for role in member.roles if role in run} for run in runs]
        seeing = [index for index, watched in enumerate(columns) if watched]
        traces = member.detector.trace_runs([columns[index] for index in seeing])
        for index, trace in zip(seeing, traces, strict=True):
            reached = (order[0] for order, item in trace if item.reaches(member.thresholds.stop_at))
            calls[index][name] = next(reached, None)
    return calls
