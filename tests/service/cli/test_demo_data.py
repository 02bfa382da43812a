"""A project full of example runs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa
from evalstop_service.cli import demo_data
from evalstop_service.errors import Conflict
from evalstop_service.store import tables
from evalstop_service.store.database import Database

from tests.fixtures.projects import create_project
from tests.service.scenes import NOW, Scene


def test_a_project_is_filled_once_and_consistently(embedded_database: Database) -> None:
    """Runs of every kind, a case of each that has ended and of no other; the second time nothing happens."""
    told: list[tuple[int, int]] = []
    count = demo_data.fill(embedded_database, "demo", NOW, lambda *done: told.append(done), most=40)
    runs, cases, decisions = tables.runs.c, tables.cases.c, tables.decisions.c
    with embedded_database.reading() as tx:
        ended = set(tx.execute(sa.select(runs.id).where(runs.ended_at.is_not(None))).scalars())
        found = tx.execute(sa.select(runs.status, runs.created_at, runs.updated_at, runs.ended_at)).all()
        assert set(tx.execute(sa.select(cases.run_id)).scalars()) == ended
        states = set(tx.execute(sa.select(decisions.state)).scalars())
        outcomes = set(tx.execute(sa.select(tables.outcomes.c.outcome)).scalars())
        pulses = set(tx.execute(sa.select(tables.run_health.c.state)).scalars())
    assert len(found) == count
    assert {row.status for row in found} >= {"running", "completed", "stopped", "lost"}
    assert all(NOW - timedelta(days=61) < row.created_at <= row.updated_at <= NOW for row in found)
    assert states >= {"shadow", "confirmed"}
    assert states & {"pending", "on_hold"}  # chance may hold one of them out
    assert outcomes == {"right", "wrong", "unknown"}
    assert "stale" in pulses
    assert told[-1][0] == told[-1][1]
    assert demo_data.fill(embedded_database, "demo", NOW, most=40) is None


def test_what_broke_off_is_not_taken_for_whole(embedded_database: Database) -> None:
    """Interrupted half-way, as by Ctrl-C: the second call says so and what to do, and adds nothing."""

    def interrupt(done: int, of: int) -> None:
        if done > of / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_data.fill(embedded_database, "demo", NOW, interrupt, most=20)
    with embedded_database.reading() as tx:
        before = tx.execute(sa.select(sa.func.count()).select_from(tables.runs)).scalar_one()
    with pytest.raises(Conflict, match=r"broke off half-way.*--project NAME"):
        demo_data.fill(embedded_database, "demo", NOW, most=20)
    with embedded_database.reading() as tx:
        assert tx.execute(sa.select(sa.func.count()).select_from(tables.runs)).scalar_one() == before > 0


def test_runs_of_ones_own_are_left_alone(embedded_database: Database) -> None:
    """Examples are not mixed into a project that has other runs."""
    project = create_project(embedded_database, "mine", "shadow", 0.0, NOW)
    Scene(embedded_database, project.id).open("ppo")
    with pytest.raises(Conflict, match="runs of its own"):
        demo_data.fill(embedded_database, "mine", NOW)
