"""Opening a run by its name, again and with other options."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.decisions import deadlines
from evalstop_service.domain.decision_lifecycle import Mode
from evalstop_service.errors import Conflict, Invalid, NotFound
from evalstop_service.ingest import Resumed, open_run
from evalstop_service.ingest.open_run import Resume
from evalstop_service.projects.project_settings import ProjectChange, apply_change
from evalstop_service.store import audit, tables
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation

from tests.service.concurrency import run_concurrently, wait_for_blocked_process
from tests.service.project_fixture import DECLINING_EVALS, NOW, ProjectFixture, evals, set_up_project


def test_message_waiting_for_a_policy_change_uses_it(postgres_database: Database) -> None:
    """A message that waited while the run got another policy is judged by the new one."""
    project = set_up_project(postgres_database)
    run = project.open_run("one", policy="paper")
    project.post_observations(run, DECLINING_EVALS[:3])
    receipts = []
    with postgres_database.transaction() as tx:
        tx.execute(sa.select(tables.runs.c.id).where(tables.runs.c.id == run.id).with_for_update())
        thread = threading.Thread(target=lambda: receipts.append(project.post_observations(run, DECLINING_EVALS[3:])))
        thread.start()
        wait_for_blocked_process(postgres_database)
        other_policy = sa.select(tables.policies.c.id).where(
            tables.policies.c.project_id == project.id, tables.policies.c.name == "watch-all-roles"
        )
        policy_id = tx.execute(other_policy).scalar_one()
        next_version = tables.runs.c.version + 1
        tx.execute(
            tables.runs.update()
            .where(tables.runs.c.id == run.id)
            .values(
                policy_id=policy_id,
                policy_name="watch-all-roles",
                version=next_version,
                rewritten_version=next_version,
            )
        )
    thread.join()
    assert [receipt.run.policy_name for receipt in receipts] == ["watch-all-roles"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "watch-all-roles"}, "policy paper@1, not watch-all-roles"),
        ({"policy": "paper@2"}, "policy paper@1, not paper@2"),
        ({"mode": Mode.ENFORCE}, "mode shadow, not enforce"),
        ({"labels": {"slurm_job_id": "2"}}, "label slurm_job_id '1', not '2'"),
    ],
)
@pytest.mark.parametrize("resume", [None, *Resume])
@pytest.mark.parametrize("observations", ["none", "live", "superseded"])
def test_reopening_changes_no_options(
    project: ProjectFixture, options: dict[str, Any], message: str, resume: Resume | None, observations: str
) -> None:
    """A run keeps the policy and mode of its opening, whatever it has observed; a resume changes its labels."""
    run = project.open_run("one", policy="paper", mode=Mode.SHADOW, labels={"slurm_job_id": "1"})
    if observations != "none":
        project.post_observations(run, evals(0.9, start=1))
    if observations == "superseded":
        assert project.submit(run, Resumed(0)).run.last_step is None
    same_options: dict[str, Any] = {
        "policy": "paper",
        "mode": Mode.SHADOW,
        "labels": {"slurm_job_id": "1", "note": "new"},
    }
    assert project.open_run("one", **same_options).labels == {"slurm_job_id": "1", "note": "new"}
    assert project.open_run("one", policy="paper@1").id == run.id
    if "labels" in options and resume is not None:
        assert project.open_run("one", resume=resume, **options).labels["slurm_job_id"] == "2"
    else:
        with pytest.raises(Conflict, match=message):
            project.open_run("one", resume=resume, **options)
        assert project.load_run(run).labels["slurm_job_id"] == "1"


def test_options_beyond_the_project_are_ignored(database: Database) -> None:
    """A run that asks for a mode or policy its project does not allow is opened without them."""
    project = set_up_project(database)
    author = Author(project.id, "dana", NOW)
    with pytest.raises(Conflict, match="change both"), database.transaction() as tx:
        apply_change(tx, author, ProjectChange(max_mode=Mode.SHADOW))
    allowed = ["paper@1"]
    change = ProjectChange(default_mode=Mode.SHADOW, max_mode=Mode.SHADOW, allowed_policies=allowed)
    with database.transaction() as tx:
        apply_change(tx, author, change)
    default_policy = project.open_run("own").policy_name
    for _ in range(2):
        run = project.open_run("one", policy="cautious", mode=Mode.ENFORCE)
        assert (run.policy_name, run.mode) == (default_policy, "shadow")
        project.post_observations(run, evals(0.9))
    assert project.open_run("two", policy="paper@1").policy_name == "paper"
    assert project.open_run("three", policy=run.policy_name).policy_name == run.policy_name


def test_lowered_mode_applies_to_open_runs(project: ProjectFixture) -> None:
    """When a project's highest mode is lowered to shadow, stops of its open runs are only recorded."""
    run = project.open_run(policy="paper", mode=Mode.ENFORCE)
    lowered = ProjectChange(default_mode=Mode.SHADOW, max_mode=Mode.SHADOW)
    with project.database.transaction() as tx:
        apply_change(tx, Author(project.id, "dana", NOW), lowered)
    project.post_observations(run, evals(0.9, 0.8, 0.7, 0.6))
    decision = project.load_decision(run)
    assert decision.state == "shadow"


