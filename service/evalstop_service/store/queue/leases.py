"""Leases: one worker holds a delivery for a limited time, from claiming it to settling it.

A worker claims a waiting delivery by moving its `due_at` to the end of the lease. Each claim increments `attempts`, and
that number identifies the lease: a worker that settles with an older number changes nothing.

Times are compared with one clock for all workers: PostgreSQL's, or the machine's on the embedded database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import sqlalchemy as sa

from evalstop_service.domain.event_types import REQUEST_EVENTS
from evalstop_service.security.encryption import Encryption, UnreadableSecret
from evalstop_service.store import decisions, endpoints
from evalstop_service.store.database import Transaction, driver_connection
from evalstop_service.store.queue import breakers, queues
from evalstop_service.store.queue.attempts import ClaimedDelivery, Dead, Delivered, FinishedAttempt, Released, Retry
from evalstop_service.store.queue.breakers import BreakerLimits
from evalstop_service.store.tables import deliveries, moment_text
from evalstop_service.store.tables import endpoints as targets

UNREADABLE_PAUSE_SECONDS = 60.0
"""How long a delivery waits when no key decrypts its secret."""


VETO_PAUSE_SECONDS = 0.1
"""How long a stop waits when another transaction, which may veto it, holds its decision."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """The deliveries still held, and those cancelled meanwhile. All others had been taken over by other workers.

    `opened`: endpoints whose circuit breaker opened, and until when.
    """

    still_held: frozenset[UUID]
    cancelled: frozenset[UUID]
    opened: Mapping[UUID, datetime] = field(default_factory=dict)


def claim_deliveries(
    tx: Transaction,
    now: datetime,
    lease_seconds: float,
    limit: int,
    per_endpoint: int,
    room: Mapping[UUID, int] | None = None,
    encryption: Encryption = endpoints.UNENCRYPTED,
) -> list[ClaimedDelivery]:
    """Claim up to `limit` deliveries that are due, longest due first, and at most `per_endpoint` of one endpoint.

    `room`: endpoints with a limit other than `per_endpoint`.

    1. Select what is due and lock it, skipping rows that another worker has locked, so that no two workers claim the
       same delivery and none waits for another.
    2. Move `due_at` to the end of the lease and increment `attempts`. If this worker dies, the delivery becomes due
       again by itself.
    3. For an endpoint whose circuit breaker is open, claim the one trial; without it, put the delivery back.
    4. Decrypt the secrets. A delivery whose secrets cannot be decrypted is put back for a minute, and its attempt is
       not counted.
    5. Hand the stops among them over, after which they cannot be vetoed. One that may be being vetoed is put back.
    """
    if limit <= 0:
        return []
    lease_until = now + timedelta(seconds=lease_seconds)
    claim = _claim_postgresql if tx.dialect.name == "postgresql" else _claim_sqlite
    claims = claim(tx, now, lease_until, limit, per_endpoint, room or {})
    turns = {claimed.endpoint_id: claimed.open_until for claimed in claims if claimed.open_until is not None}
    trials = breakers.claim_trials(tx, turns, lease_until) if turns else set()
    ready = []
    for claimed in claims:
        if claimed.open_until is not None and claimed.endpoint_id not in trials:
            _put_back(tx, claimed, claimed.due_at, None)
            continue
        try:
            opened = tuple(encryption.decrypt(stored, claimed.endpoint_id) for stored in claimed.secrets)
        except UnreadableSecret as error:
            _put_back(tx, claimed, now + timedelta(seconds=UNREADABLE_PAUSE_SECONDS), str(error))
            continue
        ready.append(claimed if opened == claimed.secrets else replace(claimed, secrets=opened))
    return hand_over(tx, ready, now)


def hand_over(tx: Transaction, claims: Sequence[ClaimedDelivery], now: datetime) -> list[ClaimedDelivery]:
    """The claimed deliveries without stops that may be being vetoed, which are put back; the others are handed over."""
    receivers = {(claimed.run_id, claimed.stop_of): claimed.receiver for claimed in claims if claimed.stop_of}
    if not receivers:
        return list(claims)
    may_go_out = decisions.hand_over(tx, receivers, now)
    held_back = [claimed for claimed in claims if claimed.stop_of and claimed.stop_of not in may_go_out]
    for claimed in held_back:
        _put_back(tx, claimed, now + timedelta(seconds=VETO_PAUSE_SECONDS), None)
    return [claimed for claimed in claims if claimed not in held_back]


def settle_deliveries(
    tx: Transaction, ended: Sequence[FinishedAttempt], breaker: BreakerLimits | None = None
) -> Settlement:
    """Record the results of many attempts. Where the lease expired and another worker took over, nothing changes.

    `breaker`: when a failing endpoint is left alone; None: never.

    1. Lock the endpoints that will change before their deliveries: deleting an endpoint locks in the same order, so the
       two cannot deadlock.
    2. Update each delivery that still waits under the same attempt, and log the attempt.
    3. Disable the endpoints that answered that they are gone for good.
    4. Count consecutive failures, and open the circuit breakers of endpoints that reached the limit.
    """
    if not ended:
        return Settlement(frozenset(), frozenset())
    gone_endpoints = {attempt.claimed.endpoint_id for attempt in ended if attempt.is_gone}
    counted = [attempt for attempt in ended if attempt.was_tried or attempt.is_trial] if breaker is not None else []
    failing_endpoints = {
        attempt.claimed.endpoint_id for attempt in counted if attempt.claimed.failures or not attempt.went_well
    }
    if changing := gone_endpoints | failing_endpoints:
        lock = sa.select(targets.c.id).where(targets.c.id.in_(changing)).order_by(targets.c.id)
        tx.execute(lock.with_for_update(key_share=True))
    write = _settle_postgresql if tx.dialect.name == "postgresql" else _settle_sqlite
    present = write(tx, ended)
    still_held = [
        attempt for attempt in ended if present.get(attempt.claimed.id) == ("waiting", attempt.claimed.attempts)
    ]
    for endpoint_id in sorted({attempt.claimed.endpoint_id for attempt in still_held if attempt.is_gone}):
        endpoints.disable_endpoint(tx, endpoint_id)
    opened: dict[UUID, datetime] = {}
    if breaker is not None and failing_endpoints:
        # A delivery that was cancelled during its attempt shows as well whether its endpoint works.
        valid = [
            attempt
            for attempt in counted
            if attempt.claimed.endpoint_id in failing_endpoints
            and present.get(attempt.claimed.id)
            in [(state, attempt.claimed.attempts) for state in ("waiting", "cancelled")]
        ]
        opened = breakers.record_results(tx, valid, breaker)
    return Settlement(
        frozenset(attempt.claimed.id for attempt in still_held),
        frozenset(key for key, (state, _) in present.items() if state == "cancelled"),
        opened,
    )


def _put_back(tx: Transaction, claimed: ClaimedDelivery, due_at: datetime, error: str | None) -> None:
    """Undo an uncommitted claim."""
    table = deliveries.c
    values: dict[str, Any] = {"due_at": due_at, "attempts": table.attempts - 1}
    if error is not None:
        values["last_error"] = error
    tx.execute(sa.update(deliveries).where(table.run_id == claimed.run_id, table.id == claimed.id).values(values))


def _claim_postgresql(
    tx: Transaction, now: datetime, lease_until: datetime, limit: int, per_endpoint: int, room: Mapping[UUID, int]
) -> list[ClaimedDelivery]:
    values = queues.claim_parameters(now, limit, per_endpoint, room) | {"lease_until": lease_until}
    rows = driver_connection(tx).cursor(binary=True).execute(_CLAIM_POSTGRESQL, values, prepare=True)
    return [
        ClaimedDelivery(
            run_id,
            key,
            event_id,
            to_id,
            tries + 1,
            due_at.astimezone(UTC),
            lease_until,
            url,
            endpoints.select_valid_secrets(secrets[0], secrets[1], secrets[2], secrets[3], now),
            body,
            form,
            failures,
            open_until and open_until.astimezone(UTC),
            stop,
        )
        for run_id, key, event_id, to_id, tries, due_at, open_until, url, *secrets, body, form, failures, stop in rows
    ]


def _claim_sqlite(
    tx: Transaction, now: datetime, lease_until: datetime, limit: int, per_endpoint: int, room: Mapping[UUID, int]
) -> list[ClaimedDelivery]:
    due = queues.find_due_deliveries(tx, now, limit, per_endpoint, room)
    keys = [(delivery.run_id.hex, delivery.id.hex) for delivery in due]
    connection = driver_connection(tx)
    connection.executemany(_TAKE_SQLITE, [(moment_text(lease_until), *key) for key in keys])
    # The due deliveries were found in the queues alone, so that the bodies of skipped ones are not read.
    contents = [connection.execute(_CONTENTS_SQLITE, key).fetchone() for key in keys]
    return [
        ClaimedDelivery(
            delivery.run_id,
            delivery.id,
            UUID(event_id),
            delivery.endpoint_id,
            delivery.attempts + 1,
            delivery.due_at,
            lease_until,
            url,
            endpoints.select_valid_secrets(
                secret, previous, until and datetime.fromisoformat(until + "+00:00"), signing_key, now
            ),
            body,
            form,
            failures,
            delivery.open_until,
            stop_of and UUID(stop_of),
        )
        for delivery, (event_id, url, secret, previous, until, signing_key, body, form, failures, stop_of) in zip(
            due, contents, strict=True
        )
    ]


def _settle_postgresql(tx: Transaction, ended: Sequence[FinishedAttempt]) -> dict[UUID, tuple[str, int]]:
    document = msgspec.json.encode([_to_row(attempt) for attempt in ended]).decode()
    rows = driver_connection(tx).cursor(binary=True).execute(_SETTLE_POSTGRESQL, (document,), prepare=True)
    return {key: (state, attempts) for key, state, attempts in rows}


def _settle_sqlite(tx: Transaction, ended: Sequence[FinishedAttempt]) -> dict[UUID, tuple[str, int]]:
    connection = driver_connection(tx)
    present: dict[UUID, tuple[str, int]] = {}
    settled_rows = []
    for attempt in ended:
        found = connection.execute(_PRESENT_SQLITE, (attempt.claimed.run_id.hex, attempt.claimed.id.hex)).fetchone()
        if found is not None:
            present[attempt.claimed.id] = found
        if found == ("waiting", attempt.claimed.attempts):
            row = _to_row(attempt)
            moments = {name: moment_text(row[name]) for name in ("new_due_at", "ended_at")}
            settled_rows.append(row | moments | {"of_run": row["of_run"].hex, "of_id": row["of_id"].hex})
    connection.executemany(_CHANGE_SQLITE, settled_rows)
    connection.executemany(_LOG_SQLITE, [row for row in settled_rows if row["tried"]])
    return present


def _to_row(ended: FinishedAttempt) -> dict[str, Any]:
    """The new state of the delivery's row, and the attempt to log."""
    claimed, result = ended.claimed, ended.result
    state, due_at, error = "waiting", claimed.due_at, None
    match result:
        case Delivered():
            state = "delivered"
        case Retry():
            due_at, error = result.due_at, result.error
        case Dead():
            state, error = "dead", result.error
        case Released():
            due_at = ended.at
    return {
        "of_run": claimed.run_id,
        "of_id": claimed.id,
        "number": claimed.attempts,
        "new_state": state,
        "new_due_at": due_at,
        "error": error,
        "ended_at": ended.at,
        "took_ms": ended.duration_ms,
        "code": ended.status_code,
        "tried": ended.was_tried,
        "sent_to": claimed.url,
        "answer": ended.answer,
    }


