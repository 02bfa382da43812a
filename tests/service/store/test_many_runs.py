"""Queries for many runs in one transaction: locks, monitor states, observations and lists."""

from __future__ import annotations

import math
import re
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from evalstop_service.decisions import stale_runs
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.domain.labels import read_gpus
from evalstop_service.domain.run import Call, RunDescription
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.ingest import Resumed, open_run
from evalstop_service.store import observations, run_details, run_lists, runs, series, tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_lists import RunFilter
from msgspec.structs import replace

from tests.fixtures.statements import record_statements
from tests.service.concurrency import wait_for_blocked_process
from tests.service.project_fixture import NOW, ProjectFixture, evals, set_up_project


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


def test_locking_returns_versions_of_existing_runs(project: ProjectFixture) -> None:
    """Locking many runs returns the version of each that exists, and skips the others."""
    present = [project.open_run() for _ in range(3)]
    with project.database.transaction() as tx:
        versions = runs.lock_runs(tx, [new_id(), *(run.id for run in present)])
    assert versions == {run.id: run.version for run in present}


def test_runs_are_locked_in_order_of_ids(postgres_database: Database) -> None:
    """A transaction that waits for the run with the lowest id holds no other lock, so two cannot deadlock."""
    project = set_up_project(postgres_database)
    opened = [project.open_run() for _ in range(5)]
    ids = [run.id for run in opened]
    with postgres_database.transaction() as tx:
        runs.save_run(tx, replace(opened[0], version=1))  # its row is now the last one in the table

    def lock_all() -> None:
        with postgres_database.transaction() as tx:
            runs.lock_runs(tx, ids[::-1])

    with postgres_database.transaction() as tx:
        runs.lock_runs(tx, ids[:1])
        thread = threading.Thread(target=lock_all)
        thread.start()
        wait_for_blocked_process(postgres_database)
        unlocked = sa.select(tables.runs.c.id).where(tables.runs.c.id.in_(ids[1:])).with_for_update(skip_locked=True)
        assert set(tx.execute(unlocked).scalars()) == set(ids[1:])
    thread.join()


def test_lost_connection_is_reported_and_replaced(postgres_database: Database) -> None:
    """A connection that breaks within a driver-level statement raises SQLAlchemy's error, and the pool replaces it."""
    project = set_up_project(postgres_database)
    run = project.open_run()

    def lock_until_disconnected() -> None:
        with postgres_database.transaction() as tx:
            process_id = tx.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            with psycopg.connect(postgres_database.url.set(drivername="postgresql").render_as_string(False)) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (process_id,))
            while True:
                runs.lock_runs(tx, [run.id])

    with pytest.raises(sa.exc.OperationalError) as caught:
        lock_until_disconnected()
    assert caught.value.connection_invalidated
    with postgres_database.transaction() as tx:
        assert set(runs.lock_runs(tx, [run.id])) == {run.id}


def test_last_steps_skip_superseded_observations(project: ProjectFixture) -> None:
    """The last step of each metric of each run is its highest live one."""
    first, second, empty = (project.open_run() for _ in range(3))
    project.post_observations(
        first, [*evals(0.1, 0.2, 0.3), PostedObservation("loss", 9, 1.0), PostedObservation("ends/with/Ω", 4, 1.0)]
    )
    project.post_observations(second, [PostedObservation("eval", 5, math.nan), PostedObservation("gone", 7, 1.0)])
    project.submit(second, Resumed(6))
    project.post_observations(second, [PostedObservation("kl", 6, 1.0)])
    with project.database.reading() as tx:
        last_steps = observations.load_last_steps(tx, [project.load_run(run) for run in (empty, second, first)])
    assert last_steps == {
        first.id: {"eval": 2, "loss": 9, "ends/with/Ω": 4},
        second.id: {"eval": 5, "kl": 6},
        empty.id: {},
    }


