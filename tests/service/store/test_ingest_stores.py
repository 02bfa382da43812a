"""Saving compares versions: a run that another process saved is left alone, and its neighbors are saved."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.rules.run_results import BestCheckpoint, Call, Evidence, RawMaximum, Verdict
from evalstop_service.store import runs, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.ingest import FollowUp, IngestStore, RunChange
from evalstop_service.store.ingest_postgres import PostgresIngest
from evalstop_service.store.ingest_sqlite import SqliteIngest
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.committers import run_on_loop
from tests.service.project_fixture import NOW, ProjectFixture, set_up_project, wait_for_blocked_process

LATER = NOW + timedelta(microseconds=1)
STRANGE = [
    PostedObservation("not a number", 0, math.nan),
    PostedObservation("not a number", 1, math.inf, 0.5),
    PostedObservation(
        "not a number", 2, -math.inf, None, datetime(2026, 1, 1, 5, 30, tzinfo=timezone(timedelta(hours=5.5)))
    ),
    PostedObservation('a"b\\c\n\td', 2**53 - 1, -1e-300, 1e-300, LATER),
    PostedObservation("Ω/𝄞", 0, 1.7976931348623157e308, 5e-324, datetime(1, 1, 1, tzinfo=UTC)),
    PostedObservation("Ω/𝄞", 1, 0.1 + 0.2, 0.0, datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
]


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


def changed(run: Run) -> Run:
    """The run with everything in it that `save` writes."""
    evidence = Evidence("k_decline", ("eval",), "count", 1e-300, None, 0.1 + 0.2, 1, "")
    verdict = Verdict(Call.SUSPECT, 3, 1, 'ü"\\', (evidence,))
    return replace(
        run,
        version=run.version + 1,
        last_step=2**53 - 1,
        verdict=verdict,
        best_checkpoint=BestCheckpoint(1, "s3://a", 0.1 + 0.2, "raw_maximum"),
        raw_maximum=RawMaximum(2, 1e-300),
        updated_at=LATER,
    )


def save(project: ProjectFixture, changes: Sequence[RunChange], follow_up: FollowUp | None = None) -> Collection[UUID]:
    """Save on a store of its own."""

    async def saved() -> Collection[UUID]:
        store: IngestStore = (SqliteIngest if project.database.embedded else PostgresIngest)(project.database)
        try:
            return await store.save(changes, LATER, follow_up)
        finally:
            await store.close()

    return run_on_loop(saved())


def one_point(run: Run) -> RunChange:
    return RunChange(run, changed(run), [PostedObservation("eval", 0, 1.0)])


def in_utc(point: PostedObservation) -> PostedObservation:
    return replace(point, time=point.time.astimezone(UTC) if point.time else None)


def test_what_is_saved_reads_back(project: ProjectFixture) -> None:
    """Every number, name and moment comes back as it was sent, in the row of the run and in its observations."""
    run, other = project.open_run(), project.open_run()
    many = [PostedObservation("loss", step, step / 7) for step in range(500)]
    assert save(project, [RunChange(run, changed(run), [*STRANGE, *many]), one_point(other)]) == {run.id, other.id}
    assert (project.load_run(run), project.load_run(other)) == (changed(run), changed(other))
    rows = project.load_rows(tables.observations, run)
    stored = [
        PostedObservation(row["metric"], row["step"], row["value"], row["stderr"], row["observed_at"]) for row in rows
    ]
    assert sorted(map(repr, map(in_utc, stored))) == sorted(map(repr, map(in_utc, [*STRANGE, *many])))
    assert {(row["attempt"], row["superseded_by"], row["received_at"]) for row in rows} == {(1, tables.LIVE, LATER)}


def test_a_run_that_moved_on_is_left_alone(project: ProjectFixture) -> None:
    """Of a run with another version, or that does not exist, nothing is written, nor done; of its neighbor all is."""
    here, moved = project.open_run(), project.open_run()
    followed: list[UUID] = []

    def follow_up(_tx: Transaction, saved: Collection[UUID]) -> None:
        followed.extend(saved)

    wrong = [one_point(replace(moved, version=moved.version + 1)), one_point(replace(moved, id=new_id()))]
    assert save(project, [one_point(here), *wrong], follow_up) == {here.id}
    assert followed == [here.id]
    assert len(project.load_rows(tables.observations, here)) == 1
    assert project.load_rows(tables.observations, moved) == []
    assert project.load_run(moved) == moved
    assert save(project, [one_point(moved)]) == {moved.id}


def test_what_follows_is_saved_with_it_or_neither(project: ProjectFixture) -> None:
    """When what follows from a save fails, nothing of the save stays."""
    run = project.open_run()

    def follow_up(tx: Transaction, _saved: Collection[UUID]) -> None:
        tx.execute(sa.text("SELECT nothing FROM nowhere"))

    with pytest.raises(sa.exc.DBAPIError):
        save(project, [one_point(run)], follow_up)
    assert project.load_rows(tables.observations, run) == []
    assert project.load_run(run) == run


def test_refuses_an_identity_twice(project: ProjectFixture) -> None:
    """The key itself keeps an identity from being stored twice, and the whole save is undone."""
    run = project.open_run()
    with pytest.raises(sa.exc.IntegrityError) as caught:
        save(
            project,
            [RunChange(run, changed(run), [PostedObservation("eval", 0, 1.0), PostedObservation("eval", 0, 2.0)])],
        )
    assert not caught.value.connection_invalidated
    assert project.load_rows(tables.observations, run) == []


def test_waits_for_whoever_holds_the_run(postgres_database: Database) -> None:
    """A run that another transaction holds is compared as that leaves it."""
    project = set_up_project(postgres_database)
    run = project.open_run()
    with ThreadPoolExecutor(1) as thread:
        with postgres_database.transaction() as tx:
            runs.lock_runs(tx, [run.id])
            saved = thread.submit(save, project, [one_point(run)])
            wait_for_blocked_process(postgres_database)
            runs.save_run(tx, replace(run, version=run.version + 1))
        assert saved.result(30) == set()
    assert project.load_rows(tables.observations, run) == []
