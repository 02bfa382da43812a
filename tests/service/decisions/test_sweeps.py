"""The rule of a group stops the runs that lag, as far as modes, guards and people allow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands, deadlines, pause
from evalstop_service.domain.decision_commands import Released, Vetoed
from evalstop_service.domain.decision_lifecycle import Action, DecisionState, Mode
from evalstop_service.domain.run import RunDescription
from evalstop_service.domain.statuses import DecisionOutcome
from evalstop_service.errors import Conflict
from evalstop_service.store.cases import Outcome
from evalstop_service.store.database import Database

from tests.service.decisions.grouped_runs import (
    CURVES,
    GROUP,
    MEDIAN,
    compare,
    extend_run,
    list_decisions,
    list_names,
    open_alone,
    open_group,
    set_rule,
    set_up,
)
from tests.service.event_check import check_events
from tests.service.project_fixture import evals


def test_median_stops_the_run_that_lags_once(database: Database) -> None:
    """The decision has the rule's reason; a second round makes no other; the trainer is told to stop."""
    project = set_up(database)
    members = open_group(project)
    compare(project)
    compare(project)
    (decision,) = list_decisions(project)
    assert (decision.run_name, decision.state, decision.action) == ("worst", DecisionState.REQUESTED, Action.STOP)
    assert (decision.group, decision.step) == (GROUP, 5)
    assert "worse" in decision.verdict.reason
    assert commands.tell_trainer(database, utc_now, project.load_decision(members["worst"]))
    check_events(database)


def test_case_of_a_run_that_a_rule_stopped_says_nothing_about_its_policy(database: Database) -> None:
    """It is recorded as one without a decision, and its decision cannot be labeled."""
    project = set_up(database)
    run = open_group(project)["worst"]
    compare(project)
    decision = project.load_decision(run)
    project.record_report(decision, DecisionState.CONFIRMED, project.now)
    assert project.load_run(run).status == "stopped"
    assert project.load_case(run).decision_id is None
    label = Outcome(outcome=DecisionOutcome.WRONG, turn_step=None, note="", actor="dana", at=project.now)
    with pytest.raises(Conflict, match="label the run"):
        commands.label_decision(database, project.id, decision.id, label)


def test_rule_in_shadow_leaves_the_stop_of_the_policy_alone(database: Database) -> None:
    """What the rule only recorded is no decision of the attempt: the policy's later stop goes out."""
    project = set_up(database, MEDIAN | {"mode": "shadow"})
    run = open_group(project)["worst"]
    compare(project)
    project.post_observations(run, evals(0.06, start=6))
    compare(project)
    assert list_names(project) == [("worst", DecisionState.SHADOW)]
    assert project.find_decision(run) is None
    project.post_observations(run, evals(0.05, 0.04, 0.03, start=7))
    decision = project.load_decision(run)
    assert (decision.group, decision.state) == (None, DecisionState.REQUESTED)


def test_vetoed_stop_of_a_rule_is_not_repeated_and_leaves_the_policy_alone(database: Database) -> None:
    """The rule does not call again in this attempt; the policy still may."""
    project = set_up(database, window_seconds=60.0)
    run = open_group(project)["worst"]
    compare(project)
    decision = project.load_decision(run)
    assert project.apply_command(decision, Vetoed(utc_now(), "dana", "a slow start")) is DecisionState.VETOED
    project.post_observations(run, evals(0.06, start=6))
    compare(project)
    assert list_names(project) == [("worst", DecisionState.VETOED)]
    project.post_observations(run, evals(0.05, 0.04, 0.03, start=7))
    assert project.load_decision(run).state is DecisionState.PENDING


def test_paused_project_holds_a_stop_of_a_rule_until_it_is_resumed(database: Database) -> None:
    """On resuming the rule is asked again: the stop goes out, or ends if the run has caught up."""
    project = set_up(database)
    run = open_group(project)["worst"]
    pause.pause_project(database, project.id, "dana", "the eval is broken", project.now)
    compare(project)
    assert list_decisions(project)[0].guard_kinds == ["paused"]
    pause.resume_project(database, project.id, "dana", project.now)
    deadlines.process_overdue(database, utc_now() + timedelta(minutes=2))
    assert project.load_decision(run).state is DecisionState.REQUESTED


def test_stop_on_hold_ends_when_the_rule_no_longer_calls(database: Database) -> None:
    """The rule is asked once no guard holds the stop. A run that has caught up goes on, and may be called later."""
    project = set_up(database)
    run = open_group(project)["worst"]
    pause.pause_project(database, project.id, "dana", "the eval is broken", project.now)
    compare(project)
    project.post_observations(run, evals(0.9, start=6))
    deadlines.process_overdue(database, utc_now() + timedelta(minutes=2))
    assert list_names(project) == [("worst", DecisionState.ON_HOLD)]
    pause.resume_project(database, project.id, "dana", project.now)
    deadlines.process_overdue(database, utc_now() + timedelta(minutes=4))
    assert list_names(project) == [("worst", DecisionState.MOOT)]
    assert project.find_decision(run) is None


