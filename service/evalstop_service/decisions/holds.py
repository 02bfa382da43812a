"""Holds stops that are to go out and that nobody was handed, and carries out those of a job together.

| what holds a stop | it is then |
|---|---|
| a guard: a pause, a stale run, other live runs of its job | on hold |
| the hours of its project, or a run that entered its job after the request | pending |
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from evalstop_service.background import handle_each
from evalstop_service.decisions import guards, transitions
from evalstop_service.domain.decision_events import GuardsChecked, GuardsRaised, WindowReopened, explain_hours
from evalstop_service.domain.decision_lifecycle import DecisionState, Guard, GuardKind
from evalstop_service.store import decisions, hand_overs, projects, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.hand_overs import UnsentStop
from evalstop_service.store.runs import Run


def release_job(database: Database, project_id: UUID, run_id: UUID, now: datetime) -> None:
    """Carry out the stops of all runs of a job, if each waits for nothing but the others.

    All of them begin their veto windows at the same time, so that none is sent while another can still be vetoed.
    """
    with database.transaction() as tx:
        run = runs.load_run(tx, project_id, run_id)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        others = [] if decision is None else runs.list_endangered_runs(tx, run, decision.action)
        if not others or not all(other.waits for other in others):
            return
        run_ids = {run.id, *(other.id for other in others)}
        # In ascending order, as everybody locks several runs.
        locked = [runs.lock_run(tx, project_id, locked_id) for locked_id in sorted(run_ids)]
        held = []
        for locked_run in locked:
            decision = decisions.find_decision_of_attempt(tx, locked_run.id, locked_run.attempt)
            if decision is None:
                return
            held.append((locked_run, decisions.lock_decision(tx, locked_run.id, decision.id)))
        project = projects.lock_project(tx, project_id)
        for locked_run, decision in held:
            others = runs.list_endangered_runs(tx, locked_run, decision.action)
            found = guards.find_guards(tx, project, locked_run, now, decision)
            if (
                decision.state is not DecisionState.ON_HOLD
                or not transitions.may_stop(project, locked_run, decision)
                or not transitions.still_calls(tx, project, locked_run, decision)
                or any(guard.kind is not GuardKind.SHARED_JOB for guard in found)
                or not run_ids >= {other.id for other in others}
            ):
                return
        for locked_run, decision in held:
            transitions.move_decision(tx, locked_run, decision, GuardsChecked(now, (), verdict_stops=True), project)


def find_shared_job(tx: Transaction, run: Run, decision: Decision) -> tuple[Guard, ...]:
    """The guard of the other live runs in a stop's job, except those that a person overrode by releasing the stop."""
    return guards.raise_shared_job(hand_overs.list_endangered(tx, run, decision))


def withdraw_stops(database: Database, now: datetime, project_id: UUID | None = None) -> None:
    """Have the stops that nobody was handed, all or those of a project, wait for what holds them, each in its own
    transaction."""

    def withdraw(stop: UnsentStop) -> None:
        with database.transaction() as tx:
            run = runs.lock_run(tx, stop.project_id, stop.run_id)
            withdraw_stop(tx, run, decisions.lock_decision(tx, run.id, stop.id), now)

    with database.reading() as tx:
        held = hand_overs.list_held(tx, now)
    handle_each([stop for stop in held if project_id in (None, stop.project_id)], withdraw)


def withdraw_stop(tx: Transaction, run: Run, decision: Decision, now: datetime) -> None:
    """Have a stop that nobody was handed wait for what holds it; its run and the decision are locked."""
    project = projects.lock_project(tx, run.project_id)
    opening = transitions.choose_timeouts(project).find_opening(now)
    if raised := (*guards.find_pause(project), *find_shared_job(tx, run, decision)):
        transitions.move_decision(tx, run, decision, GuardsRaised(now, raised), project)
    elif decision.is_requested and opening > now:
        transitions.move_decision(tx, run, decision, WindowReopened(now, opening, explain_hours(opening)), project)
    elif decision.is_requested and hand_overs.has_grown(tx, run, decision):
        reason = "another run entered the job after the stop was requested"
        transitions.move_decision(tx, run, decision, WindowReopened(now, now, reason), project)
