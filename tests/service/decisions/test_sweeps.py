"""The rule of a group stops the runs that lag, or has them copy a better one; people and guards are heard before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands, deadlines, group_rules, holds, pause, sweeps
from evalstop_service.domain.decision_lifecycle import (
    Action,
    DecisionState,
    Exploit,
    Mode,
    Released,
    StopOrdered,
    Undone,
    Vetoed,
)
from evalstop_service.domain.run import RunDescription
from evalstop_service.errors import Conflict, NotFound
from evalstop_service.ingest import CheckpointSaved, Exploited, Resumed
from evalstop_service.store import cases, decisions, groups
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.store.runs import Run

from tests.conftest import ClonePostgres
from tests.service.concurrency import run_concurrently
from tests.service.event_check import check_events
from tests.service.project_fixture import ProjectFixture, evals, set_up_project

GROUP = "sweep"
MEDIAN = {"kind": "median", "mode": "enforce", "fewest": 2, "sigmas": 0.0}
PBT = {
    "kind": "pbt",
    "mode": "enforce",
    "ready_steps": 4,
    "fewest": 2,
    "sigmas": 0.0,
    "hyperparameters": {"lr": {"factors": [2.0]}},
}
CURVES = {"best": 0.09, "good": 0.08, "fair": 0.07, "worst": 0.01}
"""The rise in a step of each run of a group."""


def set_up(database: Database, rule: dict[str, Any] = MEDIAN, window_seconds: float = 0.0) -> ProjectFixture:
    """A project without limits on stops, in which a group has this rule."""
    project = replace(set_up_project(database, veto_window_seconds=window_seconds), now=utc_now())
    project.change_settings(stops_share=None, stops_per_hour=None, held_out_share=0.0)
    set_rule(project, rule)
    return project


def set_rule(project: ProjectFixture, rule: dict[str, Any]) -> None:
    author = Author(project.id, "dana", project.now)
    with project.database.transaction() as tx:
        group_rules.set_rule(tx, author, GROUP, group_rules.parse_rule(rule), may_change=True)


def open_group(
    project: ProjectFixture, names: Sequence[str] = tuple(CURVES), steps: int = 6, **options: Any
) -> dict[str, Run]:
    """Runs of the group that rise at their own rate, each with a checkpoint at every second step."""
    members = {}
    for number, name in enumerate(names, 1):
        description = RunDescription(group=GROUP)
        params = {"lr": f"{number}e-6"}
        run = project.open_run(name, mode=Mode.ENFORCE, description=description, params=params, **options)
        extend_run(project, run, range(steps), CURVES[name])
        members[name] = run
    return members


def open_alone(project: ProjectFixture, others_ended: str) -> Run:
    """The worst run of a group whose other runs have ended."""
    members = open_group(project)
    for name in ("best", "good", "fair"):
        project.finish_run(members[name], others_ended)
    return members["worst"]


def extend_run(project: ProjectFixture, run: Run, steps: range, rate: float) -> None:
    project.post_observations(run, evals(*[rate * step for step in steps], start=steps[0]))
    for step in steps[::2]:
        project.submit(run, CheckpointSaved(step, f"file:///{run.name}/{step}"))


def compare(project: ProjectFixture) -> None:
    """One round of the periodic job."""
    sweeps.create_job(project.database, utc_now).do(lambda _: False)


def list_decisions(project: ProjectFixture) -> list[Decision]:
    """All decisions of the group's rule, oldest first."""
    with project.database.reading() as tx:
        return decisions.list_of_group(tx, project.id, GROUP, 100)[::-1]


def list_names(project: ProjectFixture) -> list[tuple[str, str]]:
    return [(decision.run_name, decision.state) for decision in list_decisions(project)]


def offer(project: ProjectFixture, run: Run) -> Exploit | None:
    """What an answer asks the trainer to copy."""
    return commands.offer_exploit(project.database, utc_now, project.load_run(run))


