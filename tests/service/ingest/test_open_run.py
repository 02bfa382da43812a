"""Opening a run by its name, again and under other terms."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa
from evalstop_service.decisions import commands
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.ingest import open_run
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation

from tests.service.scenes import (
    FALLING,
    NOW,
    Scene,
    at_once,
    evals,
    set_up,
    waiting_for_a_lock,
)


def test_opened_at_once(scene: Scene) -> None:
    """A run that many trainers open by one name at the same time is one run."""
    opened = []
    failures = at_once(*(lambda: opened.append(scene.open("one", policy="default")) for _ in range(6)))
    assert failures == []
    assert len({run.id for run in opened}) == 1


def test_a_change_of_policy_hides_no_run(postgres_database: Database) -> None:
    """News that waited while the run got another policy is taken in under the new one."""
    scene = set_up(postgres_database)
    run = scene.open("one", policy="paper")
    scene.post(run, FALLING[:3])
    receipts = []
    with postgres_database.transaction() as tx:
        tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
        thread = threading.Thread(target=lambda: receipts.append(scene.post(run, FALLING[3:])))
        thread.start()
        waiting_for_a_lock(postgres_database)
        watchful = sa.select(tables.policies.c.id).where(
            tables.policies.c.project_id == scene.project_id, tables.policies.c.name == "watchful"
        )
        policy_id = tx.execute(watchful).scalar_one()
        later = tables.runs.c.version + 1
        tx.execute(
            tables.runs.update()
            .where(tables.runs.c.id == run.id)
            .values(policy_id=policy_id, version=later, rewritten_version=later)
        )
    thread.join()
    assert [receipt.run.policy_name for receipt in receipts] == ["watchful"]


def test_a_new_policy_judges_the_past(scene: Scene) -> None:
    """A run that is opened again under another policy is judged by it from its first observation on."""
    run = scene.open("one", policy="paper")
    scene.post(run, evals(0.9, 0.8, 0.7))
    assert scene.read(run).verdict.verdict == "suspect"
    scene.open("one", policy="watchful")
    receipt = scene.post(run, [PostedObservation("unwatched", 0, 1.0)])
    assert receipt.run.verdict.verdict == "stop"
    assert receipt.decision is not None
    assert [row["verdict"].verdict for row in scene.rows(tables.verdicts, run)] == ["suspect", "stop"]


def test_reopening(scene: Scene) -> None:
    """Opened again, a run merges its labels and keeps what is not said; other metrics are refused."""
    run = scene.open("one", labels={"job": "1", "node": "a"}, total_steps=10)
    again = scene.open("one", labels={"job": "2"})
    assert again.id == run.id
    assert again.labels == {"job": "2", "node": "a"}
    assert (again.total_steps, again.policy_name, again.mode) == (10, run.policy_name, run.mode)
    with pytest.raises(Conflict, match="metrics"):
        scene.open("one", metrics={"gold": {"role": "eval", "direction": "maximize"}})


def test_going_on(scene: Scene) -> None:
    """A run goes on by its id, as if it were opened again; one that is not there is not opened by anything."""
    run = scene.open("one", labels={"job": "1"})
    scene.open("two")
    commands.finish_run(scene.database, scene.project_id, run.id, "failed", NOW)
    again = open_run.reopen_run(scene.database, scene.project_id, run.id, NOW)
    assert (again.id, again.status, again.ended_at, again.labels) == (run.id, "running", None, run.labels)
    assert open_run.reopen_run(scene.database, scene.project_id, run.id, NOW).version == again.version
    for project_id, run_id in ((scene.project_id, new_id()), (new_id(), run.id)):
        with pytest.raises(NotFound):
            open_run.reopen_run(scene.database, project_id, run_id, NOW)
    with scene.database.reading() as tx:
        assert sorted(tx.execute(sa.select(tables.runs.c.name)).scalars()) == ["one", "two"]


def test_opening_needs_a_policy_that_exists(scene: Scene) -> None:
    """A policy is named with or without its version; one that does not exist is refused with those that do."""
    assert scene.open(policy="paper@1").policy_version == 1
    for reference in ("nosuch", "paper@2", "paper@" + "9" * 30, "paper@x", "@1"):
        with pytest.raises(Invalid, match="policy"):
            scene.open(policy=reference)
