"""Cases of ended attempts: when they are computed, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from evalstop_service.decisions import commands, stale_runs
from evalstop_service.domain.decision_commands import Undone
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.domain.labels import read_gpus
from evalstop_service.domain.run import Turn
from evalstop_service.domain.statuses import DecisionOutcome, RunStatus
from evalstop_service.evaluation import cases
from evalstop_service.ingest import CheckpointSaved, Resumed, open_run
from evalstop_service.store import tables
from evalstop_service.store.cases import Outcome
from evalstop_service.store.database import Database
from evalstop_service.store.runs import Run
from msgspec.structs import replace

from tests.service.project_fixture import NOW, ProjectFixture, evals, set_up_project

RISING = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
DECLINES = (0.9, 0.8, 0.7)
"""After `RISING`, whose last step is 5, the paper's rule stops at the third of these, step 8."""


@pytest.fixture
def shadow_project(database: Database) -> ProjectFixture:
    """A project in shadow mode."""
    return set_up_project(database, "shadow")


def hours_later(hours: float) -> datetime:
    return NOW + timedelta(hours=hours)


def find_case(project: ProjectFixture, run: Run, attempt: int = 1) -> dict[str, Any] | None:
    matching = [row for row in project.load_rows(tables.cases, run) if row["attempt"] == attempt]
    return matching[0] if matching else None


def assert_case(project: ProjectFixture, run: Run, attempt: int = 1, **columns: Any) -> None:
    """Assert that the case of an attempt has these columns."""
    case = find_case(project, run, attempt)
    assert case is not None
    assert {name: case[name] for name in columns} == columns


def load_outcomes(project: ProjectFixture, run: Run) -> list[str]:
    return [row["outcome"] for row in project.load_rows(tables.outcomes, run)]


def open_flagged_run(project: ProjectFixture, *later: float, **options: Any) -> Run:
    """Open a run with a decision after two hours and these evals after five."""
    run = project.open_run(labels={"gpus": "4", "job_kind": "rlhf"}, **options)
    project.submit(run, CheckpointSaved(4, "file:///4"))
    project.post_observations(run, evals(*RISING), hours_later(1))
    project.post_observations(run, evals(*DECLINES, start=6), hours_later(2))
    project.post_observations(run, evals(*later, start=9), hours_later(5))
    return run


def finish_run(project: ProjectFixture, run: Run, hours: float = 6) -> None:
    project.finish_run(run, now=hours_later(hours))


def test_shadow_stop_of_a_turned_run_is_right(shadow_project: ProjectFixture) -> None:
    """If evals after the decision stay down it was right, and the later GPU-hours count as saved."""
    run = open_flagged_run(shadow_project, 0.5, 0.3, 0.2, 0.1)
    assert find_case(shadow_project, run) is None
    finish_run(shadow_project, run)
    assert_case(shadow_project, run, run_outcome="turned", outcome="right", derived=True, treatment="observed")
    assert_case(shadow_project, run, decided_step=8, detectors=["k_decline"], stated_risk=None, job_kind="rlhf")
    assert_case(shadow_project, run, gpus=4.0, gpu_hours=24.0, gpu_hours_saved=16.0, gpu_hours_lost=0.0)
    (outcome,) = shadow_project.load_rows(tables.outcomes, run)
    assert (outcome["actor"], outcome["derived"], outcome["outcome"]) == ("evalstop", True, "right")
    assert (outcome["assessment"].turn, outcome["assessment"].judged_from) == (Turn(5, 4), 10)
    assert_case(shadow_project, run, turn_step=outcome["turn_step"], delay_steps=8 - outcome["turn_step"])


def test_calls_of_all_detectors_are_judged(shadow_project: ProjectFixture) -> None:
    """A case has the calls of deciding and observing detectors, each as right as a stop at its step; a label judges
    them again."""
    policy = {"name": "panel", "members": [{"detector": "k_decline", "params": {"k": 3}}]}
    for name, detector, stop_at in (("hasty", "k_decline", 1), ("slow", "focus", 250), ("silent", "focus", 300)):
        observer = {"detector": detector, "id": name, "stop_at": stop_at, "observe": True}
        policy["members"].append(observer)  # type: ignore[attr-defined]
    shadow_project.add_policy(policy)
    run = open_flagged_run(shadow_project, 0.5, 0.3, 0.2, 0.1, 0.1, policy="panel")
    finish_run(shadow_project, run)
    calls = shadow_project.load_case(run).calls
    assert calls is not None
    assert {name: (call.step, call.outcome) for name, call in calls.items()} == {
        "k_decline": (8, "right"),
        "hasty": (6, "right"),
        "slow": (13, "unknown"),  # no later eval shows whether that was right
    }
    turn_step = shadow_project.load_case(run).turn_step
    assert turn_step is not None
    assert calls["k_decline"].delay_steps == 8 - turn_step
    assert calls["k_decline"].gpu_hours_after == pytest.approx(24.0 * 5 / 13)
    label = Outcome(outcome=DecisionOutcome.WRONG, turn_step=None, note="", actor="dana", at=hours_later(9))
    commands.label_run(shadow_project.database, shadow_project.id, run.id, label)
    relabeled = shadow_project.load_case(run).calls
    assert relabeled is not None
    assert {call.outcome for call in relabeled.values()} == {"wrong"}