def test_observations_after_a_step_are_in_order(project: ProjectFixture) -> None:
    """Live observations of the given metrics from a step on come by step, then by metric."""
    run = project.open_run()
    project.post_observations(
        run,
        [
            *evals(0.1, 0.2, 0.3),
            PostedObservation("loss", 1, 1.0),
            PostedObservation("loss", 3, 2.0),
            PostedObservation("kl", 2, 1.0),
        ],
    )
    project.submit(run, Resumed(2))
    with project.database.reading() as tx:
        loaded = observations.load_series(tx, run.id, ["loss", "eval"], 1)
        assert observations.load_series(tx, run.id, [], 0) == []
    assert loaded == [
        PostedObservation("eval", 1, 0.2),
        PostedObservation("loss", 1, 1.0),
        PostedObservation("eval", 2, 0.3),
    ]


def test_runs_are_listed_by_description_and_labels(project: ProjectFixture) -> None:
    """Runs are found by owner, group, tags, labels and opening time, alone and combined."""
    opened = {
        name: project.open_run(name, labels={"team": name[0], "a.b[0]": "1", "größe": "7"})
        for name in ("ax", "ay", "bx", "plain")
    }
    with project.database.transaction() as tx:
        for name, run in list(opened.items())[:3]:
            description = RunDescription(
                f"{name[0]}@example.org", f"seeds of {name[1]}", (name, 'a "tag", 100%', "Ω"), "n"
            )
            run_details.save_description(tx, project.id, run.id, description, NOW)

    def found(**wanted: Any) -> list[str]:
        with project.database.reading() as tx:
            return [run.name for run in run_lists.list_runs(tx, project.id, RunFilter(**wanted))]

    assert found(owner="a@example.org") == ["ay", "ax"]
    assert found(group="seeds of x") == ["bx", "ax"]
    assert found(owner="a@example.org", group="seeds of x") == ["ax"]
    assert found(tags=('a "tag", 100%', "Ω")) == ["bx", "ay", "ax"]
    assert found(tags=("ax", "Ω")) == ["ax"]
    assert found(tags=("AX",)) == found(tags=("a",)) == found(owner="a") == found(owner="A@example.org") == []
    assert found(labels=(("team", "a"), ("a.b[0]", "1"))) == ["ay", "ax"]
    assert found(labels=(("team", "a"), ("a.b[0]", "2"))) == []
    assert found(labels=(("team", "a"), ("größe", "7"))) == ["ay", "ax"]
    moment = opened["plain"].created_at
    assert found(since=moment) == ["plain", "bx", "ay", "ax"]
    assert found(until=moment) == found(since=moment + timedelta(microseconds=1)) == []


def test_runs_are_listed_in_each_order(project: ProjectFixture) -> None:
    """Listed by last update or last step, each run comes once over all pages; filters hold in every order."""
    opened = [project.open_run(f"run-{number}") for number in range(7)]
    for number, run in enumerate(opened[1:]):
        project.post_observations(run, [PostedObservation("eval", 10 * (number % 3), 0.5)])

    def list_runs(wanted: RunFilter = RunFilter(), limit: int = 50) -> list[runs.Run]:  # noqa: B008 - it is frozen
        with project.database.reading() as tx:
            return run_lists.list_runs(tx, project.id, wanted, limit)

    rows = list_runs()
    expected = {
        "newest": sorted(rows, key=lambda run: run.id, reverse=True),
        "updated": sorted(rows, key=lambda run: (run.updated_at, run.id), reverse=True),
        "step": sorted(rows, key=lambda run: (-1 if run.last_step is None else run.last_step, run.id), reverse=True),
    }
    for order, expected_runs in expected.items():
        names_seen: list[str] = []
        wanted = RunFilter(order=order)
        while page := list_runs(wanted, 2):
            names_seen += [run.name for run in page]
            after = {"before": page[-1].id} if order == "newest" else {"skipped": len(names_seen)}
            wanted = RunFilter(order=order, **after)
        assert names_seen == [run.name for run in expected_runs]
    for wanted in (
        RunFilter(verdict=Call.STOP),
        RunFilter(mode=Mode.ENFORCE),
        RunFilter(policy="gone"),
        RunFilter(labels=(("job_kind", "dpo"),)),
    ):
        assert list_runs(wanted) == [
            run
            for run in rows
            if (wanted.mode is None or run.mode == wanted.mode)
            and (wanted.verdict is None or run.verdict.verdict == wanted.verdict)
            and wanted.policy is None
            and not wanted.labels
        ]