def test_median_stops_the_run_that_lags_once(database: Database) -> None:
    """The decision has the rule's reason; a second round makes no other; the trainer is told to stop."""
    project = set_up(database)
    members = open_group(project)
    compare(project)
    compare(project)
    (decision,) = list_decisions(project)
    assert (decision.run_name, decision.state, decision.action) == ("worst", DecisionState.REQUESTED, Action.STOP)
    assert (decision.group, decision.step) == (GROUP, 5)
    assert "below" in decision.verdict.reason
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
    label = commands.Label("wrong", None, "", "dana", project.now)  # type: ignore[arg-type]
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
    """A run that has caught up is let go on, and may be called again when it lags later."""
    project = set_up(database)
    run = open_group(project)["worst"]
    pause.pause_project(database, project.id, "dana", "the eval is broken", project.now)
    compare(project)
    project.post_observations(run, evals(0.9, start=6))
    pause.resume_project(database, project.id, "dana", project.now)
    deadlines.process_overdue(database, utc_now() + timedelta(minutes=2))
    assert list_names(project) == [("worst", DecisionState.MOOT)]
    assert project.find_decision(run) is None


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


def test_copy_is_handed_over_confirmed_and_begins_another_lineage(database: Database) -> None:
    """The answer names source, checkpoint and hyperparameters; after the confirmation earlier evals do not count."""
    project = set_up(database, PBT)
    members = open_group(project)
    compare(project)
    compare(project)
    (decision,) = list_decisions(project)
    run = members["worst"]
    assert (decision.state, decision.action, decision.step) == (DecisionState.REQUESTED, Action.EXPLOIT, 4)
    exploit = offer(project, run)
    assert exploit is not None
    assert (exploit.source_name, exploit.source_step, exploit.source_checkpoint) == ("best", 4, "file:///best/4")
    assert exploit.hyperparameters == {"lr": pytest.approx(2e-6)}
    assert project.find_decision(run) is None, "a copy is no stop"
    receipt = project.submit(run, Exploited(exploit.decision_id, "key t"))
    assert (receipt.run.attempt, receipt.run.last_step, receipt.run.exploit) == (2, 4, None)
    assert (receipt.run.eval_changes[0].step, receipt.run.eval_changes[0].reason) == (5, "copy of best at step 4")
    assert project.submit(run, Exploited(exploit.decision_id, "key t")).run.attempt == 2
    assert list_names(project) == [("worst", DecisionState.CONFIRMED)]
    with database.reading() as tx:
        group = groups.find_group(tx, project.id, GROUP)
        assert group is not None
        loaded = group_rules.load_members(tx, project.id, GROUP, group_rules.read_rule(group))
        assert cases.find_case(tx, run.id, 1) is not None
    member = next(item for item in loaded if item.run.id == run.id)
    assert (member.since, member.hyperparameters) == (4, exploit.hyperparameters)
    assert [copy.attempt for copy in member.descent] == [2]
    check_events(database)


def test_hyperparameters_that_are_no_finite_numbers_are_copied_as_they_are(database: Database) -> None:
    """JSON has neither NaN nor infinity: as texts they are not multiplied."""
    params = {"lr": "nan", "decay": "-Infinity", "optimizer": "adam"}
    project = set_up(database, PBT | {"hyperparameters": {name: {} for name in (*params, "missing")}})
    for name, rate in CURVES.items():
        description = RunDescription(group=GROUP)
        extend_run(
            project, project.open_run(name, mode=Mode.ENFORCE, description=description, params=params), range(6), rate
        )
    compare(project)
    (decision,) = list_decisions(project)
    assert decision.exploit is not None
    assert decision.exploit.hyperparameters == params


def test_veto_of_a_copy_is_heard_until_it_is_handed_over(database: Database) -> None:
    """After it the trainer is not asked, and its confirmation refused; after the hand-over the veto is refused."""
    project = set_up(database, PBT)
    members = open_group(project)
    run = members["worst"]
    compare(project)
    (decision,) = list_decisions(project)
    assert project.apply_command(decision, Vetoed(utc_now(), "dana", "let it be")) is DecisionState.VETOED
    assert offer(project, run) is None
    with pytest.raises(Conflict, match="vetoed"):
        project.submit(run, Exploited(decision.id, "key t"))
    compare(project)
    assert len(list_decisions(project)) == 1, "it is not called again at the same step"
    for name, member in members.items():
        extend_run(project, member, range(6, 10), CURVES[name])
    compare(project)
    later = list_decisions(project)[-1]
    assert (later.run_name, later.step) == ("worst", 8)
    assert offer(project, run) is not None
    with pytest.raises(Conflict, match="handed over to the trainer"):
        project.apply_command(later, Vetoed(utc_now(), "dana", "too late"))


