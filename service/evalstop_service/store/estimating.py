"""What the cases of a project add up to, counted where they lie, and the cases themselves behind each count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import sqlalchemy as sa

from evalstop_service.clock import rfc3339
from evalstop_service.errors import Invalid
from evalstop_service.store.database import Transaction
from evalstop_service.store.tables import cases, policies, runs

Grouping = Literal["policy", "detector", "job_kind", "day", "week", "month"]
"""`policy`: each of its versions. `detector`: those that called for the stop; a case counts for each of them. Periods
are of UTC, by their first day, and a case belongs to the one in which its attempt ended."""


Key = tuple[str | int | None, ...]
"""Of a group: one part for each grouping, but for a policy its name and its version."""


@dataclass(frozen=True)
class Wanted:
    """Which cases of a project; what is None does not matter.

    `job_kind`: "" means jobs that do not say what they are. `since`, `until`: ended from then on, and before then.
    `flagged`: whether there was a decision to stop it.
    """

    policy: str | None = None
    version: int | None = None
    detector: str | None = None
    job_kind: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    flagged: bool | None = None
    treatment: str | None = None
    outcome: str | None = None
    truth: str | None = None


@dataclass(frozen=True)
class Count:
    """How many cases of one kind there are, and what they cost.

    `key`: of its group, as `counts` was asked for. `treatment`: None for what was never flagged. `probability`: with
    which its truth could be seen; None when nobody said. `gpu_hours_...`: sums over those cases that say them, `unsaid`
    being the number of those that do not. `stated_risk`: the highest.
    """

    key: Key
    treatment: str | None
    probability: float | None
    outcome: str
    cases: int
    gpu_hours_saved: float
    gpu_hours_lost: float
    unsaid: int
    stated_risk: float | None


@dataclass(frozen=True)
class Delay:
    """By how many steps after its turn a run was flagged, rightly, and with which probability that could be seen."""

    key: Key
    steps: int
    probability: float


@dataclass(frozen=True)
class Listed:
    """A case as a list shows it; see `store.cases`."""

    run_id: UUID
    run_name: str
    attempt: int
    policy_name: str
    policy_version: int
    job_kind: str | None
    truth: str
    derived: bool
    turn_step: int | None
    decision_id: UUID | None
    treatment: str | None
    observed_probability: float | None
    decided_step: int | None
    detectors: list[str] | None
    stated_risk: float | None
    outcome: str
    delay_steps: int | None
    gpus: float | None
    gpu_hours: float | None
    gpu_hours_saved: float | None
    gpu_hours_lost: float | None
    ended_at: datetime

    @property
    def cursor(self) -> str:
        """What asks for the part of the list past this case."""
        return f"{rfc3339(self.ended_at)}_{self.run_id}_{self.attempt}"


Place = tuple[datetime, UUID, int]
"""Where a case stands in the list: by its end, newest first, then by its key."""


def place(cursor: str | None) -> Place | None:
    """Where a cursor stands in the list; None for none. Raises Invalid when it is none of ours."""
    if cursor is None:
        return None
    try:
        ended_at, run_id, attempt = cursor.split("_")
        at = datetime.fromisoformat(ended_at)
        if at.tzinfo is None or not 0 <= int(attempt) < 2**31:
            raise ValueError
        return at, UUID(run_id), int(attempt)
    except ValueError:
        raise Invalid("the cursor is none that this list has given; begin without one") from None


def counts(tx: Transaction, project_id: UUID, wanted: Wanted, by: Sequence[Grouping] = ()) -> list[Count]:
    """The cases of a project by group, by what was done and by what turned out; `by` policy, the key has two parts."""
    keys = [column for one in by for column in _key(tx, one)]
    kinds = [cases.c.treatment, _PROBABILITY, cases.c.outcome]
    columns: list[Any] = [
        *keys,
        *kinds,
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(cases.c.gpu_hours_saved), 0.0),
        sa.func.coalesce(sa.func.sum(cases.c.gpu_hours_lost), 0.0),
        sa.func.count().filter(cases.c.gpu_hours.is_(None)),
        sa.func.max(cases.c.stated_risk),
    ]
    query = _from(tx, sa.select(*columns), project_id, wanted, by).group_by(*keys, *kinds)
    return [Count(tuple(row[: len(keys)]), *row[len(keys) :]) for row in tx.execute(query)]


def delays(tx: Transaction, project_id: UUID, wanted: Wanted, by: Sequence[Grouping] = ()) -> list[Delay]:
    """The delays of all stops that were let run and right, of which the turn is known."""
    keys = [column for one in by for column in _key(tx, one)]
    query = _from(tx, sa.select(*keys, cases.c.delay_steps, _PROBABILITY), project_id, wanted, by).where(
        cases.c.treatment == "let_run", cases.c.outcome == "right", cases.c.delay_steps.is_not(None)
    )
    return [Delay(tuple(row[: len(keys)]), *row[len(keys) :]) for row in tx.execute(query)]


def listing(
    tx: Transaction, project_id: UUID, wanted: Wanted, *, before: Place | None = None, limit: int = 50
) -> list[Listed]:
    """The cases that a count is made of, those that ended last first, after the place `before` in that order."""
    own = (column for column in Listed.__dataclass_fields__ if column in cases.c)
    columns = [
        *(cases.c[name] for name in own),
        runs.c.name.label("run_name"),
        policies.c.name.label("policy_name"),
        policies.c.version.label("policy_version"),
    ]
    query = _from(tx, sa.select(*columns), project_id, wanted, ()).join(runs, runs.c.id == cases.c.run_id)
    order = (cases.c.ended_at, cases.c.run_id, cases.c.attempt)
    if before is not None:
        query = query.where(sa.tuple_(*order) < before)
    rows = tx.execute(query.order_by(*(column.desc() for column in order)).limit(limit)).mappings()
    return [Listed(**row) for row in rows]


def job_kinds(tx: Transaction, project_id: UUID) -> list[str]:
    """All kinds of jobs that the cases of a project are of, by name."""
    query = sa.select(cases.c.job_kind).where(cases.c.project_id == project_id, cases.c.job_kind.is_not(None))
    return list(tx.execute(query.distinct().order_by(cases.c.job_kind)).scalars())


# What release 0.1.0 let run it did in shadow mode, and so in any case.
_PROBABILITY = sa.case(
    (cases.c.treatment == "let_run", sa.func.coalesce(cases.c.observed_probability, sa.literal_column("1.0"))),
    else_=cases.c.observed_probability,
)


def _from(
    tx: Transaction, query: sa.Select[Any], project_id: UUID, wanted: Wanted, by: Sequence[Grouping]
) -> sa.Select[Any]:
    query = query.join_from(cases, policies, policies.c.id == cases.c.policy_id)
    if "detector" in by:
        query = query.join(_detectors(tx), sa.true())
    exact = {
        policies.c.name: wanted.policy,
        policies.c.version: wanted.version,
        sa.func.coalesce(cases.c.job_kind, ""): wanted.job_kind,
        cases.c.treatment: wanted.treatment,
        cases.c.outcome: wanted.outcome,
        cases.c.truth: wanted.truth,
    }
    conditions = [column == value for column, value in exact.items() if value is not None]
    if wanted.detector is not None:
        one = _detectors(tx)
        conditions.append(sa.exists(sa.select(1).select_from(one).where(one.c.value == wanted.detector)))
    if wanted.since is not None:
        conditions.append(cases.c.ended_at >= wanted.since)
    if wanted.until is not None:
        conditions.append(cases.c.ended_at < wanted.until)
    if wanted.flagged is not None:
        conditions.append(cases.c.decision_id.is_not(None) == wanted.flagged)
    return query.where(cases.c.project_id == project_id, *conditions)


def _key(tx: Transaction, by: Grouping) -> list[sa.ColumnElement[Any]]:
    match by:
        case "policy":
            return [policies.c.name, policies.c.version]
        case "job_kind":
            return [cases.c.job_kind]
        case "detector":
            return [sa.literal_column("detector.value", sa.Text)]
    # Spelled out, not bound: PostgreSQL sees that what is selected is what is grouped by only then.
    ended_at = cases.c.ended_at
    if tx.dialect.name == "postgresql":
        first = sa.func.date_trunc(sa.literal_column(f"'{by}'"), ended_at)
        return [sa.func.to_char(first, sa.literal_column("'YYYY-MM-DD'"))]
    moves = {"day": [], "week": ["'weekday 0'", "'-6 days'"], "month": ["'start of month'"]}[by]
    return [sa.func.date(ended_at, *(sa.literal_column(move) for move in moves))]


def _detectors(tx: Transaction) -> sa.FromClause:
    """One row for each detector that called for a stop; none for what was never flagged, whatever stands there."""
    found = cases.c.detectors
    if tx.dialect.name == "postgresql":
        listed = sa.case((sa.func.json_typeof(found) == "array", found), else_=sa.literal_column("'[]'::json"))
        return sa.func.json_array_elements_text(listed).table_valued("value").lateral("detector")
    listed = sa.case((sa.func.json_type(found) == "array", found), else_=sa.literal_column("'[]'"))
    return sa.func.json_each(listed).table_valued("value", name="detector")
