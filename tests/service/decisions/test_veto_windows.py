"""Veto windows end when all processes that hear vetoes have written after their end; a veto and a hand-over meet in the
decision's row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands
from evalstop_service.decisions.veto_windows import BEAT_SECONDS, GAP_SECONDS, LOST_SECONDS, VetoListener
from evalstop_service.domain.decision_commands import Vetoed
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.event_types import STOP_EVENTS
from evalstop_service.errors import Conflict
from evalstop_service.store import endpoints, tables
from evalstop_service.store.database import Database
from evalstop_service.store.queue import leases
from evalstop_service.store.runs import Run

from tests.service.concurrency import run_concurrently
from tests.service.project_fixture import ProjectFixture, set_up_project

ROUNDS = 8


class FakeClock:
    """The embedded database's clock, which tests advance."""

    def __init__(self) -> None:
        self.now = utc_now()

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def listen(*listeners: VetoListener) -> None:
    """One round of each listener."""
    for listener in listeners:
        asyncio.run(listener.listen_once())


def open_pending(database: Database, ends_in: float, now: datetime | None = None) -> tuple[ProjectFixture, Run]:
    """A run whose stop can be vetoed for some more seconds, or since as long no more; its window is a minute."""
    project = replace(set_up_project(database, veto_window_seconds=60.0), now=now or utc_now())
    run, _ = project.open_declining_run()
    end_window(project, (now or utc_now()) + timedelta(seconds=ends_in))
    return project, run


def end_window(project: ProjectFixture, at: datetime) -> None:
    with project.database.transaction() as tx:
        tx.execute(tables.decisions.update().where(tables.decisions.c.project_id == project.id).values(due_at=at))


def load_state(project: ProjectFixture, run: Run) -> DecisionState:
    return project.load_decision(run).state


def remaining_seconds(project: ProjectFixture, run: Run) -> float:
    return (project.load_decision(run).due_at - utc_now()).total_seconds()


def test_window_ends_once_all_listeners_have_heard(database: Database) -> None:
    """A stop is requested, with its event, by the last of the listeners that writes after the end of its window."""
    project, run = open_pending(database, 600)
    first, second = VetoListener(database, utc_now), VetoListener(database, utc_now)
    listen(first, second)
    end_window(project, utc_now())
    listen(first)
    assert load_state(project, run) == DecisionState.PENDING
    listen(second)
    assert load_state(project, run) == DecisionState.REQUESTED
    assert len(project.load_events(run, "run.stop_requested")) == 1


def test_process_that_begins_extends_the_windows_that_ended_unheard(database: Database) -> None:
    """Nobody heard vetoes before it: people get another window, at most a minute, and the next round ends it."""
    project, run = open_pending(database, -600)
    listener = VetoListener(database, utc_now)
    listen(listener)
    assert load_state(project, run) == DecisionState.PENDING
    assert remaining_seconds(project, run) > 30
    assert project.load_decision_states(run) == ["pending", "pending"]
    end_window(project, utc_now())
    listen(listener)
    assert load_state(project, run) == DecisionState.REQUESTED


def test_process_that_begins_beside_another_extends_nothing(database: Database) -> None:
    """The other heard the vetoes until then."""
    project, run = open_pending(database, 2)
    first = VetoListener(database, utc_now)
    listen(first)
    end_window(project, utc_now() + timedelta(seconds=2))
    listen(first, VetoListener(database, utc_now))
    assert remaining_seconds(project, run) < 3


def test_veto_in_progress_holds_its_window(database: Database) -> None:
    """A stop whose window ended after the first byte of a veto waits until the veto is answered."""
    project, run = open_pending(database, 600)
    listener = VetoListener(database, utc_now)
    listen(listener)
    with listener.hearing() as veto:
        veto.arrived = True
        end_window(project, utc_now())
        listen(listener)
        assert load_state(project, run) == DecisionState.PENDING
    listen(listener)
    assert load_state(project, run) == DecisionState.REQUESTED


def test_refused_veto_extends_the_windows_of_its_project(database: Database) -> None:
    """A veto that was refused can be repeated within a minute; the windows of other projects do not move."""
    (project, run), (other, other_run) = open_pending(database, 600), open_pending(database, 600)
    listener = VetoListener(database, utc_now)
    listen(listener)
    for each in (project, other):
        end_window(each, utc_now() + timedelta(seconds=10))
    listener.report_failure(project.id)
    listen(listener)
    assert remaining_seconds(project, run) > 30
    assert remaining_seconds(other, other_run) < 11


def test_refused_veto_extends_a_window_of_a_project_that_has_none_any_more(database: Database) -> None:
    """A stop that is still pending can be vetoed, so it waits though the project's window was set to 0 meanwhile."""
    project, run = open_pending(database, 10)
    project.change_settings(veto_window_seconds=0.0)
    listener = VetoListener(database, utc_now)
    listen(listener)
    end_window(project, utc_now())
    listener.report_failure(project.id)
    listen(listener)
    assert load_state(project, run) == DecisionState.PENDING
    assert remaining_seconds(project, run) > 30


