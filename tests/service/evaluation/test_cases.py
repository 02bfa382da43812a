"""What is kept of attempts that have ended, and when."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.decisions import commands, stale_runs
from evalstop_service.evaluation import cases
from evalstop_service.ingest import CheckpointSaved, Resumed, open_run
from evalstop_service.rules.decision_lifecycle import DecisionState, Reported, Undone
from evalstop_service.rules.statuses import DecisionOutcome
from evalstop_service.store import tables
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.project_fixture import NOW, ProjectFixture, evals, set_up_project

RISING = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
DECLINES = (0.9, 0.8, 0.7)
"""At whose third the paper's rule wants a stop: step 8, when they come after `RISING`, whose last step is 5."""


@pytest.fixture
def shadow(database: Database) -> ProjectFixture:
    """A project whose stops are only recorded."""
    return set_up_project(database, "shadow")


def after(hours: float) -> datetime:
    return NOW + timedelta(hours=hours)


def case_of(project: ProjectFixture, run: Run, attempt: int = 1) -> dict[str, Any] | None:
    found = [row for row in project.load_rows(tables.cases, run) if row["attempt"] == attempt]
    return found[0] if found else None


def expect(project: ProjectFixture, run: Run, attempt: int = 1, **columns: Any) -> None:
    """The case of an attempt says this."""
    case = case_of(project, run, attempt)
    assert case is not None
    assert {name: case[name] for name in columns} == columns


def said(project: ProjectFixture, run: Run) -> list[str]:
    return [row["outcome"] for row in project.load_rows(tables.outcomes, run)]


def flagged(project: ProjectFixture, *later: float, **terms: Any) -> Run:
    """A run that is decided on after two hours, and has these evals after five."""
    run = project.open_run(labels={"gpus": "4", "job_kind": "rlhf"}, **terms)
    project.submit(run, CheckpointSaved(4, "file:///4"))
    project.post_observations(run, evals(*RISING), after(1))
    project.post_observations(run, evals(*DECLINES, start=6), after(2))
    project.post_observations(run, evals(*later, start=9), after(5))
    return run


def finish(project: ProjectFixture, run: Run, hours: float = 6) -> None:
    commands.finish_run(project.database, project.id, run.id, "completed", after(hours))


def test_a_shadow_stop_of_a_run_that_turned_was_right(shadow: ProjectFixture) -> None:
    """What came after the decision tells that gold stayed down; the hours after it could have been saved."""
    run = flagged(shadow, 0.5, 0.3, 0.2, 0.1)
    assert case_of(shadow, run) is None
    finish(shadow, run)
    expect(shadow, run, run_outcome="turned", outcome="right", derived=True, treatment="observed")
    expect(shadow, run, decided_step=8, detectors=["k_decline"], stated_risk=None, job_kind="rlhf")
    expect(shadow, run, gpus=4.0, gpu_hours=24.0, gpu_hours_saved=16.0, gpu_hours_lost=0.0)
    (outcome,) = shadow.load_rows(tables.outcomes, run)
    assert (outcome["actor"], outcome["derived"], outcome["outcome"]) == ("evalstop", True, "right")
    assert outcome["assessment"].best.mean == pytest.approx((0.9 + 1.0 + 0.9) / 3)
    assert outcome["assessment"].last.mean == pytest.approx(0.2)
    expect(shadow, run, turn_step=outcome["turn_step"], delay_steps=8 - outcome["turn_step"])


def test_a_shadow_stop_of_a_run_that_recovered_was_wrong(shadow: ProjectFixture) -> None:
    """It would have saved nothing, and cost the steps since the checkpoint: 4 of 8, which took 2 hours on 4 GPUs."""
    run = flagged(shadow, 0.9, 1.0, 1.1, 1.2)
    finish(shadow, run)
    expect(shadow, run, run_outcome="healthy", outcome="wrong", turn_step=None, delay_steps=None)
    expect(shadow, run, gpu_hours_saved=0.0, gpu_hours_lost=4.0)


def test_a_stop_is_not_proved_by_what_it_was_made_for(project: ProjectFixture) -> None:
    """Of a run that was stopped nobody knows how it would have gone on; its pace tells what was saved."""
    run = flagged(project, total_steps=100)
    decision = project.find_decision(run)
    assert decision is not None
    gone = Reported(after(3), DecisionState.CONFIRMED, "receiver", "gone", {})
    commands.record_report(project.database, project.id, decision.id, gone)
    expect(project, run, run_outcome="undecided", outcome="unknown", treatment="stopped")
    # 8 steps took 2 hours on 4 GPUs, so that 92 take 92; one hour went by until the job was gone.
    expect(project, run, gpu_hours=12.0, gpu_hours_saved=92.0 - 4.0, gpu_hours_lost=None)
    commands.apply_command(project.database, project.id, decision.id, Undone(after(4), "dana", ""))
    expect(project, run, treatment="prevented", gpu_hours_saved=None)


def test_a_run_that_was_never_flagged_has_a_case_too(project: ProjectFixture) -> None:
    """To let it go on was right when it stayed healthy; nobody says how many GPUs it has, so that hours are unknown."""
    run = project.open_run(labels={"gpus": "many"})
    project.post_observations(run, evals(*RISING))
    finish(project, run)
    expect(project, run, run_outcome="healthy", outcome="right", decision_id=None, treatment=None, detectors=None)
    expect(project, run, gpus=None, gpu_hours=None, gpu_hours_saved=None, gpu_hours_lost=None)


