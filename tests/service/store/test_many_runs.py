"""What is done for many runs in one transaction is what would be done for each: locks, rows, monitors, observations."""

from __future__ import annotations

import math
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import psycopg
import pytest
import sqlalchemy as sa
from evalstop_service.ingest import Resumed
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.rules.run_descriptions import RunDescription
from evalstop_service.rules.run_results import Call
from evalstop_service.store import monitor_states, observations, run_descriptions, run_lists, runs, sparklines, tables
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.monitor_states import StoredMonitorState
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_lists import RunFilter
from msgspec.structs import replace

from tests.service.project_fixture import NOW, ProjectFixture, evals, set_up_project

LATER = NOW + timedelta(microseconds=1)


@pytest.fixture
def project(database: Database) -> ProjectFixture:
    return set_up_project(database)


def test_locks_what_there_is(project: ProjectFixture) -> None:
    """Locking many runs gives the version of each that exists, and nothing for those that do not."""
    present = [project.open_run() for _ in range(3)]
    with project.database.transaction() as tx:
        stamps = runs.lock_runs(tx, [new_id(), *(run.id for run in present)])
    assert stamps == {run.id: run.version for run in present}


def test_locks_in_order_of_ids(postgres_database: Database) -> None:
    """Whoever waits for the run with the lowest id holds none of the others, so that no two can wait in a ring."""
    project = set_up_project(postgres_database)
    made = [project.open_run() for _ in range(5)]
    ids = [run.id for run in made]
    with postgres_database.transaction() as tx:
        runs.save_run(tx, replace(made[0], version=1))  # it lies last in the table now

    def lock() -> None:
        with postgres_database.transaction() as tx:
            runs.lock_runs(tx, ids[::-1])

    with postgres_database.transaction() as tx:
        runs.lock_runs(tx, ids[:1])
        thread = threading.Thread(target=lock)
        thread.start()
        wait_for_a_waiter(tx, thread)
        free = sa.select(tables.runs.c.id).where(tables.runs.c.id.in_(ids[1:])).with_for_update(skip_locked=True)
        assert set(tx.execute(free).scalars()) == set(ids[1:])
    thread.join()


def wait_for_a_waiter(tx: Transaction, thread: threading.Thread) -> None:
    while not tx.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one():
        assert thread.is_alive()


def test_waits_for_a_lock_and_sees_what_came_of_it(postgres_database: Database) -> None:
    """Whoever had to wait for a run gets its version as it is after the wait."""
    project = set_up_project(postgres_database)
    run = project.open_run()
    seen = []

    def look() -> None:
        with postgres_database.transaction() as tx:
            seen.append(runs.lock_runs(tx, [run.id])[run.id])

    with postgres_database.transaction() as tx:
        runs.lock_runs(tx, [run.id])
        thread = threading.Thread(target=look)
        thread.start()
        wait_for_a_waiter(tx, thread)
        runs.save_run(tx, replace(run, version=7, updated_at=LATER))
    thread.join()
    assert seen == [7]


def test_keeps_monitors(project: ProjectFixture) -> None:
    """A kept monitor takes the place of the one before."""
    one, two, none = (new_id() for _ in range(3))
    with project.database.transaction() as tx:
        monitor_states.save_state(tx, one, StoredMonitorState(1, "a"), NOW)
        monitor_states.save_state(tx, two, StoredMonitorState(1, "b"), NOW)
        monitor_states.save_state(tx, one, StoredMonitorState(5, "c" * 100_000), LATER)
        assert monitor_states.load_states(tx, [one, two, none]) == {
            one: StoredMonitorState(5, "c" * 100_000),
            two: StoredMonitorState(1, "b"),
        }


def test_a_lost_connection_is_told_as_such(postgres_database: Database) -> None:
    """A connection that breaks under a statement of the driver's own is SQLAlchemy's kind of error, and is replaced."""
    project = set_up_project(postgres_database)
    run = project.open_run()

    def lock_until_it_breaks() -> None:
        with postgres_database.transaction() as tx:
            victim = tx.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            with psycopg.connect(postgres_database.url.set(drivername="postgresql").render_as_string(False)) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (victim,))
            while True:
                runs.lock_runs(tx, [run.id])

    with pytest.raises(sa.exc.OperationalError) as caught:
        lock_until_it_breaks()
    assert caught.value.connection_invalidated
    with postgres_database.transaction() as tx:
        assert set(runs.lock_runs(tx, [run.id])) == {run.id}