def test_stop_on_hold_waits_while_its_project_allows_no_stops(database: Database) -> None:
    """The rule still calls for it, so it neither ends nor goes out; once stops are allowed again, it goes out."""
    project = set_up(database)
    run = open_group(project)["worst"]
    pause.pause_project(database, project.id, "dana", "the eval is broken", project.now)
    compare(project)
    project.change_settings(max_mode=Mode.SHADOW)
    pause.resume_project(database, project.id, "dana", project.now)
    deadlines.process_overdue(database, utc_now() + timedelta(minutes=2))
    assert list_names(project) == [("worst", DecisionState.ON_HOLD)]
    project.change_settings(max_mode=Mode.ENFORCE)
    deadlines.process_overdue(database, utc_now() + timedelta(minutes=4))
    assert project.load_decision(run).state is DecisionState.REQUESTED


def test_rule_that_begins_to_enforce_stops_what_it_had_only_recorded(database: Database) -> None:
    """It need not wait for another attempt; where the project still allows no stops, nothing is recorded twice."""
    project = set_up(database, {**MEDIAN, "mode": "shadow"})
    open_group(project)
    compare(project)
    set_rule(project, MEDIAN)
    project.change_settings(max_mode=Mode.SHADOW)
    compare(project)
    assert list_names(project) == [("worst", DecisionState.SHADOW)]
    project.change_settings(max_mode=Mode.ENFORCE)
    compare(project)
    compare(project)
    assert list_names(project) == [("worst", DecisionState.SHADOW), ("worst", DecisionState.REQUESTED)]


def test_what_holds_a_rule_does_not_hold_the_policy(database: Database) -> None:
    """If the policy calls for the stop itself, the decision on hold ends and the policy's takes its place."""
    project = set_up(database)
    run = open_alone(project, "failed")
    compare(project)
    held = project.load_decision(run)
    assert (held.state, held.guard_kinds) == (DecisionState.ON_HOLD, ["group_last"])
    project.post_observations(run, evals(0.04, 0.03, 0.02, start=6))
    decision = project.load_decision(run)
    assert (decision.group, decision.state) == (None, DecisionState.REQUESTED)
    assert list_names(project) == [("worst", DecisionState.MOOT)]


def test_last_run_of_a_group_is_not_stopped(database: Database) -> None:
    """When all others have failed, the stop of the last is on hold; a person may release it."""
    project = set_up(database)
    worst = open_alone(project, "failed")
    compare(project)
    decision = project.load_decision(worst)
    assert (decision.state, "group_last" in decision.guard_kinds) == (DecisionState.ON_HOLD, True)
    assert project.apply_command(decision, Released(utc_now(), "dana", "all others are done")) == "requested"


def test_search_with_one_worker_stops_its_runs(database: Database) -> None:
    """The only live run is stopped when others have completed: runs that come one after the other are compared, too."""
    project = set_up(database)
    worst = open_alone(project, "completed")
    compare(project)
    assert project.load_decision(worst).state is DecisionState.REQUESTED


def test_rule_stops_its_share_at_once_but_always_one(database: Database) -> None:
    """Of two that lag the second waits until the first has ended."""
    project = set_up(database, MEDIAN | {"most_share": 0.1})
    worst = open_group(project)["worst"]
    worse = project.open_run("worse", mode=Mode.ENFORCE, description=RunDescription(group=GROUP))
    extend_run(project, worse, range(6), 0.02)
    compare(project)
    states = {run.name: project.load_decision(run).state for run in (worst, worse)}
    assert states == {"worst": DecisionState.REQUESTED, "worse": DecisionState.ON_HOLD}
    assert project.load_decision(worse).guard_kinds == ["group_share"]
    project.finish_run(worst, obeyed=project.load_decision(worst).id)
    deadlines.process_overdue(database, utc_now() + timedelta(minutes=2))
    assert project.load_decision(worse).state is DecisionState.REQUESTED


def test_run_in_shadow_bounds_the_rule(database: Database) -> None:
    """A rule that enforces only records its decision on a run whose own mode is shadow."""
    project = set_up(database)
    members = open_group(project, ("best", "good", "fair"))
    description = RunDescription(group=GROUP)
    run = project.open_run("worst", mode=Mode.SHADOW, description=description)
    extend_run(project, run, range(6), CURVES["worst"])
    compare(project)
    assert list_names(project) == [("worst", DecisionState.SHADOW)]
    assert project.find_decision(members["best"]) is None


def test_guessed_evals_are_not_compared(database: Database) -> None:
    """A run whose eval is a guess is never called."""
    project = set_up(database)
    open_group(project, ("best", "good", "fair"))
    description = RunDescription(group=GROUP)
    run = project.open_run("worst", mode=Mode.ENFORCE, description=description, recognise=True)
    guessed = [replace_metric(point) for point in evals(*[0.001 * step for step in range(6)])]
    project.post_observations(run, guessed)
    recognition = project.load_run(run).recognition
    assert recognition is not None
    assert recognition.guessed == ["eval_gsm8k"]
    compare(project)
    assert list_decisions(project) == []


def replace_metric(point: Any) -> Any:
    """The point as one of a metric whose role has to be guessed."""
    from msgspec.structs import replace as replace_fields

    return replace_fields(point, metric="eval_gsm8k")
