"""Opening a run by its name, again and under other terms."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.decisions import commands
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.ingest import open_run
from evalstop_service.ingest.open_run import Resume
from evalstop_service.projects.project_settings import ProjectChange, change_project_settings
from evalstop_service.rules.decision_lifecycle import Mode
from evalstop_service.store import audit, tables
from evalstop_service.store.audit import Author
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


def test_a_run_without_observations_takes_another_policy(scene: Scene) -> None:
    """A run that is opened again under another policy, before anything is observed, is judged by that one."""
    run = scene.open("one", policy="paper")
    scene.open("one", policy="watchful")
    receipt = scene.post(run, evals(0.9, 0.8, 0.7))
    assert (receipt.run.policy_name, receipt.run.verdict.verdict) == ("watchful", "stop")


@pytest.mark.parametrize(
    ("terms", "refusal"),
    [
        ({"policy": "watchful"}, "policy paper@1, not watchful"),
        ({"policy": "paper@2"}, "policy paper@1, not paper@2"),
        ({"mode": Mode.ENFORCE}, "mode shadow, not enforce"),
        ({"labels": {"slurm_job_id": "2"}}, "label slurm_job_id '1', not '2'"),
    ],
)
@pytest.mark.parametrize("resume", [None, *Resume])
def test_attaching_changes_no_terms(scene: Scene, terms: dict[str, Any], refusal: str, resume: Resume | None) -> None:
    """Of a run with observations nobody changes policy or mode, and its labels only who resumes it."""
    run = scene.open("one", policy="paper", mode=Mode.SHADOW, labels={"slurm_job_id": "1"})
    scene.post(run, evals(0.9))
    same = {"policy": "paper", "mode": Mode.SHADOW, "labels": {"slurm_job_id": "1", "note": "new"}}
    assert scene.open("one", **same).labels == {"slurm_job_id": "1", "note": "new"}
    assert scene.open("one", policy="paper@1").id == run.id
    if "labels" in terms and resume is not None:
        assert scene.open("one", resume=resume, **terms).labels["slurm_job_id"] == "2"
    else:
        with pytest.raises(Conflict, match=refusal):
            scene.open("one", resume=resume, **terms)
        assert scene.read(run).labels["slurm_job_id"] == "1"


def test_a_trainer_gets_no_more_than_its_project_allows(database: Database) -> None:
    """A run that asks for a mode or policy beyond its project's is opened without them, and can be opened again so."""
    scene = set_up(database)
    author = Author(scene.project_id, "dana", NOW)
    with pytest.raises(Conflict, match="change both"):
        change_project_settings(database, author, ProjectChange(max_mode=Mode.SHADOW))
    allowed = ["paper@1"]
    change = ProjectChange(default_mode=Mode.SHADOW, max_mode=Mode.SHADOW, allowed_policies=allowed)
    change_project_settings(database, author, change)
    projects_own = scene.open("own").policy_name
    for _ in range(2):
        run = scene.open("one", policy="cautious", mode=Mode.ENFORCE)
        assert (run.policy_name, run.mode) == (projects_own, "shadow")
        scene.post(run, evals(0.9))
    assert scene.open("two", policy="paper@1").policy_name == "paper"
    assert scene.open("three", policy=run.policy_name).policy_name == run.policy_name


def test_nothing_is_stopped_beyond_the_highest_mode(scene: Scene) -> None:
    """A project that allows no stops any more has those of its open runs recorded only."""
    run = scene.open(policy="paper", mode=Mode.ENFORCE)
    lowered = ProjectChange(default_mode=Mode.SHADOW, max_mode=Mode.SHADOW)
    change_project_settings(scene.database, Author(scene.project_id, "dana", NOW), lowered)
    scene.post(run, evals(0.9, 0.8, 0.7, 0.6))
    decision = scene.decision(run)
    assert decision is not None
    assert decision.state == "shadow"


def test_the_same_job_attaches(scene: Scene) -> None:
    """Processes of one job share the run of a name; another job, or one of which nothing is known, gets its own."""
    first = scene.open("one", job="slurm:1", labels={"restart": "0"})
    scene.post(first, evals(0.9))
    assert scene.open("one", job="slurm:1", labels={"restart": "1"}).labels == {"restart": "1"}
    second = scene.open("one", job="slurm:2")
    assert (second.name, second.id == first.id) == ("one-2", False)
    assert scene.open("one", job="slurm:2").id == second.id
    assert scene.open("one", job="slurm:1").id == first.id
    assert scene.open("one-2").id == second.id
    assert scene.open("two").id != scene.open("two", job="slurm:1").id


def test_without_a_job_one_attaches_to_what_runs(scene: Scene) -> None:
    """Who names no job attaches to a running run of that name: one without a job before those of others."""
    of_nobody = scene.open("one")
    scene.open("one", job="slurm:1")
    assert scene.open("one").id == of_nobody.id
    commands.finish_run(scene.database, scene.project_id, of_nobody.id, "completed", NOW)
    assert scene.open("one").job == "slurm:1"


