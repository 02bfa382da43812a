"""Pruning removes the details of runs that ended long ago, those and nothing else, and stands in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service import chores, retention
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.retention import Pace, Pruned
from evalstop_service.store import endpoints, outcomes, projects, tables
from evalstop_service.store import retention as rows
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.runs import Run
from evalstop_service.telemetry import Telemetry
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.service import scenes
from tests.service.scenes import Scene

NOW = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)
KEEP_DAYS = 30
AT_ONCE = Pace(rows=7, pause_seconds=0)

KEPT = (
    tables.runs,
    tables.attempts,
    tables.decisions,
    tables.decision_changes,
    tables.outcomes,
    tables.former_outcomes,
    tables.cases,
)
"""What pruning leaves of a run."""

on_one_database = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def a_scene(database: Database, keep_days: int | None = KEEP_DAYS) -> Scene:
    """A project that keeps its runs for so many days."""
    scene = scenes.set_up(database)
    with database.transaction() as tx:
        tx.execute(
            tables.projects.update().where(tables.projects.c.id == scene.project_id).values(retention_days=keep_days)
        )
    return scene


def name_of(scene: Scene) -> str:
    with scene.database.reading() as tx:
        return projects.get(tx, scene.project_id).name


def ended(scene: Scene, days_ago: float | None, points: int = 20) -> Run:
    """A run with rows in every table, which ended so many days ago, or (None) goes on."""
    run = scene.open()
    with scene.database.transaction() as tx:
        fill(tx, scene, run, points)
        if days_ago is not None:
            end(tx, run, NOW - timedelta(days=days_ago))
    return run


def end(tx: Transaction, run: Run, at: datetime | None) -> None:
    values = {"status": "running" if at is None else "completed", "ended_at": at}
    tx.execute(tables.runs.update().where(tables.runs.c.id == run.id).values(values))


def fill(tx: Transaction, scene: Scene, run: Run, points: int) -> None:
    key = {"run_id": run.id}
    for step in range(points):
        for metric in ("eval", "loss"):
            values = {**key, "metric": metric, "step": step, "superseded_by": 0, "value": 0.5, "attempt": 1}
            tx.execute(tables.observations.insert().values(**values, received_at=NOW))
    for step in range(3):
        checkpoint = {**key, "step": step, "superseded_by": 0, "uri": f"file:///{step}", "attempt": 1}
        tx.execute(tables.checkpoints.insert().values(**checkpoint, created_at=NOW))
        verdict = {**key, "sequence": step, "attempt": 1, "document": {}, "at": NOW}
        tx.execute(tables.verdicts.insert().values(verdict))
    tx.execute(tables.monitors.insert().values(**key, version=1, state="{}", kept_at=NOW))
    decision = new_id()
    tx.execute(
        tables.decisions.insert().values(
            **key, id=decision, project_id=scene.project_id, attempt=1, state="confirmed", step=1, verdict={},
            policy_id=run.policy_id, due_at=NOW, created_at=NOW,
        )
    )  # fmt: skip
    change = {**key, "decision_id": decision, "sequence": 1, "actor": "a", "at": NOW}
    tx.execute(tables.decision_changes.insert().values(**change, state="confirmed", reason="", details={}))
    outcomes.add(tx, run.id, 1, outcome="right", turn_step=None, actor="a", note="", now=NOW)


def deliver(tx: Transaction, scene: Scene, run: Run, state: str, *, enabled: bool) -> None:
    """An event of a run with a delivery in this state and an attempt at it, to an endpoint of its own."""
    endpoint = endpoints.add(tx, scene.project_id, url="https://example.org", event_types=("*",), now=NOW)
    event, delivery = new_id(), new_id()
    own = {"run_id": run.id, "created_at": NOW}
    tx.execute(tables.events.insert().values(**own, id=event, project_id=scene.project_id, type="t", body="{}"))
    tx.execute(
        tables.deliveries.insert().values(
            **own, id=delivery, event_id=event, endpoint_id=endpoint.id, state=state, attempts=1, due_at=NOW
        )
    )
    attempt = {"run_id": run.id, "delivery_id": delivery, "number": 1, "at": NOW, "duration_ms": 1.0}
    tx.execute(tables.delivery_attempts.insert().values(attempt))
    if not enabled:
        endpoints.disable(tx, endpoint.id)


def held(database: Database, run: Run, wanted: tuple[sa.Table, ...]) -> dict[str, list[Any]]:
    """What these tables hold of a run."""
    with database.reading() as tx:
        return {
            table.name: [
                tuple(row) for row in tx.execute(
                    sa.select(table)
                    .where((table.c.id if table is tables.runs else table.c.run_id) == run.id)
                    .order_by(*table.primary_key)
                )
            ]
            for table in wanted
        }  # fmt: skip


def is_empty(database: Database, run: Run) -> bool:
    return not any(held(database, run, rows.REMOVED).values())


def is_marked(scene: Scene, run: Run) -> bool:
    return scene.read(run).pruned_at is not None


def test_every_table_is_either_removed_or_kept() -> None:
    """Whoever adds a table with rows of runs decides what becomes of them; none is forgotten, none is in both."""
    of_runs = {table for table in tables.metadata.tables.values() if "run_id" in table.c} - {tables.prunings}
    assert set(rows.REMOVED) | set(KEPT) == of_runs | {tables.runs}
    assert set(rows.REMOVED) & set(KEPT) == set()


@dataclass(frozen=True)
class Told:
    """A run as Hypothesis tells of it."""

    of_second: bool
    days_ago: float | None
    delivery: str | None
    enabled: bool
    points: int

    @property
    def is_old(self) -> bool:
        waits = self.delivery == "waiting" and self.enabled
        return not self.of_second and self.days_ago is not None and self.days_ago > KEEP_DAYS and not waits


RUNS = st.lists(
    st.builds(
        Told,
        of_second=st.booleans(),
        days_ago=st.none() | st.sampled_from([0.0, KEEP_DAYS - 0.001, KEEP_DAYS + 0.001, 400.0]),
        delivery=st.sampled_from([None, "waiting", "delivered", "dead"]),
        enabled=st.booleans(),
        points=st.integers(0, 12),
    ),
    max_size=6,
)


@on_one_database
@example([Told(False, 400.0, "waiting", True, 1), Told(False, 400.0, "waiting", False, 1)], 10)
@given(RUNS, st.integers(1, 40))
def test_removes_exactly_what_ended_long_ago(database: Database, told: list[Told], batch: int) -> None:
    """Of the ended and old runs all details go and the rest stays; of all others not a row is touched.

    `told` holds runs of a project that keeps them for a month and of one that keeps them for ever.
    """
    first, second = a_scene(database), a_scene(database, None)
    made: list[Run] = []
    for one in told:
        scene = second if one.of_second else first
        made.append(ended(scene, one.days_ago, one.points))
        if one.delivery is not None:
            with database.transaction() as tx:
                deliver(tx, scene, made[-1], one.delivery, enabled=one.enabled)
    everything = (*rows.REMOVED, *KEPT, tables.prunings)
    before = [held(database, run, everything) for run in made]
    done = retention.prune(database, NOW, pace=Pace(rows=batch, pause_seconds=0))
    assert done.runs == ({name_of(first): sum(one.is_old for one in told)} if any(one.is_old for one in told) else {})
    for one, run, was in zip(told, made, before, strict=True):
        scene = second if one.of_second else first
        assert is_marked(scene, run) == one.is_old
        if one.is_old:
            assert is_empty(database, run)
            kept = held(database, run, (*KEPT[1:], tables.prunings))
            assert kept == {name: was[name] for name in kept}
            now = scene.read(run)
            assert (now.pruned_at, now.version) == (NOW, run.version + 1)
            assert (now.updated_at, now.verdict, now.best_checkpoint) == (run.updated_at, run.verdict, None)
        else:
            assert held(database, run, everything) == was


@on_one_database
@given(st.integers(1, 60), st.integers(0, 25), st.booleans())
def test_no_transaction_removes_more_than_it_may(database: Database, limit: int, points: int, forgetful: bool) -> None:
    """A transaction removes no more rows than it was given, and all of them together everything, whether or not each
    knows where the one before it stopped."""
    scene = a_scene(database)
    runs = [ended(scene, 100, points) for _ in range(3)]
    with database.transaction() as tx:
        for run in runs:
            deliver(tx, scene, run, "dead", enabled=True)
    total = sum(len(found) for run in runs for found in held(database, run, rows.REMOVED).values())
    with database.transaction() as tx:
        assert rows.begin(tx, [run.id for run in runs], NOW, NOW) == 3
    removed, position, left = 0, None, True
    while left:
        with database.transaction() as tx:
            emptied = rows.empty(tx, limit, None if forgetful else position)
        assert emptied.rows <= limit
        removed, position, left = removed + emptied.rows, emptied.position, emptied.left
    assert removed == total
    assert all(is_empty(database, run) for run in runs)
    assert all(held(database, run, (tables.prunings,)) == {"prunings": []} for run in runs)


def test_broken_off_it_goes_on(database: Database) -> None:
    """Stopped after any transaction, what was begun is marked from the start and is ended by the next pass."""
    scene = a_scene(database)
    runs = [ended(scene, 100 + number) for number in range(3)]
    whole = [held(database, run, rows.REMOVED) for run in runs]
    passes = 0
    while not all(is_empty(database, run) for run in runs):
        done = retention.prune(database, NOW, pace=Pace(rows=17, pause_seconds=0), pause=lambda _: True)
        assert done.rows <= 17
        for run, all_of_it in zip(runs, whole, strict=True):
            assert is_marked(scene, run) or held(database, run, rows.REMOVED) == all_of_it
        passes += 1
        assert passes < 50
    assert passes > 5
    assert retention.prune(database, NOW) == Pruned()


def test_a_run_that_goes_on_is_left_alone(database: Database) -> None:
    """A run that was resumed after it was found, and before it was marked, keeps everything."""
    scene = a_scene(database)
    run = ended(scene, 100)
    with database.reading() as tx:
        found = rows.old(tx, scene.project_id, NOW - timedelta(days=KEEP_DAYS), 10)
    assert found == [run.id]
    with database.transaction() as tx:
        end(tx, run, None)
    with database.transaction() as tx:
        assert rows.begin(tx, found, NOW - timedelta(days=KEEP_DAYS), NOW) == 0
    assert not is_marked(scene, run)


def test_a_run_that_is_held_is_not_waited_for(postgres_database: Database) -> None:
    """A run that somebody has locked is passed over, and its turn comes with the next pass."""
    scene = a_scene(postgres_database)
    busy, free = ended(scene, 200), ended(scene, 100)
    with impatient(postgres_database), postgres_database.transaction() as tx:
        tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == busy.id).with_for_update())
        done = retention.prune(postgres_database, NOW, pace=AT_ONCE)
        assert done.runs == {name_of(scene): 1}
    assert not is_marked(scene, busy)
    assert is_empty(postgres_database, free)
    assert retention.prune(postgres_database, NOW, pace=AT_ONCE).runs == {name_of(scene): 1}
    assert is_empty(postgres_database, busy)


def test_it_stands_in_nobodys_way(postgres_database: Database) -> None:
    """While transactions that mark and that empty are open, others post and open runs without waiting for any lock."""
    scene = a_scene(postgres_database)
    old, live = ended(scene, 100), scene.open()
    points = iter(range(100))

    def others_work() -> None:
        scene.open()
        assert scene.post(live, scenes.evals(0.1, start=next(points))).accepted == 1
        with postgres_database.reading() as tx:
            assert tx.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one() == 0

    with impatient(postgres_database):
        with postgres_database.transaction() as tx:
            assert rows.begin(tx, [old.id], NOW, NOW) == 1
            others_work()
        position = None
        for _ in range(3):
            with postgres_database.transaction() as tx:
                position = rows.empty(tx, 10, position).position
                others_work()
    assert not is_marked(scene, live)


@contextmanager
def impatient(database: Database) -> Iterator[None]:
    """From now on whoever waits for a lock in this database fails at once."""
    with database.transaction() as tx:
        name = tx.exec_driver_sql("SELECT current_database()").scalar_one()
        tx.exec_driver_sql(f'ALTER DATABASE "{name}" SET lock_timeout = 100')
    database.close()  # the setting is for connections that are made from now on
    yield


def test_writers_have_their_turn(database: Database) -> None:
    """Between two transactions anybody may write, on the embedded database with its one writer, too."""
    scene = a_scene(database)
    ended(scene, 100)
    live = scene.open()
    turns = 0

    def write(_seconds: float) -> bool:
        nonlocal turns
        writer = threading.Thread(target=scene.post, args=(live, scenes.evals(0.1, start=turns)))
        writer.start()
        writer.join()
        turns += 1
        return False

    retention.prune(database, NOW, pace=AT_ONCE, pause=write)
    assert turns > 5
    assert len(scene.rows(tables.observations, live)) == turns


def test_a_writer_beside_it_loses_nothing(database: Database) -> None:
    """A run that is posted to all the while comes to the verdict that it comes to alone, and keeps every point."""
    scene = a_scene(database)
    alone, beside = scene.open(policy="watchful"), scene.open(policy="watchful")
    values = [0.1, 0.2, 0.5, 0.4, 0.3, 0.35, 0.2, 0.1]
    for step, value in enumerate(values):
        scene.post(alone, scenes.evals(value, start=step))
    for _ in range(4):
        ended(scene, 100, points=30)
    failures: list[BaseException] = []

    def prune() -> None:
        try:
            retention.prune(database, NOW, pace=Pace(rows=5, pause_seconds=0))
        except BaseException as error:
            failures.append(error)

    pruner = threading.Thread(target=prune)
    pruner.start()
    for step, value in enumerate(values):
        scene.post(beside, scenes.evals(value, start=step))
    pruner.join()
    assert failures == []
    assert scene.read(beside).verdict == scene.read(alone).verdict
    assert len(scene.rows(tables.observations, beside)) == len(values)
    assert len(scene.rows(tables.verdicts, beside)) == len(scene.rows(tables.verdicts, alone))


def test_one_process_at_a_time(postgres_database: Database) -> None:
    """While one prunes another says so and leaves it to that; afterwards it may."""
    scene = a_scene(postgres_database)
    run = ended(scene, 100)
    with rows.alone(postgres_database) as alone:
        assert alone
        with pytest.raises(Conflict, match="another process"):
            retention.prune(postgres_database, NOW)
    assert not is_marked(scene, run)
    assert retention.prune(postgres_database, NOW, pace=AT_ONCE).runs


def test_a_dry_run_tells_and_leaves(database: Database) -> None:
    """It counts the very runs and rows that would go, and goes no further."""
    scene = a_scene(database)
    runs = [ended(scene, 100, points=3), ended(scene, 40, points=5), ended(scene, 10, points=7)]
    told = retention.prune(database, NOW, dry_run=True)
    assert not any(is_marked(scene, run) for run in runs)
    assert retention.prune(database, NOW, pace=AT_ONCE) == told
    assert told.runs == {name_of(scene): 2}
    assert retention.prune(database, NOW, dry_run=True) == Pruned()


def test_a_time_can_be_given_for_one_project(database: Database) -> None:
    """A time that is given takes the place of the project's own, for longer or shorter, and is for it alone."""
    scene, other = a_scene(database, None), a_scene(database, 365)
    runs = [ended(scene, 10), ended(scene, 3)], [ended(other, 200)]
    retention.prune(database, NOW, project=name_of(scene), older_than_days=5, pace=AT_ONCE)
    assert [is_marked(scene, run) for run in runs[0]] == [True, False]
    assert not is_marked(other, runs[1][0])
    assert retention.prune(database, NOW, project=name_of(scene)) == Pruned()


