"""Figures of a project's stops, such as their precision, by group: computed from counts of its cases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from typing import Annotated, Any
from uuid import UUID

from evalstop_detectors import policy_from_document

from evalstop_service.clock import rfc3339
from evalstop_service.domain import confidence_sequences
from evalstop_service.domain.confidence_sequences import Estimate, Stratum
from evalstop_service.domain.fields import doc
from evalstop_service.domain.outcome import judge_decision
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, Treatment, name_hours
from evalstop_service.projects import policies
from evalstop_service.store import cases
from evalstop_service.store.cases import CaseCount, CaseFilter, Grouping, Key
from evalstop_service.store.database import Transaction

OUTCOMES = tuple(DecisionOutcome)
PASSED = "passed"
ROWS = (*Treatment, PASSED)
"""The rows of the counts: treatments, and `passed` for attempts that were never flagged."""

_PARTS: dict[Grouping, tuple[str, ...]] = {
    "policy": ("policy", "version"),
    "detector": ("detector",),
    "job_kind": ("job_kind",),
    "week": ("begins",),
}
"""The names of the parts of a key."""


@dataclass(frozen=True)
class Hours:
    """GPU-hours of the cases whose number of GPUs is known."""

    since: Annotated[datetime | None, doc("when the first flagged attempt ended; null: none")] = None
    saved: Annotated[float, doc("by stops that were carried out and right")] = 0.0
    saved_if_right: Annotated[float, doc("by stops that were carried out, if they were right: not known yet")] = 0.0
    lost: Annotated[float, doc("lost by false stops that were carried out, estimated from held-out stops")] = 0.0
    lost_as_reported: Annotated[float, doc("lost by stops that were carried out and labeled wrong")] = 0.0
    would_have_saved: Annotated[
        float,
        doc(
            "by right stops that were recorded only (held out or in shadow mode); by detector: after right calls in"
            " runs that nobody stopped, unweighted"
        ),
    ] = 0.0
    would_have_lost: Annotated[float, doc("not lost: wrong stops that were held out or in shadow mode")] = 0.0
    parked: Annotated[float, doc("freed for other jobs while jobs were parked")] = 0.0
    without_gpus: Annotated[int, doc("flagged cases without a GPU count")] = 0


@dataclass(frozen=True)
class Delays:
    """How many steps after the turn right stops were decided: weighted quartiles."""

    cases: Annotated[int, doc("right stops with a known turn")]
    lower: Annotated[float, doc("lower quartile of the delay in steps")]
    median: Annotated[float, doc("median delay in steps")]
    upper: Annotated[float, doc("upper quartile of the delay in steps")]


@dataclass(frozen=True)
class GroupFigures:
    """The figures of a group of cases.

    `counts`: cases by treatment (`ROWS`) and outcome; of attempts that were never flagged `right` are healthy and
    `wrong` were missed.
    """

    key: Key
    precision: Annotated[Estimate, doc("the share of its stops that were right")]
    recall: Estimate
    false_stops: Estimate
    delays: Delays | None
    hours: Hours
    counts: dict[str, dict[str, int]]
    stated_risk: Annotated[float | None, doc("the share of healthy runs that the policy states it stops")] = None
    observes: Annotated[bool | None, doc("of a detector: it only observes, and decides nothing; else null")] = None


_Strata = dict[float, dict[str, int]]
"""Cases by the probability that they could be observed, and by outcome."""


@dataclass
class _Totals:
    """The sums of a group."""

    cells: dict[str, dict[str, int]] = field(default_factory=lambda: {row: dict.fromkeys(OUTCOMES, 0) for row in ROWS})
    strata: _Strata = field(default_factory=lambda: defaultdict(lambda: dict.fromkeys(OUTCOMES, 0)))
    passed: _Strata = field(default_factory=lambda: defaultdict(lambda: dict.fromkeys(OUTCOMES, 0)))
    hours: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    delays: list[tuple[int, float]] = field(default_factory=list)  # of right stops: steps, cases that they stand for
    delayed: int = 0
    without_gpus: int = 0
    since: datetime | None = None
    stated_risk: float | None = None

    def add(self, count: CaseCount) -> None:
        row = count.treatment or PASSED
        self.cells[row][count.outcome] += count.cases
        if row == PASSED:
            self.passed[count.probability or 1.0][count.outcome] += count.cases
            return
        self.without_gpus += count.without_gpus
        self.hours["parked"] += count.parked_gpu_hours
        if count.first_ended_at is not None:
            self.since = min(count.first_ended_at, self.since or count.first_ended_at)
        if count.stated_risk is not None:
            self.stated_risk = max(count.stated_risk, self.stated_risk or 0.0)
        if (name := name_hours(row, count.outcome)) is not None:
            self.hours[name] += count.gpu_hours_saved
        if row == Treatment.OBSERVED:
            assert count.probability is not None, "a stop that was not carried out has a probability"
            self.strata[count.probability][count.outcome] += count.cases
            if count.delay is not None and count.outcome is DecisionOutcome.RIGHT:
                self.delays.append((count.delay, count.cases / count.probability))
                self.delayed += count.cases
            self.hours["would_have_lost"] += count.gpu_hours_lost
            # Each held-out stop represents (1 - p) / p stops that were carried out.
            self.hours["lost"] += count.gpu_hours_lost * (1 - count.probability) / count.probability
        elif row == Treatment.STOPPED and count.outcome == DecisionOutcome.WRONG:
            self.hours["lost_as_reported"] += count.gpu_hours_lost


def _list_strata(strata: _Strata) -> list[Stratum]:
    return [Stratum(**cells, probability=probability) for probability, cells in sorted(strata.items())]


def load_figures(
    tx: Transaction,
    project_id: UUID,
    case_filter: CaseFilter,
    by: Sequence[Grouping] = (),
    by_policy: Iterable[CaseCount] | None = None,
) -> list[GroupFigures]:
    """The figures of a project's cases by group, in the order of their keys; without `by` one group, possibly empty.

    By detector, or of one, as if its first call had stopped the run: of each on the panel of the cases' policies.
    `by_policy`: the counts by policy, if a caller has them and wants figures by policy and detector.
    """
    if case_filter.detector is not None or "detector" in by:
        called, panels = _count_by_detector(tx, project_id, case_filter, by, by_policy)
        return [
            replace(group, observes=_observes(name_key_parts(group.key, by), panels, case_filter.detector))
            for group in compute_figures(called, of_calls=True)
        ]
    counts = cases.count_cases(tx, project_id, case_filter, by)
    return compute_figures(counts) if by else [compute_total(counts)]


def load_detectors_by_week(
    tx: Transaction, project_id: UUID, case_filter: CaseFilter, counts: Iterable[CaseCount]
) -> dict[str, list[GroupFigures]]:
    """The cumulative figures of each detector, up to the end of each week; `counts`: by policy and week."""
    called, _ = _count_by_detector(tx, project_id, case_filter, ["detector", "week"], counts, delays=False)
    counts_of = defaultdict[str, list[CaseCount]](list)
    for count in called:
        counts_of[count.key[0]].append(count)
    return {
        name: compute_running_figures(merge_groups(own, slice(1, None)), of_calls=True)
        for name, own in sorted(counts_of.items())
    }


def merge_groups(counts: Iterable[CaseCount], parts: slice) -> list[CaseCount]:
    """The counts by some parts of their keys."""
    return [replace(count, key=count.key[parts]) for count in counts]


_Panels = dict[Key, dict[str, bool]]
"""By the name and version of a policy: its detectors, and whether each observes."""


def _count_by_detector(
    tx: Transaction,
    project_id: UUID,
    case_filter: CaseFilter,
    by: Sequence[Grouping],
    counts: Iterable[CaseCount] | None = None,
    *,
    delays: bool = True,
) -> tuple[list[CaseCount], _Panels]:
    """The cases of each detector, called or silent.

    1. Count the cases where nobody stopped the run: after a stop nobody sees whether the detector would have called.
       A case that was held out with the probability p represents 1/p cases.
    2. Count the cases where a detector called rightly or wrongly; in all others of its policies it was
       silent, rightly if the run is healthy.
    """
    split: list[Grouping] = ["policy", *(grouping for grouping in by if grouping not in ("policy", "detector"))]
    of_all = replace(case_filter, detector=None)
    seen = Counter[tuple[Key, float, RunOutcome]]()
    counts = list(cases.count_cases(tx, project_id, of_all, split) if counts is None else counts)
    for count in counts:
        if count.treatment in (None, Treatment.OBSERVED):
            assert count.run_outcome is not None, "the row of a case has it"
            seen[count.key, count.probability or 1.0, count.run_outcome] += count.cases
    panels = {name: load_panel(tx, project_id, *name) for name in {count.key[:2] for count in counts}}
    silent: dict[tuple[str, Key, float, RunOutcome], int] = {
        (detector, *kind): number for kind, number in seen.items() for detector in panels[kind[0][:2]]
    }
    called = list[CaseCount]()
    for call in cases.count_calls(tx, project_id, of_all, [*split, "detector"], delays=delays):
        parts, detector = call.key[:-1], call.key[-1]
        key, probability = _arrange_key(by, split, parts, detector), call.probability or 1.0
        treatment = call.treatment or Treatment.OBSERVED
        if case_filter.detector not in (None, detector):
            continue
        hours = call.gpu_hours_saved if treatment is Treatment.OBSERVED else 0.0
        called.append(replace(call, key=key, treatment=treatment, probability=probability, gpu_hours_saved=hours))
        if treatment is Treatment.OBSERVED:
            assert call.run_outcome is not None, "the row of a call has it"
            kind = (detector, parts, probability, call.run_outcome)
            if kind in silent:  # its case may be newer than the counts
                silent[kind] -= call.cases
    for (detector, parts, probability, run_outcome), number in silent.items():
        if case_filter.detector in (None, detector):
            key, judged = _arrange_key(by, split, parts, detector), judge_decision(run_outcome, None, None)
            called.append(CaseCount(key, None, probability, judged, number))
    return called, panels


def _observes(parts: Mapping[str, Any], panels: Mapping[Key, Mapping[str, bool]], detector: str | None) -> bool:
    """Whether the detector of a group decides nothing: in its policy, or in any without a policy."""
    own = [panels.get((parts["policy"], parts["version"]), {})] if "policy" in parts else panels.values()
    return all(panel.get(parts.get("detector", detector), True) for panel in own)


def load_panel(tx: Transaction, project_id: UUID, name: str, version: int, *, callers: bool = False) -> dict[str, bool]:
    """The detectors of a version of a policy, and whether each observes; `callers`: of those that can call."""
    policy = policy_from_document(policies.load_version(tx, project_id, name, version).document)
    return {
        name: place >= len(policy.members)
        for place, (name, item) in enumerate(policy.panel.items())
        if item.thresholds.stop_at is not None or not callers
    }


def _arrange_key(by: Sequence[Grouping], split: Sequence[Grouping], parts: Sequence[Any], detector: str) -> Key:
    """The key by `by` of a detector's cases, which were counted by `split`: by policy first."""
    named: dict[Grouping, Key] = {"policy": tuple(parts[:2]), "detector": (detector,)}
    named |= {grouping: (part,) for grouping, part in zip(split[1:], parts[2:], strict=True)}
    return tuple(part for grouping in by for part in named[grouping])