def test_shadow_stop_of_a_recovered_run_is_wrong(shadow_project: ProjectFixture) -> None:
    """It saves nothing and loses the steps since the checkpoint: 4 of 8, which took 2 hours on 4 GPUs."""
    run = open_flagged_run(shadow_project, 0.9, 1.0, 1.1, 1.2)
    finish_run(shadow_project, run)
    assert_case(shadow_project, run, run_outcome="healthy", outcome="wrong", turn_step=None, delay_steps=None)
    assert_case(shadow_project, run, gpu_hours_saved=0.0, gpu_hours_lost=4.0)


def test_enforced_stop_has_an_unknown_outcome(project: ProjectFixture) -> None:
    """How a stopped run would have gone on is unknown; its pace gives the hours saved."""
    run = open_flagged_run(project, total_steps=100)
    decision = project.load_decision(run)
    project.record_report(decision, DecisionState.CONFIRMED, hours_later(3))
    assert_case(project, run, run_outcome="undecided", outcome="unknown", treatment="stopped")
    # 8 steps took 2 hours on 4 GPUs, so 92 steps take 92 GPU-hours; it took one hour until the job was gone.
    assert_case(project, run, gpu_hours=12.0, gpu_hours_saved=92.0 - 4.0, gpu_hours_lost=None)
    project.apply_command(decision, Undone(hours_later(4), "dana", ""))
    assert_case(project, run, treatment="prevented", gpu_hours_saved=None)


def test_late_confirmation_does_not_lengthen_an_ended_run(project: ProjectFixture) -> None:
    """A run that its trainer has ended costs nothing more until a scheduler confirms days later that its job is
    gone."""
    run = open_flagged_run(project)
    decision = project.load_decision(run)
    for hours, state in ((3, DecisionState.ACKNOWLEDGED), (100, DecisionState.CONFIRMED)):
        project.record_report(decision, state, hours_later(hours))
        finish_run(project, run)
    assert project.load_run(run).status == RunStatus.STOPPED
    assert_case(project, run, treatment="stopped", gpu_hours=24.0, seconds=6 * 3600.0, ended_at=hours_later(6))


def test_unflagged_run_has_a_case(project: ProjectFixture) -> None:
    """Letting a healthy run go on was right; with an invalid `gpus` label its hours are unknown."""
    run = project.open_run(labels={"gpus": "many"})
    project.post_observations(run, evals(*RISING))
    finish_run(project, run)
    assert_case(project, run, run_outcome="healthy", outcome="right", decision_id=None, treatment=None, detectors=None)
    assert_case(project, run, gpus=None, gpu_hours=None, gpu_hours_saved=None, gpu_hours_lost=None)


def test_late_evals_update_the_outcome(shadow_project: ProjectFixture) -> None:
    """Late evals that change the derived outcome add a row; those that do not add none."""
    run = open_flagged_run(shadow_project, 0.9, 1.0)
    finish_run(shadow_project, run)
    assert load_outcomes(shadow_project, run) == ["unknown"]
    shadow_project.post_observations(run, evals(1.1, start=11), hours_later(7))
    assert load_outcomes(shadow_project, run) == ["unknown", "wrong"]
    shadow_project.post_observations(run, evals(1.2, start=12), hours_later(8))
    assert load_outcomes(shadow_project, run) == ["unknown", "wrong"]
    assert_case(shadow_project, run, ended_at=hours_later(6))


