"""Observations spread over partitions by run, while trainers go on posting: PostgreSQL alone.

Beside the table a partitioned one is made. From then on a trigger repeats there whatever is done to an observation, and
what was on record before is copied a run and a few thousand rows at a time, each time with that run's row locked, as
whoever writes observations locks it. Once all is there the two change names, which takes a lock of a moment. Stopped
half-way it is begun again: what is copied already is passed over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
deploy = "after"

PARTITIONS = 16
ROWS_AT_A_TIME = 10_000
LOCK_TIMEOUT_SECONDS = 2
TRIES = 60

_COLUMNS = "run_id, metric, step, superseded_by, value, stderr, attempt, observed_at, received_at"
_KEY = "run_id, metric, step, superseded_by"

_TABLE = """
CREATE TABLE IF NOT EXISTS {name} (
    run_id uuid NOT NULL,
    metric text COLLATE "C" NOT NULL,
    step bigint NOT NULL,
    superseded_by integer NOT NULL,
    value double precision,
    stderr double precision,
    attempt integer NOT NULL,
    observed_at timestamptz,
    received_at timestamptz NOT NULL,
    CONSTRAINT pk_{name} PRIMARY KEY (run_id, metric, step, superseded_by)
) {options}
"""

_MIRROR = f"""
CREATE OR REPLACE FUNCTION evalstop_mirror_observation() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        DELETE FROM observations_new WHERE ({_KEY}) = (OLD.run_id, OLD.metric, OLD.step, OLD.superseded_by);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO observations_new ({_COLUMNS}) VALUES (
            NEW.run_id, NEW.metric, NEW.step, NEW.superseded_by, NEW.value, NEW.stderr, NEW.attempt,
            NEW.observed_at, NEW.received_at
        );
    END IF;
    RETURN NULL;
END $$
"""  # noqa: S608

_TRIGGER = """
CREATE TRIGGER evalstop_mirror AFTER INSERT OR UPDATE OR DELETE ON observations
FOR EACH ROW EXECUTE FUNCTION evalstop_mirror_observation()
"""

_COPY = sa.text(f"""
WITH part AS (
    SELECT {_COLUMNS} FROM observations
    WHERE run_id = :run_id AND (metric, step, superseded_by) > (:metric, :step, :superseded_by)
    ORDER BY metric, step, superseded_by LIMIT {ROWS_AT_A_TIME}
), copied AS (
    INSERT INTO observations_new ({_COLUMNS}) SELECT {_COLUMNS} FROM part ON CONFLICT DO NOTHING
)
SELECT metric, step, superseded_by FROM part ORDER BY metric DESC, step DESC, superseded_by DESC LIMIT 1
""")  # noqa: S608


def upgrade() -> None:
    if op.get_context().dialect.name != "postgresql":
        return
    engine = op.get_bind().engine
    with op.get_context().autocommit_block():  # nothing is held open meanwhile
        _begin_to_mirror(engine)
        for run_id in _runs(engine):
            _copy(engine, run_id)
    # In the order in which writers come by them. Dropping a foreign key locks the table that it refers to as well.
    _patiently(op.get_bind(), ["LOCK TABLE runs, observations, observations_new IN ACCESS EXCLUSIVE MODE"])
    op.execute("DROP TABLE observations")
    op.execute("DROP FUNCTION evalstop_mirror_observation")
    op.execute("ALTER TABLE observations_new RENAME TO observations")
    op.execute("ALTER TABLE observations RENAME CONSTRAINT pk_observations_new TO pk_observations")


def downgrade() -> None:
    if op.get_context().dialect.name != "postgresql":
        return
    op.execute("ALTER TABLE observations RENAME TO observations_spread")
    op.execute("ALTER TABLE observations_spread RENAME CONSTRAINT pk_observations TO pk_observations_spread")
    op.execute(_TABLE.format(name="observations", options=""))
    op.execute('ALTER TABLE observations ALTER metric TYPE text COLLATE "default"')
    op.execute(f"INSERT INTO observations ({_COLUMNS}) SELECT {_COLUMNS} FROM observations_spread")  # noqa: S608
    op.create_foreign_key("fk_observations_run_id", "observations", "runs", ["run_id"], ["id"])
    op.execute("DROP TABLE observations_spread")


def _begin_to_mirror(engine: sa.Engine) -> None:
    with engine.begin() as tx:
        if tx.exec_driver_sql("SELECT to_regclass('observations_new')").scalar() is not None:
            return  # it was begun before; the trigger has been at work ever since
        tx.exec_driver_sql(_TABLE.format(name="observations_new", options="PARTITION BY HASH (run_id)"))
        for number in range(PARTITIONS):
            tx.exec_driver_sql(
                f"CREATE TABLE observations_p{number:02} PARTITION OF observations_new "
                f"FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {number})"
            )
        tx.exec_driver_sql(_MIRROR)
        _patiently(tx, [_TRIGGER])


def _runs(engine: sa.Engine) -> Iterator[UUID]:
    """Every run; those that are opened meanwhile are mirrored from their first observation on."""
    last: UUID | None = None
    query = "SELECT id FROM runs WHERE CAST(:last AS uuid) IS NULL OR id > :last ORDER BY id LIMIT 1000"
    while True:
        with engine.begin() as tx:
            found: list[UUID] = list(tx.execute(sa.text(query), {"last": last}).scalars())
        yield from found
        if not found:
            return
        last = found[-1]


def _copy(engine: sa.Engine, run_id: UUID) -> None:
    key: dict[str, Any] | None = {"metric": "", "step": -1, "superseded_by": -1}
    while key is not None:
        with engine.begin() as tx:
            tx.execute(sa.text("SELECT id FROM runs WHERE id = :run_id FOR SHARE"), {"run_id": run_id})
            row = tx.execute(_COPY, {"run_id": run_id, **key}).mappings().first()
            key = dict(row) if row is not None else None


def _patiently(tx: sa.Connection, statements: list[str]) -> None:
    """Run what needs a lock, giving way to whoever waits behind it."""
    tx.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'")
    for tries_left in reversed(range(TRIES)):
        try:
            with tx.begin_nested():
                for statement in statements:
                    tx.exec_driver_sql(statement)
            return
        except sa.exc.OperationalError:
            if not tries_left:
                raise
            time.sleep(0.5)