def compute_total(counts: Iterable[CaseCount]) -> GroupFigures:
    """The figures of all groups together."""
    sums = _Totals()
    for count in counts:
        sums.add(count)
    return _compute_group((), sums)


def compute_figures(counts: Iterable[CaseCount], *, of_calls: bool = False) -> list[GroupFigures]:
    """The figures of each group, ordered by key; `of_calls`: of detectors, whose runs others stopped."""
    totals: dict[Key, _Totals] = defaultdict(_Totals)
    for count in counts:
        totals[count.key].add(count)
    ordered = sorted(totals.items(), key=lambda item: [(part is None, part or "") for part in item[0]])
    return [_compute_group(key, sums, of_calls=of_calls) for key, sums in ordered]


def compute_running_figures(counts: Iterable[CaseCount], *, of_calls: bool = False) -> list[GroupFigures]:
    """Cumulative figures up to the end of each period; the keys are the first days of the periods."""
    totals, groups = _Totals(), []
    for key, counts_of_period in groupby(sorted(counts, key=lambda count: count.key), key=lambda count: count.key):
        for count in counts_of_period:
            totals.add(count)
        groups.append(_compute_group(key, totals, of_calls=of_calls))
    return groups


def name_key_parts(key: Key, by: Sequence[Grouping]) -> dict[str, Any]:
    """The parts of a group's key by name: `policy` and `version`, `detector`, `job_kind`, `begins`."""
    return dict(zip((name for grouping in by for name in _PARTS[grouping]), key, strict=True))