@pytest.mark.parametrize(
    ("project", "days", "error"),
    [(None, 5.0, Invalid), ("nobody's", None, NotFound), ("any", 0.5, Invalid), ("any", -1.0, Invalid)],
)
def test_what_makes_no_sense_is_refused(
    embedded_database: Database, project: str | None, days: float | None, error: type[Exception]
) -> None:
    """A time for all projects at once, a project that is none, and less than a day: nothing goes by mistake."""
    with pytest.raises(error):
        retention.prune(embedded_database, NOW, project=project, older_than_days=days)


def test_nothing_can_be_added_to_a_pruned_run(embedded_database: Database) -> None:
    """Whoever posts to it or resumes it is told what became of it and what to do."""
    scene = a_scene(embedded_database)
    run = ended(scene, 100)
    retention.refuse_if_pruned(scene.read(run))
    retention.prune(embedded_database, NOW, pace=AT_ONCE)
    with pytest.raises(Conflict, match=r"pruned at 2026-06-01.*open a run under another name"):
        retention.refuse_if_pruned(scene.read(run))


def test_it_is_counted(embedded_database: Database) -> None:
    """Runs and rows that went are counted, and what a pass says is what is counted."""
    ended(a_scene(embedded_database), 100)
    telemetry = Telemetry()
    done = retention.prune(embedded_database, NOW, pace=AT_ONCE, telemetry=telemetry)
    assert value(telemetry.registry, "evalstop_pruned_runs_total") == sum(done.runs.values()) == 1
    assert value(telemetry.registry, "evalstop_pruned_rows_total") == done.rows == 20 * 2 + 3 + 3 + 1 + 1


def value(registry: CollectorRegistry, name: str) -> float:
    found = registry.get_sample_value(name)
    assert found is not None
    return found


def test_as_a_chore_it_comes_back(database: Database) -> None:
    """Beside a worker it prunes now and then."""
    scene = a_scene(database)
    first, second = ended(scene, 100), ended(scene, 10)
    with chores.at_work(retention.chore(database, lambda: NOW, Telemetry(), every_seconds=0.01)):
        wait_until(lambda: is_empty(database, first))
        with database.transaction() as tx:
            end(tx, second, NOW - timedelta(days=300))
        wait_until(lambda: is_empty(database, second))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = datetime.now(UTC) + timedelta(seconds=30)
    waiting = threading.Event()
    while not condition():
        assert datetime.now(UTC) < deadline
        waiting.wait(0.01)