def test_stop_on_hold_is_not_sent_after_the_mode_was_lowered(project: ProjectFixture) -> None:
    """A stop that was on hold when its project was lowered to shadow stays so until the project is raised again."""
    project.change_settings(stops_share=None, paused_at=NOW, paused_by="dana")
    run, _ = project.open_declining_run(policy="paper", mode=Mode.ENFORCE)
    project.change_settings(paused_at=None)
    states = []
    for minute, mode in enumerate((Mode.SHADOW, Mode.ENFORCE), 2):
        project.change_settings(max_mode=mode)
        deadlines.process_overdue(project.database, NOW + timedelta(minutes=minute))
        states.append(project.load_decision(run).state)
    assert states == ["on_hold", "requested"]


def test_processes_of_one_job_share_a_run(project: ProjectFixture) -> None:
    """Processes of one job share the run of a name; another job, or an unknown one, gets its own."""
    first = project.open_run("one", job="slurm:1", labels={"restart": "0"})
    project.post_observations(first, evals(0.9))
    assert project.open_run("one", job="slurm:1", labels={"restart": "1"}).labels == {"restart": "1"}
    second = project.open_run("one", job="slurm:2")
    assert (second.name, second.id == first.id) == ("one-2", False)
    assert project.open_run("one", job="slurm:2").id == second.id
    assert project.open_run("one", job="slurm:1").id == first.id
    assert project.open_run("one-2").id == second.id
    assert project.open_run("two").id != project.open_run("two", job="slurm:1").id


def test_open_without_job_attaches_to_a_running_run(project: ProjectFixture) -> None:
    """Without a job, a running run of that name is found: one without a job before those of jobs."""
    without_job = project.open_run("one")
    project.open_run("one", job="slurm:1")
    assert project.open_run("one").id == without_job.id
    project.finish_run(without_job)
    assert project.open_run("one").job == "slurm:1"


@pytest.mark.parametrize("job", [None, "slurm:1"])
def test_name_of_an_ended_run_opens_a_new_one(project: ProjectFixture, job: str | None) -> None:
    """Starting a script again opens a new run, even in the same job; the first one stays ended."""
    first = project.open_run("one", job=job)
    project.post_observations(first, evals(0.9))
    project.finish_run(first)
    again = project.open_run("one", job=job, mode=Mode.ENFORCE)
    assert (again.name, again.status, again.last_step) == ("one-2", "running", None)
    assert project.load_run(first).status == "completed"
    project.finish_run(again, "failed")
    assert project.open_run("one", job=job).name == "one-3"


def test_resume_continues_the_latest_run(project: ProjectFixture) -> None:
    """A resume continues the latest run of the name, that of the same job first; `must` requires one."""
    with pytest.raises(NotFound, match="'one'"):
        project.open_run("one", resume=Resume.MUST)
    seeds = [project.open_run("one", resume=Resume.ALLOW, job="slurm:1"), project.open_run("one", job="slurm:2")]
    for seed in seeds:
        project.post_observations(seed, evals(0.9))
        project.finish_run(seed, "failed")
    assert [project.open_run("one", resume=Resume.ALLOW, job=f"slurm:{job}").id for job in (1, 2)] == [
        s.id for s in seeds
    ]
    resumed = project.open_run("one", resume=Resume.MUST, job="slurm:3")
    assert (resumed.id, resumed.status, resumed.job) == (seeds[1].id, "running", "slurm:3")
    assert project.open_run("one", resume=Resume.MUST).id == resumed.id


