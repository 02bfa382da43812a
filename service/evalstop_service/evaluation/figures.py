"""What is measured of the stops of a project: counts of its cases become figures, group by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from itertools import groupby
from typing import Any, TypeVar
from uuid import UUID

from evalstop_service.clock import rfc3339
from evalstop_service.rules import confidence_sequences
from evalstop_service.rules.confidence_sequences import ALPHA, Estimate, Stratum
from evalstop_service.rules.statuses import DecisionOutcome, Treatment
from evalstop_service.store import case_counts
from evalstop_service.store.case_counts import CaseCount, CaseFilter, Delay, Grouping, Key
from evalstop_service.store.database import Transaction

OUTCOMES = tuple(DecisionOutcome)
PASSED = "passed"
ROWS = (Treatment.LET_RUN, Treatment.STOPPED, Treatment.PREVENTED, PASSED)
"""What was done about an attempt; `passed`: it was never flagged."""


_PERIODS = ("day", "week", "month")
_PARTS: dict[Grouping, tuple[str, ...]] = {
    "policy": ("policy", "version"),
    "detector": ("detector",),
    "job_kind": ("job_kind",),
    "day": ("begins",),
    "week": ("begins",),
    "month": ("begins",),
}
"""What the parts of a key are called."""

_Counted = TypeVar("_Counted", CaseCount, Delay)


@dataclass(frozen=True)
class Hours:
    """GPU-hours, of the cases that say how many GPUs they had.

    `saved`: by the stops that were carried out, but for those of which a person said that they were wrong. `lost`: by
    false stops that were carried out, estimated from those that were held out instead; `lost_as_told`: by those that a
    person called wrong. `would_have_saved`, `would_have_lost`: by the stops that were let run, had they been carried
    out. `unsaid`: flagged cases that do not say how many GPUs they had.
    """

    saved: float = 0.0
    lost: float = 0.0
    lost_as_told: float = 0.0
    would_have_saved: float = 0.0
    would_have_lost: float = 0.0
    unsaid: int = 0


@dataclass(frozen=True)
class Delays:
    """How many steps after the turn right stops were called for: quartiles, each case by its weight."""

    cases: int
    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class GroupFigures:
    """The figures of a group of cases.

    `counts`: the cases by what was done (`ROWS`) and by outcome; for what was never flagged `right` means healthy and
    `wrong` missed. `recall` and `false_stops` are None where cases are chosen by detector: one that was never flagged
    has none. `stated_risk`: the share of healthy runs that the policy says it stops.
    """

    key: Key
    precision: Estimate
    recall: Estimate | None
    false_stops: Estimate | None
    delays: Delays | None
    hours: Hours
    counts: dict[str, dict[str, int]]
    stated_risk: float | None = None


@dataclass
class _Tally:
    """What is added up of a group, before it becomes figures."""

    cells: dict[str, dict[str, int]] = field(default_factory=lambda: {row: dict.fromkeys(OUTCOMES, 0) for row in ROWS})
    strata: dict[float, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: dict.fromkeys(OUTCOMES, 0)))
    hours: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unsaid: int = 0
    stated_risk: float | None = None

    def add(self, count: CaseCount) -> None:
        row = count.treatment or PASSED
        self.cells[row][count.outcome] += count.cases
        if row == PASSED:
            return
        self.unsaid += count.unsaid
        if count.stated_risk is not None:
            self.stated_risk = max(count.stated_risk, self.stated_risk or 0.0)
        if row == Treatment.LET_RUN:
            assert count.probability is not None, "what was let run was so with a probability"
            self.strata[count.probability][count.outcome] += count.cases
            self.hours["would_have_saved"] += count.gpu_hours_saved
            self.hours["would_have_lost"] += count.gpu_hours_lost
            # Each that was held out stands for so many others that were carried out.
            self.hours["lost"] += count.gpu_hours_lost * (1 - count.probability) / count.probability
        elif row == Treatment.STOPPED and count.outcome == "wrong":
            self.hours["lost_as_told"] += count.gpu_hours_lost
        elif row == Treatment.STOPPED:
            self.hours["saved"] += count.gpu_hours_saved

    def flagged(self) -> list[Stratum]:
        return [Stratum(**cells, probability=probability) for probability, cells in sorted(self.strata.items())]


def load_figures(
    tx: Transaction, project_id: UUID, wanted: CaseFilter, by: Sequence[Grouping] = (), alpha: float = ALPHA
) -> list[GroupFigures]:
    """The figures of a project's cases, a group each, by their keys; one group without `by`, though it be empty."""
    counts = case_counts.count_cases(tx, project_id, wanted, by)
    late = case_counts.count_delays(tx, project_id, wanted, by)
    whole = wanted.detector is None and "detector" not in by
    return compute_figures(counts, late, alpha, whole=whole) if counts or by else [compute_total((), ())]