def test_last_steps(project: ProjectFixture) -> None:
    """The highest live step of each metric of each run, whatever was superseded past it."""
    first, second, empty = (project.open_run() for _ in range(3))
    project.post_observations(
        first, [*evals(0.1, 0.2, 0.3), PostedObservation("loss", 9, 1.0), PostedObservation("ends/with/Ω", 4, 1.0)]
    )
    project.post_observations(second, [PostedObservation("eval", 5, math.nan), PostedObservation("gone", 7, 1.0)])
    project.submit(second, Resumed(6))
    project.post_observations(second, [PostedObservation("kl", 6, 1.0)])
    with project.database.reading() as tx:
        found = observations.load_last_steps(tx, [empty.id, second.id, first.id])
    assert found == {
        first.id: {"eval": 2, "loss": 9, "ends/with/Ω": 4},
        second.id: {"eval": 5, "kl": 6},
        empty.id: {},
    }


def test_after(project: ProjectFixture) -> None:
    """The live points of some metrics from a step on, by step and then by metric."""
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
        found = observations.load_observations_after(tx, run.id, ["loss", "eval"], 1)
        assert observations.load_observations_after(tx, run.id, [], 0) == []
    assert found == [
        PostedObservation("eval", 1, 0.2),
        PostedObservation("loss", 1, 1.0),
        PostedObservation("eval", 2, 0.3),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"metric": ""},
        {"metric": "x" * 257},
        {"metric": "a\x00b"},
        {"metric": "a\x9fb"},
        {"step": -1},
        {"step": 2**53},
        {"step": 1.5},
        {"step": True},
        {"value": "NaN"},
        {"value": None},
        {"value": True},
        {"stderr": -0.1},
        {"time": "2026-01-01T00:00:00"},
        {"time": "0001-01-01T00:00:00+05:00"},
        {"time": "9999-12-31T23:59:59-05:00"},
        {"colour": 1},
    ],
)
def test_decodes_no_malformed_point(change: dict[str, object]) -> None:
    """A point out of bounds is not decoded; what is left of the bounds is the route's to explain."""
    good: dict[str, object] = {
        "metric": "a\tΩ",
        "step": 2**53 - 1,
        "value": 1,
        "stderr": 0,
        "time": "0001-01-01T00:00:00Z",
    }
    assert msgspec.convert(good, PostedObservation) == PostedObservation(
        "a\tΩ", 2**53 - 1, 1.0, 0.0, datetime(1, 1, 1, tzinfo=UTC)
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(good | change), type=PostedObservation)


def test_lists_runs_by_parts_of_their_names(project: ProjectFixture) -> None:
    """Runs are found by any part of their name, in either case, and by their status, the newest first."""
    made = [project.open_run(name) for name in ("ppo-7b", "dpo-7B", "grpo-13b", "x")]
    with project.database.transaction() as tx:
        runs.save_run(tx, replace(made[2], status="failed"))

    def found(**wanted: Any) -> list[str]:
        with project.database.reading() as tx:
            return [run.name for run in run_lists.list_runs(tx, project.id, RunFilter(**wanted))]

    assert found() == ["x", "grpo-13b", "dpo-7B", "ppo-7b"]
    assert found(name="PO-7b") == ["dpo-7B", "ppo-7b"]
    assert found(name="po") == ["grpo-13b", "dpo-7B", "ppo-7b"]
    assert found(name="po", before=made[2].id) == ["dpo-7B", "ppo-7b"]
    assert found(name="po", status="failed") == ["grpo-13b"]
    assert found(name="xyz") == []