def test_repeated_request_opens_no_second_run(project: ProjectFixture) -> None:
    """A repeated request with the same opening id finds the run it opened, whatever became of it."""
    project.open_run("one", job="slurm:0")
    opening = new_id()
    run = project.open_run("one", job="slurm:1", opening=opening)
    project.finish_run(run)
    again = project.open_run("one", job="slurm:2", opening=opening, labels={"node": "b"})
    assert (again.id, again.name, again.status, again.labels) == (run.id, "one-2", "completed", {})
    other = set_up_project(project.database).open_run("one", opening=opening)
    assert other.id != run.id


def test_concurrent_ranks_open_one_run_per_job(project: ProjectFixture) -> None:
    """Ranks that open a run concurrently share it, and each job gets one."""
    opened = []
    ranks = [lambda job=job: opened.append(project.open_run("one", job=f"slurm:{job}")) for job in (1, 2) * 4]
    assert run_concurrently(*ranks) == []
    assert {run.name for run in opened} == {"one", "one-2"}
    assert len({(run.job, run.id) for run in opened}) == 2


def test_reopening_merges_labels(project: ProjectFixture) -> None:
    """Reopened, a run merges its labels and keeps options not given; other metrics are refused."""
    run = project.open_run("one", labels={"job": "1", "node": "a"}, total_steps=10)
    again = project.open_run("one", labels={"rank": "2"})
    assert again.id == run.id
    assert again.labels == {"job": "1", "node": "a", "rank": "2"}
    assert (again.total_steps, again.policy_name, again.mode) == (10, run.policy_name, run.mode)
    with pytest.raises(Conflict, match="metrics"):
        project.open_run("one", metrics={"gold": {"role": "eval", "direction": "maximize"}})


def test_reopen_by_id_continues_the_run(project: ProjectFixture) -> None:
    """Reopening by id continues the run; an unknown id opens nothing."""
    run = project.open_run("one", labels={"job": "1"})
    project.open_run("two")
    project.finish_run(run, "failed")
    again = open_run.reopen_run(project.database, project.id, run.id, "key a", NOW)
    assert (again.id, again.status, again.ended_at, again.labels) == (run.id, "running", None, run.labels)
    assert open_run.reopen_run(project.database, project.id, run.id, "key a", NOW).version == again.version
    for project_id, run_id in ((project.id, new_id()), (new_id(), run.id)):
        with pytest.raises(NotFound):
            open_run.reopen_run(project.database, project_id, run_id, "key a", NOW)
    with project.database.reading() as tx:
        assert sorted(tx.execute(sa.select(tables.runs.c.name)).scalars()) == ["one", "two"]


def test_unknown_policy_is_refused(project: ProjectFixture) -> None:
    """A policy is named with or without version; an unknown one is refused."""
    assert project.open_run(policy="paper@1").policy_version == 1
    for reference in ("nosuch", "paper@2", "paper@" + "9" * 30, "paper@x", "@1"):
        with pytest.raises(Invalid, match="policy"):
            project.open_run(policy=reference)


def test_changed_length_applies_at_once(project: ProjectFixture) -> None:
    """A run reopened with another length is judged as one that had it from the start, and the change is audited."""
    run = project.open_run("one", policy="default", labels={"total_steps": "100"})
    twin = project.open_run("two", policy="default", total_steps=6)
    for each in (run, twin):
        project.post_observations(each, evals(0.5, 0.9, 0.8, 0.7))
    assert project.load_run(run).verdict.evidence != project.load_run(twin).verdict.evidence
    again = project.open_run("one", total_steps=6, actor="key trainer")
    assert (again.total_steps, again.length_known) == (6, True)
    for each in (again, twin):
        project.post_observations(each, evals(0.6, start=4))
    assert project.load_run(run).verdict.evidence == project.load_run(twin).verdict.evidence
    with project.database.reading() as tx:
        (entry,) = audit.list_entries(tx, project.id, action="run.terms_changed")
    assert entry.actor == "key trainer"
    assert entry.details == {"before": {"total_steps": 100}, "after": {"total_steps": 6}}
    assert not project.post_observations(again, [PostedObservation("eval", 9, 0.5)]).run.length_known