@pytest.mark.parametrize("job", [None, "slurm:1"])
def test_the_name_of_an_ended_run_starts_another(scene: Scene, job: str | None) -> None:
    """A second start of a script is a run of its own, even in the same job; the first stays as it ended."""
    first = scene.open("one", job=job)
    scene.post(first, evals(0.9))
    commands.finish_run(scene.database, scene.project_id, first.id, "completed", NOW)
    again = scene.open("one", job=job, mode=Mode.ENFORCE)
    assert (again.name, again.status, again.last_step) == ("one-2", "running", None)
    assert scene.read(first).status == "completed"
    commands.finish_run(scene.database, scene.project_id, again.id, "failed", NOW)
    assert scene.open("one", job=job).name == "one-3"


def test_resuming_continues_the_latest(scene: Scene) -> None:
    """Who resumes continues the latest run opened by that name, that of the same job first; `must` wants one there."""
    with pytest.raises(NotFound, match="'one'"):
        scene.open("one", resume=Resume.MUST)
    seeds = [scene.open("one", resume=Resume.ALLOW, job="slurm:1"), scene.open("one", job="slurm:2")]
    for seed in seeds:
        scene.post(seed, evals(0.9))
        commands.finish_run(scene.database, scene.project_id, seed.id, "failed", NOW)
    assert [scene.open("one", resume=Resume.ALLOW, job=f"slurm:{job}").id for job in (1, 2)] == [s.id for s in seeds]
    resumed = scene.open("one", resume=Resume.MUST, job="slurm:3")
    assert (resumed.id, resumed.status, resumed.job) == (seeds[1].id, "running", "slurm:3")
    assert scene.open("one", resume=Resume.MUST).id == resumed.id


def test_a_request_that_is_sent_again_opens_no_second_run(scene: Scene) -> None:
    """What a spool sends again finds the run that it opened, under any name, and does not open it again."""
    scene.open("one", job="slurm:0")
    opening = new_id()
    run = scene.open("one", job="slurm:1", opening=opening)
    commands.finish_run(scene.database, scene.project_id, run.id, "completed", NOW)
    again = scene.open("one", job="slurm:2", opening=opening, labels={"node": "b"})
    assert (again.id, again.name, again.status, again.labels) == (run.id, "one-2", "completed", {})
    other = set_up(scene.database).open("one", opening=opening)
    assert other.id != run.id


def test_processes_of_a_job_open_one_run(scene: Scene) -> None:
    """Ranks that open a run at the same time share it, and each job gets one."""
    opened = []
    ranks = [lambda job=job: opened.append(scene.open("one", job=f"slurm:{job}")) for job in (1, 2) * 4]
    assert at_once(*ranks) == []
    assert {run.name for run in opened} == {"one", "one-2"}
    assert len({(run.job, run.id) for run in opened}) == 2


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
    again = open_run.reopen_run(scene.database, scene.project_id, run.id, "key a", NOW)
    assert (again.id, again.status, again.ended_at, again.labels) == (run.id, "running", None, run.labels)
    assert open_run.reopen_run(scene.database, scene.project_id, run.id, "key a", NOW).version == again.version
    for project_id, run_id in ((scene.project_id, new_id()), (new_id(), run.id)):
        with pytest.raises(NotFound):
            open_run.reopen_run(scene.database, project_id, run_id, "key a", NOW)
    with scene.database.reading() as tx:
        assert sorted(tx.execute(sa.select(tables.runs.c.name)).scalars()) == ["one", "two"]


def test_opening_needs_a_policy_that_exists(scene: Scene) -> None:
    """A policy is named with or without its version; one that does not exist is refused with those that do."""
    assert scene.open(policy="paper@1").policy_version == 1
    for reference in ("nosuch", "paper@2", "paper@" + "9" * 30, "paper@x", "@1"):
        with pytest.raises(Invalid, match="policy"):
            scene.open(policy=reference)


def test_another_plan(scene: Scene) -> None:
    """A run that is opened again with another length is judged by it at once, and the change is on the audit log."""
    run = scene.open("one", policy="watchful", labels={"total_steps": "100"})
    scene.post(run, [PostedObservation("proxy", step, step) for step in range(5)])
    assert (run.total_steps, scene.read(run).verdict.verdict) == (100, "continue")
    again = scene.open("one", total_steps=6, actor="key trainer")
    assert (again.total_steps, again.length_known) == (6, True)
    assert scene.post(again, [PostedObservation("kl", 1, 0.5)]).run.verdict.verdict == "suspect"
    with scene.database.reading() as tx:
        (entry,) = audit.list_entries(tx, scene.project_id, action="run.length_changed")
    assert entry.actor == "key trainer"
    assert entry.details == {"before": 100, "after": 6}
    assert not scene.post(again, [PostedObservation("eval", 9, 0.5)]).run.length_known
