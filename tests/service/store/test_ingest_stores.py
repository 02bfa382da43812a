"""Saving ingested runs compares versions: a run that another process saved is skipped, the others are saved."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.domain.run import BestCheckpoint, Call, Evidence, RawMaximum, Verdict
from evalstop_service.store import runs, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.ingest import FollowUp, IngestStore, PostgresIngest, RunChange, SqliteIngest
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.committers import run_on_loop
from tests.service.concurrency import wait_for_blocked_process
from tests.service.project_fixture import NOW, ProjectFixture, set_up_project

LATER = NOW + timedelta(microseconds=1)
UNUSUAL_OBSERVATIONS = [
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


def change_run(run: Run) -> Run:
    """Change every field of the run that `save` writes."""
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


def save_changes(
    project: ProjectFixture, changes: Sequence[RunChange], follow_up: FollowUp | None = None
) -> Collection[UUID]:
    """Save with a store of its own."""

    async def save_and_close() -> Collection[UUID]:
        store: IngestStore = (SqliteIngest if project.database.embedded else PostgresIngest)(project.database)
        try:
            return await store.save(changes, LATER, follow_up)
        finally:
            await store.close()

    return run_on_loop(save_and_close())


def set_field(run: Run) -> RunChange:
    return RunChange(run, change_run(run), [PostedObservation("eval", 0, 1.0)])


def convert_to_utc(observation: PostedObservation) -> PostedObservation:
    return replace(observation, time=observation.time.astimezone(UTC) if observation.time else None)


def test_saved_values_are_read_back_unchanged(project: ProjectFixture) -> None:
    """Every number, name and time is read back as it was sent, from the run and its observations."""
    run, other = project.open_run(), project.open_run()
    many = [PostedObservation("loss", step, step / 7) for step in range(500)]
    assert save_changes(
        project, [RunChange(run, change_run(run), [*UNUSUAL_OBSERVATIONS, *many]), set_field(other)]
    ) == {run.id, other.id}
    assert (project.load_run(run), project.load_run(other)) == (change_run(run), change_run(other))
    rows = project.load_rows(tables.observations, run)
    stored = [
        PostedObservation(row["metric"], row["step"], row["value"], row["stderr"], row["observed_at"]) for row in rows
    ]
    assert sorted(map(repr, map(convert_to_utc, stored))) == sorted(
        map(repr, map(convert_to_utc, [*UNUSUAL_OBSERVATIONS, *many]))
    )
    assert {(row["attempt"], row["superseded_by"], row["received_at"]) for row in rows} == {(1, tables.LIVE, LATER)}


def test_run_with_another_version_is_skipped(project: ProjectFixture) -> None:
    """Nothing is written for a run whose version differs or that does not exist; other runs are saved."""
    unchanged, moved_on = project.open_run(), project.open_run()
    followed_up: list[UUID] = []

    def follow_up(_tx: Transaction, saved: Collection[UUID]) -> None:
        followed_up.extend(saved)

    outdated_changes = [
        set_field(replace(moved_on, version=moved_on.version + 1)),
        set_field(replace(moved_on, id=new_id())),
    ]
    assert save_changes(project, [set_field(unchanged), *outdated_changes], follow_up) == {unchanged.id}
    assert followed_up == [unchanged.id]
    assert len(project.load_rows(tables.observations, unchanged)) == 1
    assert project.load_rows(tables.observations, moved_on) == []
    assert project.load_run(moved_on) == moved_on
    assert save_changes(project, [set_field(moved_on)]) == {moved_on.id}


def test_failed_follow_up_undoes_the_save(project: ProjectFixture) -> None:
    """When the follow-up in the same transaction fails, nothing is saved."""
    run = project.open_run()

    def follow_up(tx: Transaction, _saved: Collection[UUID]) -> None:
        tx.execute(sa.text("SELECT nothing FROM nowhere"))

    with pytest.raises(sa.exc.DBAPIError):
        save_changes(project, [set_field(run)], follow_up)
    assert project.load_rows(tables.observations, run) == []
    assert project.load_run(run) == run


def test_duplicate_identity_is_refused(project: ProjectFixture) -> None:
    """The primary key refuses a second observation of the same identity, and the whole save is undone."""
    run = project.open_run()
    with pytest.raises(sa.exc.IntegrityError) as caught:
        save_changes(
            project,
            [RunChange(run, change_run(run), [PostedObservation("eval", 0, 1.0), PostedObservation("eval", 0, 2.0)])],
        )
    assert not caught.value.connection_invalidated
    assert project.load_rows(tables.observations, run) == []


def test_save_waits_for_a_locked_run(postgres_database: Database) -> None:
    """A run that another transaction has locked is compared as that transaction leaves it."""
    project = set_up_project(postgres_database)
    run = project.open_run()
    with ThreadPoolExecutor(1) as thread:
        with postgres_database.transaction() as tx:
            runs.lock_runs(tx, [run.id])
            saved = thread.submit(save_changes, project, [set_field(run)])
            wait_for_blocked_process(postgres_database)
            runs.save_run(tx, replace(run, version=run.version + 1))
        assert saved.result(30) == set()
    assert project.load_rows(tables.observations, run) == []
