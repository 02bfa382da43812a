"""Many finished runs at once: the verdicts of `monitor.step` up to each one's first stop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from evalstop_detectors.detectors.detector import Evidence, Trace
from evalstop_detectors.observation import RANK, Columns, Order
from evalstop_detectors.policy.catalog import NOTHING_SEEN, Call, Verdict
from evalstop_detectors.policy.monitor import Change, judge_changes
from evalstop_detectors.policy.opening import Openings, list_finite_evals
from evalstop_detectors.policy.policy import Policy
from evalstop_detectors.policy.state import start

Places = NDArray[np.int64]
_NEVER, _NOWHERE = np.iinfo(np.int64).max, np.empty(0, np.int64)


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
    changes = _list_changes(policy, traces)
    openings = Openings(state.opening, state.evals, run)
    for verdict in judge_changes(policy, state, columns, openings, list_finite_evals(columns), evidence, changes):
        if suspect_step is None and verdict.verdict is not Call.CONTINUE:
            suspect_step = verdict.step
        if verdict.stops:
            break
    if columns and not verdict.stops:
        verdict = replace(verdict, step=max(column.steps[-1] for column in columns.values()))
    return PastRun(verdict, suspect_step, tuple(evidence))


def _list_changes(policy: Policy, traces: Mapping[int, Trace]) -> Iterator[Change]:
    """The changes that may matter for the first suspicion, the first stop and the end, in order: those while a member
    is alarmed, and the last ones. Most runs have few: no evidence is worded for the others."""
    keys = {member: _to_keys(trace.orders) for member, trace in traces.items()}
    begin, end = _find_spans(policy.alarm_levels, traces, keys)
    if len(begin):
        # After the first suspicion only a stop matters.
        levels = [
            math.inf if member.thresholds.stop_at is None else member.thresholds.stop_at for member in policy.members
        ]
        stops_begin, stops_end = _find_spans(levels, traces, keys)
        begin, end = np.sort(np.append(stops_begin, begin[0])), np.sort(np.append(stops_end, begin[0]))
    changes = []
    for member, trace in traces.items():
        starts, leaves = keys[member], np.append(keys[member], _NEVER)[1:]
        needed = np.searchsorted(begin, leaves, "left") > np.searchsorted(end, starts, "left")
        needed[-1:] = True
        changes += [(trace.orders[place], member, place) for place in np.flatnonzero(needed).tolist()]
    for order, member, place in sorted(changes):
        yield order, member, traces[member].word(place)


def _find_spans(
    levels: Sequence[float], traces: Mapping[int, Trace], keys: Mapping[int, Places]
) -> tuple[Places, Places]:
    """Where the evidence of any member reaches its level, and where it no longer does; each ascending."""
    begins, ends = [_NOWHERE], [_NOWHERE]
    for member, trace in traces.items():
        loud = np.flatnonzero(trace.values >= levels[member])
        begins.append(keys[member][loud])
        ends.append(np.append(keys[member], _NEVER)[loud + 1])
    return np.sort(np.concatenate(begins)), np.sort(np.concatenate(ends))


def _to_keys(orders: Sequence[Order]) -> Places:
    """The orders as numbers; a step is below 2^53."""
    return np.array([step * len(RANK) + rank for step, rank in orders], np.int64)


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