def test_older_runs_are_searched_from_the_previous_page_on(embedded_database: Database) -> None:
    """Without an index a page searches the newest 20,000 runs; the next page searches as many older ones."""
    project = set_up_project(embedded_database)
    numbers = sa.func.json_each(sa.bindparam("numbers", type_=sa.JSON)).table_valued("value")
    own = {
        tables.runs.c.id: sa.func.printf("%032x", numbers.c.value, type_=sa.Text),
        tables.runs.c.name: sa.func.printf("run-%d", numbers.c.value, type_=sa.Text),
    }
    template = project.open_run()
    copies = sa.select(*(own.get(column, column) for column in tables.runs.c)).where(tables.runs.c.id == template.id)
    with embedded_database.transaction() as tx:
        insert = sa.insert(tables.runs).from_select(
            tables.runs.c.keys(), copies.select_from(tables.runs.join(numbers, sa.true()))
        )
        tx.execute(insert, {"numbers": list(range(1, 20_003))})
        enforced = tables.runs.c.name.in_(["run-1", "run-2", "run-20002"])
        tx.execute(sa.update(tables.runs).values(mode=sa.case((enforced, Mode.ENFORCE), else_=Mode.SHADOW)))
    with embedded_database.reading() as tx:
        newest = run_lists.list_runs(tx, project.id, RunFilter(mode=Mode.ENFORCE))
        older = run_lists.list_runs(tx, project.id, RunFilter(mode=Mode.ENFORCE, before=newest[-1].id))
    assert [run.name for run in newest] == ["run-20002"]
    assert [run.name for run in older] == ["run-2"]


def test_outline_samples_a_series(project: ProjectFixture) -> None:
    """A long series is drawn from a sample spread evenly over its steps, with its first and its last value."""
    run = project.open_run()
    count = 1_500
    project.post_observations(run, [PostedObservation("eval", 3 * step, float(step)) for step in range(count)])
    with project.database.reading() as tx:
        outline = series.load_outlines(tx, [(run.id, "eval")], 124)[run.id, "eval"]
    assert 62 < len(outline) <= 124
    assert (outline[0][0], outline[-1][0]) == (0, 3 * (count - 1))
    assert all(value == step / 3 for step, value in outline)


def test_outlines_of_many_series_take_one_statement(project: ProjectFixture) -> None:
    """Series of all lengths are outlined together; each outline is that of its own series alone."""
    runs_of_lengths = {length: project.open_run() for length in (1, 7, 300)}
    for length, run in runs_of_lengths.items():
        values = [(step * 37 % 11) - 5.0 if step % 5 else math.nan for step in range(1, length + 1)]
        project.post_observations(run, [PostedObservation("eval", step, value) for step, value in enumerate(values)])
    requested = [(run.id, metric) for run in runs_of_lengths.values() for metric in ("eval", "none")]
    with project.database.reading() as tx:
        with record_statements(project.database) as statements:
            outlines = series.load_outlines(tx, requested, 10)
        assert len(statements) == 1
        alone = {key: series.load_outlines(tx, [key], 10).get(key) for key in requested}
    assert {series: outlines.get(series) for series in requested} == alone
    # Seven steps at ten places: each finite value is there.
    seven = outlines[runs_of_lengths[7].id, "eval"]
    assert seven == [(0, -1.0), (1, 3.0), (2, -4.0), (3, 0.0), (5, -3.0), (6, 1.0)]