def test_lists_runs_by_what_is_said_of_them(project: ProjectFixture) -> None:
    """Owner, group, tags and labels find runs, each alone and together, and so does the time at which they opened."""
    made = {
        name: project.open_run(name, labels={"team": name[0], "a.b[0]": "1"}) for name in ("ax", "ay", "bx", "plain")
    }
    with project.database.transaction() as tx:
        for name, run in list(made.items())[:3]:
            said = RunDescription(f"{name[0]}@example.org", f"seeds of {name[1]}", (name, 'a "tag", 100%', "Ω"), "n")
            run_descriptions.save_description(tx, project.id, run.id, said, NOW)

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
    moment = made["plain"].created_at
    assert found(since=moment) == ["plain", "bx", "ay", "ax"]
    assert found(until=moment) == found(since=moment + timedelta(microseconds=1)) == []


def test_lists_runs_in_other_orders(project: ProjectFixture) -> None:
    """By their last news or their last step, page after page, each run once; filters hold in every order."""
    made = [project.open_run(f"run-{number}") for number in range(7)]
    for number, run in enumerate(made[1:]):
        project.post_observations(run, [PostedObservation("eval", 10 * (number % 3), 0.5)])

    def listed(wanted: RunFilter = RunFilter(), limit: int = 50) -> list[runs.Run]:  # noqa: B008 - it is frozen
        with project.database.reading() as tx:
            return run_lists.list_runs(tx, project.id, wanted, limit)

    rows = listed()
    expected = {
        "newest": sorted(rows, key=lambda run: run.id, reverse=True),
        "updated": sorted(rows, key=lambda run: (run.updated_at, run.id), reverse=True),
        "step": sorted(rows, key=lambda run: (-1 if run.last_step is None else run.last_step, run.id), reverse=True),
    }
    for order, whole in expected.items():
        seen: list[str] = []
        wanted = RunFilter(order=order)
        while found := listed(wanted, 2):
            seen += [run.name for run in found]
            last = found[-1]
            step = -1 if last.last_step is None else last.last_step
            wanted = RunFilter(order=order, before=last.id, place=last.updated_at if order == "updated" else step)
        assert seen == [run.name for run in whole]
    for wanted in (
        RunFilter(verdict=Call.STOP),
        RunFilter(mode=Mode.ENFORCE),
        RunFilter(policy="gone"),
        RunFilter(labels=(("job_kind", "dpo"),)),
    ):
        assert listed(wanted) == [
            run
            for run in rows
            if (wanted.mode is None or run.mode == wanted.mode)
            and (wanted.verdict is None or run.verdict.verdict == wanted.verdict)
            and wanted.policy is None
            and not wanted.labels
        ]


def test_the_outline_of_a_long_series(project: ProjectFixture) -> None:
    """It is drawn from some of its values, evenly over its steps, without being read as a whole."""
    run = project.open_run()
    count = sparklines.OUTLINED + 500
    project.post_observations(run, [PostedObservation("eval", 3 * step, float(step)) for step in range(count)])
    with project.database.reading() as tx:
        outline = sparklines.load_segments(tx, [(run.id, "eval")], 124)[run.id, "eval"]
    assert len(outline) == 124
    assert (outline[0].step, outline[-1].step) == (0, 3 * (count - 1))
    assert all(item.lowest == item.highest == item.step / 3 for item in outline)


def test_latest(project: ProjectFixture) -> None:
    """Each metric of a run with its last live observation and how many there are, superseded ones left out."""
    run = project.open_run()
    project.post_observations(
        run, [*evals(0.1, 0.2, math.nan), PostedObservation("loss", 9, 1.0, 0.5), PostedObservation("gone", 5, 1.0)]
    )
    project.submit(run, Resumed(4))
    project.post_observations(run, [PostedObservation("loss", 6, 2.0, 0.25)])
    with project.database.reading() as tx:
        found = observations.list_latest(tx, run.id)
        assert observations.list_latest(tx, new_id()) == []
    assert [(item.metric, item.count, item.step, item.stderr) for item in found] == [
        ("eval", 3, 2, None),
        ("loss", 1, 6, 0.25),
    ]
    assert math.isnan(found[0].value)
    assert found[1].value == 2.0