def test_label_of_a_person_overrides_the_outcome(shadow_project: ProjectFixture) -> None:
    """A person's label overrides all evals, and the case follows each new label."""
    run = open_flagged_run(shadow_project, 0.9, 1.0, 1.1, 1.2)
    decision = shadow_project.load_decision(run)

    def label_decision(outcome: str, turn_step: int | None) -> None:
        label = Outcome(outcome=DecisionOutcome(outcome), turn_step=turn_step, note="", actor="dana", at=NOW)
        commands.label_decision(shadow_project.database, shadow_project.id, decision.id, label)

    label_decision("right", 5)
    assert find_case(shadow_project, run) is None
    finish_run(shadow_project, run)
    assert_case(shadow_project, run, run_outcome="turned", outcome="right", derived=False, turn_step=5, delay_steps=3)
    shadow_project.post_observations(run, evals(1.3, start=20), hours_later(7))
    assert load_outcomes(shadow_project, run) == ["right"]
    label_decision("wrong", None)
    assert_case(shadow_project, run, run_outcome="healthy", outcome="wrong", derived=False, turn_step=None)
    label_decision("wrong", 12)
    assert_case(shadow_project, run, run_outcome="turned", outcome="wrong", turn_step=12)
    label_decision("unknown", None)
    assert_case(shadow_project, run, run_outcome="undecided", outcome="unknown")


def test_each_attempt_has_a_case(shadow_project: ProjectFixture) -> None:
    """A resume ends the earlier attempt, whose case then stays as it is."""
    run = open_flagged_run(shadow_project, 0.5, 0.3, 0.2, 0.1)
    shadow_project.submit(run, Resumed(4), hours_later(6))
    assert_case(shadow_project, run, run_outcome="turned", outcome="right", ended_at=hours_later(6))
    assert find_case(shadow_project, run, attempt=2) is None
    shadow_project.post_observations(run, evals(1.0, 1.1, 1.2, 1.3, start=5), hours_later(7))
    finish_run(shadow_project, run, hours=8)
    assert_case(shadow_project, run, attempt=2, run_outcome="healthy", outcome="right", decision_id=None, gpu_hours=8.0)
    assert_case(shadow_project, run, run_outcome="turned", outcome="right")


@pytest.mark.parametrize("sign_of_life", ["heartbeat", "eval", "opening"])
def test_revived_run_has_no_case(shadow_project: ProjectFixture, sign_of_life: str) -> None:
    """A lost run that reports again, or is reopened, has not ended and loses its case."""
    run = open_flagged_run(shadow_project, 0.5)
    revive_by: dict[str, Callable[[], object]] = {
        "heartbeat": lambda: open_run.record_heartbeat(
            shadow_project.database, shadow_project.id, run.id, hours_later(400)
        ),
        "eval": lambda: shadow_project.post_observations(run, evals(0.4, start=20), hours_later(400)),
        "opening": lambda: shadow_project.open_run(run.name, resume=open_run.Resume.ALLOW),
    }
    for hours in (100, 200, 300):
        stale_runs.check_due_runs(shadow_project.database, hours_later(hours))
    assert shadow_project.load_run(run).status == "lost"
    assert_case(shadow_project, run, run_outcome="undecided")
    revive_by[sign_of_life]()
    assert shadow_project.load_run(run).status == "running"
    assert find_case(shadow_project, run) is None


def test_case_is_recomputed_from_stored_rows(shadow_project: ProjectFixture) -> None:
    """A run that ended before cases existed gets the same case from its rows."""
    run = open_flagged_run(shadow_project, 0.9, 1.0, 1.1, 1.2)
    finish_run(shadow_project, run)
    before = find_case(shadow_project, run)
    with shadow_project.database.transaction() as tx:
        tx.execute(tables.cases.delete())
        cases.recompute_case(tx, shadow_project.load_run(run), 1)
    recomputed = find_case(shadow_project, run)
    assert before is not None
    assert recomputed is not None
    assert recomputed == before | {"revision": recomputed["revision"]}


@pytest.mark.parametrize(("label", "gpus"), [("8", 8.0), ("0.5", 0.5), ("0", None), ("-1", None), ("nan", None)])
def test_gpus_are_read_from_a_label(label: str, gpus: float | None) -> None:
    """The label must be a positive finite number; otherwise the count is unknown."""
    assert read_gpus({"gpus": label}) == gpus


def test_unknown_kind_of_evidence_keeps_its_detector(shadow_project: ProjectFixture) -> None:
    """After a downgrade, a decision with unknown evidence still has a case that names its detectors."""
    run = open_flagged_run(shadow_project)
    with shadow_project.database.transaction() as tx:
        decided = tx.execute(sa.select(tables.decisions.c.verdict).filter_by(run_id=run.id)).scalar_one()
        unknown_evidence = tuple(replace(evidence, kind="yet_to_be_invented") for evidence in decided.evidence)
        changed = (
            sa.update(tables.decisions)
            .filter_by(run_id=run.id)
            .values(verdict=replace(decided, evidence=unknown_evidence))
        )
        tx.execute(changed)
    finish_run(shadow_project, run)
    assert_case(shadow_project, run, detectors=["k_decline"])
