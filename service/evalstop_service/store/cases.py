"""Cases: attempts that have ended, one row each, derived from other tables; counted in the database, and listed.

And the outcomes of attempts: what turned out to be true, who or what reported it, and when. Their rows are only added.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import sqlalchemy as sa
from msgspec import structs

from evalstop_service.domain.run import JudgedCall
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome, Treatment, read_run_outcome
from evalstop_service.store.database import Transaction, append_row, find_one, find_page, match_given
from evalstop_service.store.tables import case_calls, cases, outcomes
from evalstop_service.store.tables.columns import columns_of
from evalstop_service.store.tables.decisions import COUNTED_BY
from evalstop_service.store.tables.decisions import Case as Case
from evalstop_service.store.tables.decisions import Outcome as Outcome


def save_case(tx: Transaction, case: Case) -> None:
    """Store a case, replacing the attempt's previous one; its run is locked in this transaction."""
    delete_case(tx, case.run_id, case.attempt)
    tx.execute(cases.insert().values({name: value for name, value in vars(case).items() if name in cases.c}))
    if case.calls:
        tx.execute(case_calls.insert(), list_call_rows(vars(case)))


def delete_case(tx: Transaction, run_id: UUID, attempt: int) -> None:
    """Delete the case of an attempt that continues after all."""
    for table in (cases, case_calls):
        tx.execute(table.delete().where(table.c.run_id == run_id, table.c.attempt == attempt))