def compute_total(counts: Iterable[CaseCount], late: Iterable[Delay]) -> GroupFigures:
    """The figures of all groups together."""
    tally = _Tally()
    for count in counts:
        tally.add(count)
    return _figures((), tally, list(late), ALPHA, whole=True)


def compute_figures(
    counts: Iterable[CaseCount], late: Iterable[Delay], alpha: float = ALPHA, *, whole: bool = True
) -> list[GroupFigures]:
    """The figures of each group, by their keys; `whole`: what was never flagged is among what was counted."""
    tallies: dict[Key, _Tally] = defaultdict(_Tally)
    for count in counts:
        tallies[count.key].add(count)
    delays: dict[Key, list[Delay]] = defaultdict(list)
    for delay in late:
        delays[delay.key].append(delay)
    ordered = sorted(tallies.items(), key=_by_key)
    return [_figures(key, tally, delays[key], alpha, whole=whole) for key, tally in ordered]


def compute_running_figures(counts: Iterable[CaseCount]) -> list[GroupFigures]:
    """The figures of all cases up to the end of each period, by which they were counted; the keys are its first day."""
    so_far, found = _Tally(), []
    for key, those in groupby(sorted(counts, key=lambda count: count.key), key=lambda count: count.key):
        for count in those:
            so_far.add(count)
        found.append(_figures(key, so_far, (), ALPHA, whole=True))
    return found


def regroup(found: Iterable[_Counted], groups: Callable[[Key], Iterable[Key]]) -> list[_Counted]:
    """What was counted by some key, in the groups that it belongs to by that key."""
    return [replace(one, key=key) for one in found for key in groups(one.key)]


def estimate_to_json(found: Estimate) -> dict[str, Any]:
    """An estimate as events and answers hold it."""
    return asdict(found) | {"bounds": {"low": found.bounds[0], "high": found.bounds[1]}}


def name_key_parts(key: Key, by: Sequence[Grouping]) -> dict[str, Any]:
    """The parts of a group's key by their names: `policy` and `version`, `detector`, `job_kind`, `begins`."""
    return dict(zip((name for one in by for name in _PARTS[one]), key, strict=True))


def select_cell(wanted: CaseFilter, row: str, outcome: DecisionOutcome) -> CaseFilter:
    """What selects the cases behind one of the `counts` of a group."""
    return replace(wanted, outcome=outcome, flagged=row != PASSED, treatment=Treatment(row) if row != PASSED else None)


def filter_to_query(wanted: CaseFilter) -> dict[str, str]:
    """What selects cases, as the parameters of an address."""
    said = {name: value for name, value in vars(wanted).items() if value is not None}
    return {name: _spelled(value) for name, value in said.items()}


def _spelled(value: str | int | bool | datetime) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return rfc3339(value) if isinstance(value, datetime) else str(value)


def select_group(wanted: CaseFilter, by: Sequence[Grouping], key: Key) -> CaseFilter:
    """What selects the cases of one group alone."""
    own = name_key_parts(key, by)
    period = next((one for one in by if one in _PERIODS), None)
    if period is not None:
        since, until = _period(period, own.pop("begins"))
        own["since"], own["until"] = max(since, wanted.since or since), min(until, wanted.until or until)
    if "job_kind" in own:
        own["job_kind"] = own["job_kind"] or ""
    return replace(wanted, **own)


def _period(grouping: Grouping, first: str) -> tuple[datetime, datetime]:
    begin = date.fromisoformat(first)
    end = begin + timedelta(days={"day": 1, "week": 7}.get(grouping, 31))
    if grouping == "month":
        end = end.replace(day=1)
    return datetime.combine(begin, time.min, UTC), datetime.combine(end, time.min, UTC)


def _figures(key: Key, tally: _Tally, late: Sequence[Delay], alpha: float, *, whole: bool) -> GroupFigures:
    flagged, passed = tally.flagged(), Stratum(**tally.cells[PASSED])
    return GroupFigures(
        key,
        confidence_sequences.estimate_precision(flagged, alpha),
        confidence_sequences.estimate_recall(flagged, passed, alpha) if whole else None,
        confidence_sequences.estimate_false_stops(flagged, passed, alpha) if whole else None,
        _quartiles(late),
        Hours(**tally.hours, unsaid=tally.unsaid),
        deepcopy(tally.cells),
        tally.stated_risk,
    )


def _quartiles(late: Sequence[Delay]) -> Delays | None:
    ordered = sorted((one.steps, one.cases / one.probability) for one in late)
    if not ordered:
        return None
    lower, median, upper = (confidence_sequences.weighted_quantile(ordered, share) for share in (0.25, 0.5, 0.75))
    return Delays(sum(one.cases for one in late), lower, median, upper)


def _by_key(item: tuple[Key, _Tally]) -> tuple[tuple[bool, str | int], ...]:
    return tuple((part is None, part or "") for part in item[0])