_CHANGE = """
UPDATE deliveries SET state = {new_state}, due_at = {new_due_at},
    last_error = CASE WHEN {new_state} = 'delivered' THEN NULL ELSE coalesce({error}, last_error) END,
    settled_at = CASE WHEN {new_state} <> 'waiting' THEN {ended_at} END
"""

_LOG = "INSERT INTO delivery_attempts (run_id, delivery_id, number, at, duration_ms, status_code, error, url, answer)"

_ROW = ("of_run", "of_id", "number", "new_state", "new_due_at", "error", "ended_at", "took_ms", "code", "tried")
_OF_PARAMETERS = {name: f":{name}" for name in _ROW}
_OF_COLUMNS = {name: name for name in _ROW}

_TAKE_SQLITE = "UPDATE deliveries SET due_at = ?, attempts = attempts + 1 WHERE run_id = ? AND id = ?"

# The decision whose stop a delivery hands over: people who read one in a chat cannot end the job.
_STOP_OF = "CASE WHEN endpoints.format = 'standard' AND events.type IN ({}) THEN events.decision_id END".format(
    ", ".join(f"'{event_type}'" for event_type in REQUEST_EVENTS)
)

_CONTENTS_SQLITE = (
    "SELECT event_id, url, secret, previous_secret, previous_secret_until, signing_key, body, format, failures, "
    + _STOP_OF
    + """
FROM deliveries
JOIN endpoints ON endpoints.id = deliveries.endpoint_id
JOIN events ON events.run_id = deliveries.run_id AND events.id = deliveries.event_id
WHERE deliveries.run_id = ? AND deliveries.id = ?
"""
)

