"""The rule of a group has a run copy a better one: its trainer is asked, confirms, and no job is ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from evalstop_service.clock import utc_now
from evalstop_service.decisions import deadlines, group_rules, holds, message_links, pause, sweeps
from evalstop_service.decisions.message_links import Choice
from evalstop_service.domain.decision_commands import StopOrdered, Undone, Vetoed
from evalstop_service.domain.decision_lifecycle import Action, DecisionState, Mode
from evalstop_service.domain.run import RunDescription
from evalstop_service.errors import Conflict, NotFound
from evalstop_service.ingest import Exploited, Resumed
from evalstop_service.store import cases, endpoints, groups, tables
from evalstop_service.store.database import Database
from evalstop_service.store.endpoints import UNENCRYPTED
from evalstop_service.web.pages.formatting import describe_run
from evalstop_service.webhooks import links

from tests.conftest import ClonePostgres
from tests.service.concurrency import run_concurrently
from tests.service.decisions.grouped_runs import (
    CURVES,
    GROUP,
    MEDIAN,
    PBT,
    compare,
    extend_run,
    list_decisions,
    list_names,
    offer,
    open_group,
    set_up,
)
from tests.service.event_check import check_events
from tests.service.project_fixture import ProjectFixture


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


def test_people_can_veto_a_copy_from_a_message(database: Database) -> None:
    """The message and its page say what is copied until when; the link vetoes it."""
    project = set_up(database, PBT, window_seconds=600.0)
    with database.transaction() as tx:
        url, types = "https://chat.example/secret-path", ["run.exploit_pending"]
        chat = endpoints.add_endpoint(tx, project.id, url=url, event_types=types, format="slack", now=project.now)
    run = open_group(project)["worst"]
    compare(project)
    (delivery,) = project.load_rows(tables.deliveries, run)
    act_url = links.locate_act_page("https://evalstop.example", delivery["id"], chat.secret)
    assert act_url is not None
    link = (delivery["id"], act_url.rpartition("/")[2])
    opened = message_links.act(database, UNENCRYPTED, *link, Choice.VETO, "Kim", utc_now())
    assert opened is not None
    (decision,) = list_decisions(project)
    assert decision.state is DecisionState.VETOED
    pending = replace(decision, state=DecisionState.PENDING)
    assert describe_run(run, pending, utc_now()).startswith("Copy pending: to go on from step 4 of best unless vetoed")


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