@pytest.mark.parametrize("gap_seconds", [GAP_SECONDS + 1, -3600.0])
def test_process_that_was_stopped_extends_windows(embedded_database: Database, gap_seconds: float) -> None:
    """A process that did not look at the database for some seconds, or whose clock was set, may have heard nothing."""
    clock = FakeClock()
    project, run = open_pending(embedded_database, 1, clock())
    listener = VetoListener(embedded_database, clock)
    listen(listener)
    end_window(project, clock() + timedelta(seconds=1))
    listen(listener)
    clock.advance(gap_seconds)
    end_window(project, clock() - timedelta(seconds=1))
    listen(listener)
    decision = project.load_decision(run)
    assert (decision.state, decision.due_at) == (DecisionState.PENDING, clock() + timedelta(seconds=60))


def test_process_that_cannot_write_extends_windows(embedded_database: Database) -> None:
    """While a listener cannot write, no window ends; once it can, people get time to repeat their vetoes."""
    project, run = open_pending(embedded_database, 600)
    listener = VetoListener(embedded_database, utc_now)
    listen(listener)
    with embedded_database.transaction() as tx:
        tx.exec_driver_sql("CREATE TRIGGER full BEFORE UPDATE ON veto_listeners BEGIN SELECT RAISE(ABORT, 'full'); END")
    end_window(project, utc_now())
    listen(listener, listener)
    assert load_state(project, run) == DecisionState.PENDING
    with embedded_database.transaction() as tx:
        tx.exec_driver_sql("DROP TRIGGER full")
    listen(listener)
    assert load_state(project, run) == DecisionState.PENDING
    assert remaining_seconds(project, run) > 30


def test_lost_process_is_removed(embedded_database: Database) -> None:
    """A process that was killed delays stops only until another has written for a while; if it returns, it extends."""
    clock = FakeClock()
    project, run = open_pending(embedded_database, 600, clock())
    first, killed = VetoListener(embedded_database, clock), VetoListener(embedded_database, clock)
    listen(first, killed)
    end_window(project, clock() + timedelta(seconds=0.5))
    for _ in range(int(LOST_SECONDS / BEAT_SECONDS)):
        clock.advance(BEAT_SECONDS)
        listen(first)
        assert load_state(project, run) == DecisionState.PENDING
    clock.advance(BEAT_SECONDS)
    listen(first)
    assert load_state(project, run) == DecisionState.REQUESTED
    second, _ = replace(project, now=clock()).open_declining_run()
    listen(killed)
    assert project.load_decision(second).due_at == clock() + timedelta(seconds=60)


def test_idle_listener_writes_nothing(embedded_database: Database) -> None:
    """Listeners write only while a window is over or ends soon."""
    clock = FakeClock()
    listener = VetoListener(embedded_database, clock)
    listen(listener)
    before = read_heard_until(embedded_database)
    clock.advance(1)
    listen(listener)
    assert read_heard_until(embedded_database) == before


def read_heard_until(database: Database) -> datetime:
    with database.reading() as tx:
        heard_until: datetime = tx.execute(sa.select(tables.veto_listeners.c.heard_until)).scalar_one()
    return heard_until


def claim_as_worker(project: ProjectFixture, _run: Run) -> int:
    with project.database.transaction() as tx:
        return len(leases.claim_deliveries(tx, utc_now(), 60.0, 10, 10))


def claim_as_receiver(project: ProjectFixture, _run: Run) -> int:
    with project.database.transaction() as tx:
        query = sa.select(tables.endpoints.c.id).where(tables.endpoints.c.url == "pull:slurm-a")
        endpoint = endpoints.load_pull_endpoint(tx, project.id, tx.execute(query).scalar_one())
        return len(leases.pull_deliveries(tx, endpoint, utc_now(), 60.0, 10))


def tell_trainer(project: ProjectFixture, run: Run) -> int:
    return int(commands.tell_trainer_of(project.database, utc_now, run))


@pytest.mark.parametrize(
    ("take", "receiver"),
    [
        (claim_as_worker, "the endpoint at gpu.example.org"),
        (claim_as_receiver, "the receiver slurm-a"),
        (tell_trainer, "the trainer"),
    ],
)
def test_either_the_veto_or_the_hand_over_wins(
    database: Database, take: Callable[[ProjectFixture, Run], int], receiver: str
) -> None:
    """A veto and a claim at the same moment: a vetoed stop goes to nobody, a handed-over one is refused with when and
    to whom."""
    project = set_up_project(database)
    project.change_settings(stops_share=None, stops_per_hour=None)
    if take is claim_as_worker:
        project.add_endpoint(["run.stop_requested"], "https://gpu.example.org/hook?secret=1")
    if take is claim_as_receiver:
        with database.transaction() as tx:
            endpoints.add_endpoint(tx, project.id, url="pull:slurm-a", event_types=STOP_EVENTS, now=project.now)
    for number in range(ROUNDS):
        run, decision = project.open_declining_run()
        taken: list[int] = []
        calls = (
            lambda run=run, taken=taken: taken.append(take(project, run)),
            lambda decision=decision: project.apply_command(decision, Vetoed(utc_now(), "dana", "a known dip")),
        )
        failures = run_concurrently(*(calls if number % 2 else reversed(calls)))
        after = project.load_decision(run)
        if after.state == DecisionState.VETOED:
            assert (taken, failures, after.handed_over_at) == ([0], [], None)
            assert take(project, run) == 0
        else:
            (refused,) = failures
            assert isinstance(refused, Conflict)
            assert (taken, after.state, after.handed_over_to) == ([1], DecisionState.REQUESTED, receiver)
            assert after.handed_over_at is not None
            assert receiver in str(refused)
            assert after.handed_over_at.isoformat() in str(refused)