_PRESENT_SQLITE = "SELECT state, attempts FROM deliveries WHERE run_id = ? AND id = ?"

_CHANGE_SQLITE = _CHANGE.format_map(_OF_PARAMETERS) + "WHERE run_id = :of_run AND id = :of_id"

_LOG_SQLITE = _LOG + " VALUES (:of_run, :of_id, :number, :ended_at, :took_ms, :code, :error, :sent_to, :answer)"

# One statement each on PostgreSQL, since every further one is a round trip.
_CLAIM_POSTGRESQL = (
    queues.QUEUES  # noqa: S608 - of constants alone
    + ", head AS MATERIALIZED ("
    + queues.HEAD_POSTGRESQL
    + """
), taken AS (
    UPDATE deliveries SET due_at = %(lease_until)s, attempts = deliveries.attempts + 1 FROM head
    WHERE deliveries.run_id = head.run_id AND deliveries.id = head.id
    RETURNING deliveries.run_id, deliveries.id, deliveries.event_id, deliveries.endpoint_id, head.attempts, head.due_at,
        head.open_until
)
SELECT taken.run_id, taken.id, taken.event_id, taken.endpoint_id, taken.attempts, taken.due_at, taken.open_until,
    endpoints.url, endpoints.secret, endpoints.previous_secret, endpoints.previous_secret_until,
    endpoints.signing_key, events.body, endpoints.format, endpoints.failures, """
    + _STOP_OF
    + """
FROM taken
JOIN endpoints ON endpoints.id = taken.endpoint_id
JOIN events ON events.run_id = taken.run_id AND events.id = taken.event_id
ORDER BY taken.due_at, taken.id
"""
)