def select_cell(case_filter: CaseFilter, row: str, outcome: DecisionOutcome) -> CaseFilter:
    """The filter of the cases behind one of the `counts` of a group."""
    return replace(
        case_filter, outcome=outcome, flagged=row != PASSED, treatment=Treatment(row) if row != PASSED else None
    )


def filter_to_query(case_filter: CaseFilter) -> dict[str, str]:
    """A filter as the query parameters of a URL."""
    return {name: _format_parameter(value) for name, value in vars(case_filter).items() if value is not None}


def _format_parameter(value: str | int | bool | datetime) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return rfc3339(value) if isinstance(value, datetime) else str(value)


def select_version(case_filter: CaseFilter, key: Key) -> CaseFilter:
    """The filter of the cases of one version of a policy; unchanged for the key of a total."""
    return replace(case_filter, **dict(zip(("policy", "version"), key, strict=False)))


def _compute_group(key: Key, sums: _Totals, *, of_calls: bool = False) -> GroupFigures:
    flagged, passed = _list_strata(sums.strata), _list_strata(sums.passed)
    estimate = confidence_sequences.estimate_call_precision if of_calls else confidence_sequences.estimate_precision
    return GroupFigures(
        key,
        estimate(flagged),
        confidence_sequences.estimate_recall(flagged, *passed),
        confidence_sequences.estimate_false_stops(flagged, *passed),
        _compute_quartiles(sums),
        Hours(since=sums.since, **sums.hours, without_gpus=sums.without_gpus),
        deepcopy(sums.cells),
        sums.stated_risk,
    )


def _compute_quartiles(sums: _Totals) -> Delays | None:
    ordered = sorted(sums.delays)
    if not ordered:
        return None
    lower, median, upper = (confidence_sequences.weighted_quantile(ordered, share) for share in (0.25, 0.5, 0.75))
    return Delays(sums.delayed, lower, median, upper)