def test_copy_waits_while_its_project_is_paused(database: Database) -> None:
    """A requested copy is on hold from the pause on; on resuming the rule is asked again, and the copy handed over."""
    project = set_up(database, PBT)
    run = open_group(project)["worst"]
    compare(project)
    pause.pause_project(database, project.id, "dana", "the eval is broken", project.now)
    assert offer(project, run) is None
    holds.withdraw_stops(database, utc_now())
    assert list_names(project) == [("worst", DecisionState.ON_HOLD)]
    pause.resume_project(database, project.id, "dana", project.now)
    deadlines.process_overdue(database, utc_now() + timedelta(minutes=2))
    assert list_names(project) == [("worst", DecisionState.REQUESTED)]
    assert offer(project, run) is not None


def test_run_is_asked_to_copy_though_others_run_in_its_job(database: Database) -> None:
    """A copy reaches its own run alone: it waits for no other run of the job, and hands over no other's stop."""
    project = set_up(database, PBT)
    members = open_group(project, labels={"slurm_job_id": "7"})
    compare(project)
    assert offer(project, members["worst"]) is not None


def test_trainer_that_dies_before_it_confirms_loses_nothing(database: Database) -> None:
    """It resumes from its own checkpoint: the copy is moot, its confirmation refused, and the rule calls again."""
    project = set_up(database, PBT)
    run = open_group(project)["worst"]
    compare(project)
    exploit = offer(project, run)
    assert exploit is not None
    resumed = project.submit(run, Resumed(5))
    assert (resumed.run.attempt, resumed.run.last_step, resumed.run.exploit) == (2, 5, None)
    assert list_names(project) == [("worst", DecisionState.MOOT)]
    with pytest.raises(Conflict, match="attempt 1"):
        project.submit(run, Exploited(exploit.decision_id, "key t"))
    compare(project)
    assert list_names(project)[1:] == [("worst", DecisionState.REQUESTED)]
    assert offer(project, run) is not None


def test_copy_that_nobody_confirms_is_asked_for_again_and_then_fails(database: Database) -> None:
    """It ends without any stop; a late confirmation in the same attempt is still accepted."""
    project = set_up(database, PBT)
    project.add_endpoint()
    run = open_group(project)["worst"]
    compare(project)
    exploit = offer(project, run)
    assert exploit is not None
    for days in (1, 2):
        deadlines.process_overdue(database, utc_now() + timedelta(days=days))
    assert project.load_decision_states(run) == ["requested", "escalated", "failed"]
    assert len(project.load_events(run, "run.exploit_requested")) == 2
    assert project.load_events(run, "run.stop_failed") == []
    assert project.load_run(run).exploit is None
    assert project.submit(run, Exploited(exploit.decision_id, "key t")).run.attempt == 2
    check_events(database)


def test_copy_that_was_undone_is_not_confirmed(database: Database) -> None:
    """A person takes it back though the trainer was asked: the run goes on as it is, and its job is left alone."""
    project = set_up(database, PBT)
    project.add_endpoint()
    run = open_group(project)["worst"]
    compare(project)
    exploit = offer(project, run)
    assert exploit is not None
    (decision,) = list_decisions(project)
    assert project.apply_command(decision, Undone(utc_now(), "dana", "let it be")) is DecisionState.UNDONE
    with pytest.raises(Conflict, match="undone"):
        project.submit(run, Exploited(exploit.decision_id, "key t"))
    assert (project.load_run(run).attempt, offer(project, run)) == (1, None)
    assert project.load_events(run, "run.resume_requested") == []


def test_late_confirmation_leaves_a_newer_copy_moot(database: Database) -> None:
    """The trainer has made the earlier one: the run is in a new attempt, of which the rule decides anew."""
    project = set_up(database, PBT)
    members = open_group(project)
    run = members["worst"]
    compare(project)
    exploit = offer(project, run)
    assert exploit is not None
    for days in (1, 2):
        deadlines.process_overdue(database, utc_now() + timedelta(days=days))
    for name, member in members.items():
        extend_run(project, member, range(6, 10), CURVES[name])
    compare(project)
    assert [state for _, state in list_names(project)] == ["failed", "requested"]
    assert project.submit(run, Exploited(exploit.decision_id, "key t")).run.attempt == 2
    assert [state for _, state in list_names(project)] == ["confirmed", "moot"]
    assert project.load_run(run).exploit is None


def test_report_of_a_receiver_does_not_end_a_run_that_is_to_copy_another(database: Database) -> None:
    """`confirmed` is refused: the job goes on, and only the trainer knows when the copy is made."""
    project = set_up(database, PBT)
    run = open_group(project)["worst"]
    compare(project)
    (decision,) = list_decisions(project)
    with pytest.raises(Conflict, match="exploited"):
        project.record_report(decision, DecisionState.CONFIRMED)
    assert project.load_run(run).status == "running"