def list_call_rows(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the calls in a case, which repeat what they are counted by."""
    shared = {name: case[name] for name in COUNTED_BY}
    return [shared | {"detector": name} | structs.asdict(call) for name, call in case["calls"].items()]


def find_case(tx: Transaction, run_id: UUID, attempt: int) -> Case | None:
    """The case of an attempt; None while the attempt has not ended."""
    query = sa.select(*columns_of(cases, Case)).where(cases.c.run_id == run_id, cases.c.attempt == attempt)
    case = find_one(tx, Case, query)
    return None if case is None else _add_calls(tx, [case])[0]


def _add_calls(tx: Transaction, listed: Sequence[Case]) -> list[Case]:
    """The cases with their calls, the first ones first."""
    keys, calls_of = [(case.run_id, case.attempt) for case in listed], defaultdict[Any, dict[str, JudgedCall]](dict)
    columns = [case_calls.c[name] for name in ("run_id", "attempt", "detector", *JudgedCall.__struct_fields__)]
    query = sa.select(*columns).where(sa.tuple_(*columns[:2]).in_(keys)).order_by(case_calls.c.step)
    for run_id, attempt, detector, *call in tx.execute(query):
        calls_of[run_id, attempt][detector] = JudgedCall(*call)
    return [replace(case, calls=calls_of[key]) for case, key in zip(listed, keys, strict=True)]


Grouping = Literal["policy", "detector", "job_kind", "week"]
"""`policy`: each version of a policy. `detector`: each one of the policy, observers included, see `evaluation.figures`.
A week begins on Monday, in UTC, which names it; a case belongs to the week in which its attempt ended."""

Key = tuple[Any, ...]
"""The key of a group: one part for each grouping, a text or None; for a policy its name and version."""


@dataclass(frozen=True)
class CaseFilter:
    """Which cases of a project are wanted; a field that is None does not restrict.

    `job_kind`: "" selects jobs without a kind. `since`, `until`: ended at or after, and before. `flagged`: whether
    there was a decision to stop. `detector`: called for a stop; `outcome` is then that of its call, and runs that were
    stopped are left out unless `treatment` selects them. `silent`: did not call. `derived`: nobody has labeled it.
    """

    policy: str | None = None
    version: int | None = None
    detector: str | None = None
    job_kind: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    flagged: bool | None = None
    treatment: Treatment | None = None
    outcome: DecisionOutcome | None = None
    run_outcome: RunOutcome | None = None
    silent: str | None = None
    derived: bool | None = None


@dataclass(frozen=True)
class CaseCount:
    """The number of cases of one kind, and their cost.

    `key`: of the group. `treatment`: None for attempts that were never flagged. `probability`: the probability with
    which the outcome could be observed; None when not known. `gpu_hours_...`: sums over cases with GPUs;
    `without_gpus`: the number of other cases. `parked_gpu_hours`: those freed while jobs were parked. `stated_risk`:
    the highest. `first_ended_at`: of the flagged cases.

    `run_outcome`: of the run. `delay`: steps from the turn to a right stop. Of a detector's calls, `outcome` and
    `delay` are those of the call, and `gpu_hours_saved` the hours after it.
    """

    key: Key
    treatment: Treatment | None
    probability: float | None
    outcome: DecisionOutcome
    cases: int
    gpu_hours_saved: float = 0.0
    gpu_hours_lost: float = 0.0
    without_gpus: int = 0
    parked_gpu_hours: float = 0.0
    stated_risk: float | None = None
    first_ended_at: datetime | None = None
    run_outcome: RunOutcome | None = None
    delay: int | None = None


def count_cases(
    tx: Transaction, project_id: UUID, case_filter: CaseFilter, by: Sequence[Grouping] = ()
) -> list[CaseCount]:
    """Count the cases of a project by group, treatment, outcomes and delay.

    Those that were never flagged are many times as many as the others; by policy or as a whole an index alone answers.
    """
    keys = [column for grouping in by for column in key_columns(tx, grouping)]
    last = (cases.c.run_outcome, cases.c.delay_steps)
    kinds = (cases.c.treatment, cases.c.observed_probability, cases.c.outcome)
    sums = [
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(cases.c.gpu_hours_saved), 0.0),
        sa.func.coalesce(sa.func.sum(cases.c.gpu_hours_lost), 0.0),
        sa.func.count().filter(cases.c.gpu_hours.is_(None)),
        sa.func.coalesce(sa.func.sum(cases.c.parked_seconds * cases.c.gpus), 0.0) / 3600,
        sa.func.max(cases.c.stated_risk),
        sa.func.min(cases.c.ended_at),
    ]
    flagged = filter_cases(sa.select(*keys, *kinds, *sums, *last), project_id, case_filter).where(IS_FLAGGED)
    passed = filter_cases(sa.select(*keys, cases.c.outcome, sa.func.count()), project_id, case_filter)
    rows = tx.execute(flagged.group_by(*keys, *kinds, *last))
    counts = [CaseCount(tuple(row[: len(keys)]), *row[len(keys) :]) for row in rows]
    for *key, outcome, number in tx.execute(passed.where(~IS_FLAGGED).group_by(*keys, cases.c.outcome)):
        run_outcome = read_run_outcome(DecisionOutcome(outcome), None, flagged=False)
        counts += [CaseCount(tuple(key), None, None, outcome, number, run_outcome=run_outcome)]
    return counts


def read_revision(tx: Transaction, project_id: UUID) -> str:
    """A value that changes whenever a case of the project is added or gets another outcome; found without counting.

    It covers several of the newest cases, since the last to be committed is not always the last that was created.
    """
    query = sa.select(cases.c.revision).where(cases.c.project_id == project_id)
    newest = tx.execute(query.order_by(cases.c.revision.desc()).limit(_NEWEST)).scalars()
    return hashlib.sha256(b"".join(revision.bytes for revision in newest)).hexdigest()[:16]


def list_cases(
    tx: Transaction, project_id: UUID, case_filter: CaseFilter, *, before: UUID | None = None, limit: int
) -> list[Case]:
    """The cases behind a count, those that were written last first: before the one with this revision."""
    query = filter_cases(sa.select(*columns_of(cases, Case)), project_id, case_filter)
    return _add_calls(tx, find_page(tx, Case, query, cases.c.revision, before, limit))


def list_job_kinds(tx: Transaction, project_id: UUID) -> list[str]:
    """All job kinds that were ever flagged in a project, by name."""
    kind = cases.c.job_kind
    query = sa.select(kind).where(cases.c.project_id == project_id, IS_FLAGGED, kind.is_not(None))
    return list(tx.execute(query.distinct().order_by(cases.c.job_kind)).scalars())


_NEWEST = 50

IS_FLAGGED = cases.c.decision_id.is_not(None)

IS_SEEN = sa.or_(cases.c.treatment.is_(None), cases.c.treatment == Treatment.OBSERVED)
"""The run was not stopped: everybody sees what each detector made of it."""


def filter_cases(query: sa.Select[Any], project_id: UUID, case_filter: CaseFilter) -> sa.Select[Any]:
    """A query of the cases that match a filter."""
    detector, outcome, silent = case_filter.detector, case_filter.outcome, case_filter.silent
    conditions = _match_origin(cases, project_id, case_filter)
    if detector is not None:
        conditions.append(_has_called(detector, outcome))
        outcome = None  # that of the case is another
    exact = {
        cases.c.treatment: case_filter.treatment,
        cases.c.outcome: outcome,
        cases.c.run_outcome: case_filter.run_outcome,
        IS_FLAGGED: case_filter.flagged,
        cases.c.derived: case_filter.derived,
    }
    conditions += match_given(exact)
    if silent is not None:
        conditions.append(~_has_called(silent))
    if (detector is not None or silent is not None) and case_filter.treatment is None:
        conditions.append(IS_SEEN)
    return query.select_from(cases).where(*conditions)


def _match_origin(table: sa.Table, project_id: UUID, case_filter: CaseFilter) -> list[sa.ColumnElement[bool]]:
    """Conditions on project, policy, job kind and end, which cases and their calls have."""
    exact = {
        table.c.project_id: project_id,
        table.c.policy_name: case_filter.policy,
        table.c.policy_version: case_filter.version,
        sa.func.coalesce(table.c.job_kind, ""): case_filter.job_kind,
    }
    ended_at = table.c.ended_at
    return match_given(exact, since={ended_at: case_filter.since}, before={ended_at: case_filter.until})


def _has_called(detector: str, outcome: DecisionOutcome | None = None) -> sa.Exists:
    """Whether a detector called for a stop in a case, with this outcome."""
    call = case_calls.c
    of_case = [call.run_id == cases.c.run_id, call.attempt == cases.c.attempt, call.detector == detector]
    return sa.exists().where(*of_case, *match_given({call.outcome: outcome}))


def key_columns(tx: Transaction, by: Grouping | Literal["day"], table: sa.Table = cases) -> list[sa.ColumnElement[Any]]:
    """What cases, or their calls, are grouped by: the parts of a key. A period is the text of its first day."""
    if by == "policy":
        return [table.c.policy_name, table.c.policy_version]
    if by in ("job_kind", "detector"):
        return [table.c[by]]
    # Inlined, not bound: only then does PostgreSQL see that the selected and the grouped expression are the same.
    ended_at = table.c.ended_at
    if tx.dialect.name == "postgresql":
        return [sa.cast(sa.cast(sa.func.date_trunc(sa.literal_column(f"'{by}'"), ended_at), sa.Date), sa.Text)]
    moves = {"day": [], "week": ["'weekday 0'", "'-6 days'"]}[by]
    return [sa.func.date(ended_at, *(sa.literal_column(move) for move in moves))]


def count_calls(
    tx: Transaction, project_id: UUID, case_filter: CaseFilter, by: Sequence[Grouping], *, delays: bool = True
) -> list[CaseCount]:
    """Count the calls of detectors, with `detector` among the groupings, by group, treatment, outcome and delay.

    Of the filter it obeys policy, job kind and end.
    """
    calls = case_calls.c
    keys = [column for grouping in by for column in key_columns(tx, grouping, case_calls)]
    # In the order of an index with all that is read, so that PostgreSQL need not sort what it counts by detector.
    kinds = [calls.treatment, calls.observed_probability, calls.run_outcome, calls.outcome]
    delay: list[Any] = [calls.delay_steps] if delays else []
    hours = calls.gpu_hours_after
    counted = [sa.func.count(), sa.func.coalesce(sa.func.sum(hours), 0.0), sa.func.count().filter(hours.is_(None))]
    columns = *keys, *kinds[:2], calls.outcome, *counted, calls.run_outcome, *(delay or [sa.null()])
    query = sa.select(*columns).group_by(*keys, *kinds, *delay)
    rows = tx.execute(query.where(*_match_origin(case_calls, project_id, case_filter)))
    counts = ((CaseCount(tuple(row[: len(keys)]), *row[len(keys) : -3]), row[-3:]) for row in rows)
    return [
        replace(count, without_gpus=without_gpus, run_outcome=run_outcome, delay=delay)
        for count, (without_gpus, run_outcome, delay) in counts
    ]


def add_outcome(tx: Transaction, run_id: UUID, attempt: int, outcome: Outcome) -> None:
    """Append an outcome; the run is locked in this transaction."""
    append_row(tx, outcomes, {"run_id": run_id, "attempt": attempt}, vars(outcome))


def find_outcome(tx: Transaction, run_id: UUID, attempt: int) -> Outcome | None:
    """The outcome of an attempt that counts."""
    return load_outcomes(tx, [(run_id, attempt)]).get((run_id, attempt))


def load_outcomes(tx: Transaction, attempts: Sequence[tuple[UUID, int]]) -> dict[tuple[UUID, int], Outcome]:
    """The outcome that counts for each of these attempts that has one."""
    return {attempt: history[-1] for attempt, history in load_history(tx, attempts).items()}


def load_history(tx: Transaction, attempts: Sequence[tuple[UUID, int]]) -> dict[tuple[UUID, int], list[Outcome]]:
    """All outcomes of each of these attempts, oldest first."""
    if not attempts:
        return {}
    by_attempt: dict[tuple[UUID, int], list[Outcome]] = defaultdict(list)
    query = sa.select(outcomes).where(sa.tuple_(outcomes.c.run_id, outcomes.c.attempt).in_(attempts))
    for row in tx.execute(query.order_by(outcomes.c.sequence)):
        names = dict(row._mapping)
        by_attempt[names.pop("run_id"), names.pop("attempt")].append(Outcome(**names))
    return by_attempt