def test_evals_after_the_end_are_taken_into_account(shadow: ProjectFixture) -> None:
    """They may change what was derived, which is a row of its own; what they leave as it was is none."""
    run = flagged(shadow, 0.9, 1.0)
    finish(shadow, run)
    assert said(shadow, run) == ["unknown"]
    shadow.post_observations(run, evals(1.1, start=11), after(7))
    assert said(shadow, run) == ["unknown", "wrong"]
    shadow.post_observations(run, evals(1.2, start=12), after(8))
    assert said(shadow, run) == ["unknown", "wrong"]
    expect(shadow, run, ended_at=after(6))


def test_what_a_person_says_counts(shadow: ProjectFixture) -> None:
    """Whenever it was said, no eval overrides it; the case follows each change of mind."""
    run = flagged(shadow, 0.9, 1.0, 1.1, 1.2)
    decision = shadow.find_decision(run)
    assert decision is not None

    def judge(outcome: str, turn_step: int | None) -> None:
        label = commands.Label(DecisionOutcome(outcome), turn_step, "", "dana", NOW)
        commands.label_decision(shadow.database, shadow.id, decision.id, label)

    judge("right", 5)
    assert case_of(shadow, run) is None
    finish(shadow, run)
    expect(shadow, run, run_outcome="turned", outcome="right", derived=False, turn_step=5, delay_steps=3)
    shadow.post_observations(run, evals(1.3, start=20), after(7))
    assert said(shadow, run) == ["right"]
    judge("wrong", None)
    expect(shadow, run, run_outcome="healthy", outcome="wrong", derived=False, turn_step=None)
    judge("wrong", 12)
    expect(shadow, run, run_outcome="turned", outcome="wrong", turn_step=12)
    judge("unknown", None)
    expect(shadow, run, run_outcome="undecided", outcome="unknown")


def test_each_attempt_has_its_case(shadow: ProjectFixture) -> None:
    """A trainer that goes on from a checkpoint ends the attempt before, and its case stays as it is."""
    run = flagged(shadow, 0.5, 0.3, 0.2, 0.1)
    shadow.submit(run, Resumed(4), after(6))
    expect(shadow, run, run_outcome="turned", outcome="right", ended_at=after(6))
    assert case_of(shadow, run, attempt=2) is None
    shadow.post_observations(run, evals(1.0, 1.1, 1.2, 1.3, start=5), after(7))
    finish(shadow, run, hours=8)
    expect(shadow, run, attempt=2, run_outcome="healthy", outcome="right", decision_id=None, gpu_hours=8.0)
    expect(shadow, run, run_outcome="turned", outcome="right")


@pytest.mark.parametrize("sign_of_life", ["heartbeat", "eval", "opening"])
def test_a_run_that_goes_on_has_no_case(shadow: ProjectFixture, sign_of_life: str) -> None:
    """One that was lost and is found again, or is opened again, has not ended after all."""
    run = flagged(shadow, 0.5)
    found: dict[str, Callable[[], object]] = {
        "heartbeat": lambda: open_run.record_heartbeat(shadow.database, shadow.id, run.id, after(400)),
        "eval": lambda: shadow.post_observations(run, evals(0.4, start=20), after(400)),
        "opening": lambda: shadow.open_run(run.name, resume=open_run.Resume.ALLOW),
    }
    for hours in (100, 200, 300):
        stale_runs.check_due_runs(shadow.database, after(hours))
    assert shadow.load_run(run).status == "lost"
    expect(shadow, run, run_outcome="undecided")
    found[sign_of_life]()
    assert shadow.load_run(run).status == "running"
    assert case_of(shadow, run) is None


def test_a_case_can_be_made_of_what_is_on_record(shadow: ProjectFixture) -> None:
    """Of a run that ended before there were cases, the first word makes one."""
    run = flagged(shadow, 0.9, 1.0, 1.1, 1.2)
    finish(shadow, run)
    before = case_of(shadow, run)
    with shadow.database.transaction() as tx:
        tx.execute(tables.cases.delete())
        cases.recompute_case(tx, shadow.load_run(run), 1)
    made = case_of(shadow, run)
    assert before is not None
    assert made is not None
    assert made == before | {"revision": made["revision"]}


@pytest.mark.parametrize(("label", "gpus"), [("8", 8.0), ("0.5", 0.5), ("0", None), ("-1", None), ("nan", None)])
def test_gpus_are_told_by_a_label(label: str, gpus: float | None) -> None:
    """A number that makes sense, or unknown."""
    assert cases.read_gpus({"gpus": label}) == gpus


def test_evidence_of_a_kind_of_a_later_release(shadow: ProjectFixture) -> None:
    """A decision that a later release made by evidence of its own kind has its case, and its detectors are named."""
    run = flagged(shadow)
    with shadow.database.transaction() as tx:
        decided = tx.execute(sa.select(tables.decisions.c.verdict).filter_by(run_id=run.id)).scalar_one()
        evidence = tuple(replace(one, kind="yet_to_be_invented") for one in decided.evidence)
        changed = (
            sa.update(tables.decisions).filter_by(run_id=run.id).values(verdict=replace(decided, evidence=evidence))
        )
        tx.execute(changed)
    finish(shadow, run)
    expect(shadow, run, detectors=["k_decline"])