def test_run_that_ends_is_not_asked_to_copy(database: Database) -> None:
    """Its open copy becomes moot with its end."""
    project = set_up(database, PBT)
    run = open_group(project)["worst"]
    compare(project)
    assert project.finish_run(run).status == "completed"
    assert list_names(project) == [("worst", DecisionState.MOOT)]
    assert project.load_run(run).exploit is None


@pytest.mark.parametrize("is_told", [False, True])
def test_run_that_is_to_stop_makes_no_copy(database: Database, is_told: bool) -> None:
    """Whichever the trainer was told first, the stop stands: a copy would begin an attempt that nobody stops."""
    project = set_up(database, PBT)
    run = open_group(project)["worst"]
    compare(project)
    (decision,) = list_decisions(project)
    if is_told:
        assert offer(project, run) is not None
    stop = project.order_stop(run, StopOrdered(utc_now(), "dana", "the reward is broken"))
    assert offer(project, run) is None
    with pytest.raises(Conflict):
        project.submit(run, Exploited(decision.id, "key t"))
    assert project.load_decision(run) == stop
    project.finish_run(run, "completed", obeyed=stop.id)
    assert [state for _, state in list_names(project)] == [DecisionState.MOOT]


def test_unknown_copy_is_not_found(database: Database) -> None:
    """A stop, or the copy of another run, cannot be confirmed as a copy."""
    project = set_up(database, PBT)
    members = open_group(project)
    compare(project)
    (decision,) = list_decisions(project)
    with pytest.raises(NotFound):
        project.submit(members["best"], Exploited(decision.id, "key t"))


def test_two_processes_make_one_decision_and_runs_that_would_copy_each_other_end_with_one_source(
    clone_postgres: ClonePostgres,
) -> None:
    """Each process has compared the runs before the other decided; the locks of both runs let one decision through."""
    processes = [Database(clone_postgres())]
    processes.append(Database(processes[0].url.render_as_string(hide_password=False)))
    project = set_up(processes[0], PBT)
    members = open_group(project)
    with processes[0].reading() as tx:
        group = groups.list_groups(tx, project.id)[0]
        loaded = group_rules.load_members(tx, project.id, GROUP, group_rules.read_rule(group))
        (call,) = group_rules.judge_members(group_rules.read_rule(group), project_row(project), GROUP, loaded)
    assert call.source is not None
    back = replace_source(call, str(members["worst"].id), str(members["best"].id))
    attempts = {member.run.id: 1 for member in loaded}

    def decide(process: Database, made: Any) -> None:
        with process.transaction() as tx:
            rule = group_rules.read_rule(group)
            sweeps.decide_call(tx, group, rule, made, attempts, utc_now())

    failures = run_concurrently(
        lambda: decide(processes[0], call), lambda: decide(processes[1], back), lambda: decide(processes[1], call)
    )
    assert failures == []
    (decision,) = list_decisions(project)
    assert decision.exploit is not None
    assert {decision.run_id, decision.exploit.source_run} == {members["worst"].id, members["best"].id}
    for process in processes:
        process.close()


@pytest.mark.parametrize("rule", [MEDIAN, PBT], ids=["median", "pbt"])
def test_replicas_that_compare_at_once_make_one_decision(clone_postgres: ClonePostgres, rule: dict[str, Any]) -> None:
    """Two processes run the periodic job at the same time, several times."""
    processes = [Database(clone_postgres())]
    processes.append(Database(processes[0].url.render_as_string(hide_password=False)))
    project = set_up(processes[0], rule)
    open_group(project)
    jobs = [sweeps.create_job(process, utc_now) for process in processes]
    assert run_concurrently(*(lambda job=job: [job.do(lambda _: False) for _ in range(3)] for job in jobs)) == []
    assert list_names(project) == [("worst", DecisionState.REQUESTED)]
    for process in processes:
        process.close()


def project_row(project: ProjectFixture) -> Any:
    from evalstop_service.store import projects

    with project.database.reading() as tx:
        return projects.get_project(tx, project.id)


def replace_source(call: Any, source: str, member: str) -> Any:
    """The call by which the member copies the source instead."""
    from msgspec.structs import replace as replace_fields

    return replace_fields(call, member=member, source=replace_fields(call.source, source_run=source))