def test_latest_observation_and_count_per_metric(project: ProjectFixture) -> None:
    """Each metric of a run comes with its last live observation and count, without superseded ones."""
    run = project.open_run()
    project.post_observations(
        run, [*evals(0.1, 0.2, math.nan), PostedObservation("loss", 9, 1.0, 0.5), PostedObservation("gone", 5, 1.0)]
    )
    project.submit(run, Resumed(4))
    project.post_observations(run, [PostedObservation("loss", 6, 2.0, 0.25)])
    with project.database.reading() as tx:
        latest = observations.list_latest(tx, project.load_run(run))
        assert observations.list_latest(tx, project.open_run()) == []
    assert [(item.metric, item.count, item.step, item.stderr) for item in latest] == [
        ("eval", 3, 2, None),
        ("loss", 1, 6, 0.25),
    ]
    assert math.isnan(latest[0].value)
    assert latest[1].value == 2.0


def count_slowly(project: ProjectFixture) -> run_lists.Running:
    """What `count_running` returns, from the rows of the runs themselves."""
    with project.database.reading() as tx:
        found = run_lists.list_runs(tx, project.id, RunFilter(status=RunStatus.RUNNING), 100)
    jobs = {run.job_key or str(run.id): read_gpus(run.labels) or 0.0 for run in found}
    turned = sum(run.verdict.verdict is not Call.CONTINUE for run in found)
    return run_lists.Running(len(found), turned, sum(jobs.values()))


def test_counts_of_running_runs_follow_every_change(project: ProjectFixture) -> None:
    """However a run starts, turns, changes its labels, ends or returns, the counts are those of its row."""

    def count() -> run_lists.Running:
        with project.database.reading() as tx:
            counted = run_lists.count_running(tx, project.id)
        assert counted == count_slowly(project)
        assert [type(value) for value in counted] == [int, int, float]
        return counted

    assert count() == (0, 0, 0.0)
    for name in ("a", "b"):
        project.open_run(name, labels={"gpus": "8", "slurm_job_id": "7"})
    falls = project.open_run("falls", labels={"gpus": "many"})
    assert count() == (3, 0, 8.0), "one job counts once, and a label that is no number as none"
    project.post_observations(falls, evals(0.9, 0.8, 0.7, 0.6))
    assert count().turned == 1
    project.post_observations(falls, [PostedObservation("eval", 2, 0.95)])
    project.submit(falls, Resumed(1))
    assert count().turned == 0
    open_run.change_run(
        project.database, project.id, falls.id, lambda run: replace(run, labels={"gpus": "0.5"}), "ada", NOW, None
    )
    assert count() == (3, 0, 8.5)
    project.finish_run(falls, "failed")
    assert count() == (2, 0, 8.0)
    project.submit(falls, Resumed(1))
    assert count() == (3, 0, 8.5)
    lost_at = NOW + timedelta(days=40)
    for moment in (NOW + timedelta(days=20), lost_at):
        stale_runs.check_due_runs(project.database, moment)
    assert count() == (0, 0, 0.0)
    open_run.record_heartbeat(project.database, project.id, falls.id, lost_at)
    assert count() == (1, 0, 0.5)


def test_running_runs_are_counted_without_reading_their_rows(project: ProjectFixture) -> None:
    """Running runs are counted in a narrow table, and of their own rows only as many are read as are listed."""
    for _ in range(3):
        project.open_run()
    with record_statements(project.database) as executed, project.database.reading() as tx:
        run_lists.count_running(tx, project.id)
        assert len(run_lists.list_running_verdicts(tx, project.id, 2)) == 2
    counting, listing = [statement for statement in executed if not statement.startswith("BEGIN")][-2:]
    assert not re.search(r"\bruns\b", counting)
    assert "JOIN (SELECT running_runs.run_id" in listing
    assert "LIMIT" in listing.partition("FROM running_runs")[2]