# Rows are locked in key order, as bulk cancellation locks them.
_SETTLE_POSTGRESQL = (
    "WITH"  # noqa: S608 - of constants alone
    """ ended AS MATERIALIZED (
    SELECT * FROM json_to_recordset(%s) AS ended (
        of_run uuid, of_id uuid, number integer, new_state text, new_due_at timestamptz, error text,
        ended_at timestamptz, took_ms double precision, code integer, tried boolean, sent_to text, answer text
    )
), present AS MATERIALIZED (
    SELECT deliveries.run_id, deliveries.id, deliveries.state, deliveries.attempts FROM deliveries
    JOIN ended ON deliveries.run_id = ended.of_run AND deliveries.id = ended.of_id
    ORDER BY deliveries.run_id, deliveries.id FOR UPDATE OF deliveries
), settled AS ("""
    + _CHANGE.format_map(_OF_COLUMNS)
    + """
    FROM ended JOIN present ON present.run_id = of_run AND present.id = of_id AND present.attempts = number
    WHERE deliveries.run_id = of_run AND deliveries.id = of_id AND present.state = 'waiting'
    RETURNING of_id, number
), logged AS ("""
    + _LOG
    + """
    SELECT of_run, of_id, number, ended_at, took_ms, code, error, sent_to, answer
    FROM ended JOIN settled USING (of_id, number) WHERE tried
)
SELECT id, state, attempts FROM present
"""
)
