"""Commands of people and receivers on decisions, and how a run ends.

Commands of people are also in the audit log. Commands are idempotent. Each locks the run before its decision.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from msgspec import structs

from evalstop_service.clock import Clock
from evalstop_service.decisions import guards, transitions
from evalstop_service.domain.decision_commands import Postponed, Released, StopOrdered, Undone, Vetoed
from evalstop_service.domain.decision_events import Reported, RunEnded, RunObeyed
from evalstop_service.domain.decision_lifecycle import (
    AWAITING_CONFIRMATION,
    SERVICE,
    STOPPED,
    STOPPING,
    Action,
    DecisionState,
    Exploit,
)
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.statuses import UNENDED, DecisionOutcome, RunStatus
from evalstop_service.errors import Conflict, Invalid
from evalstop_service.evaluation import cases, change_point
from evalstop_service.store import audit, decisions, hand_overs, projects, run_details, runs
from evalstop_service.store.cases import Outcome, add_outcome
from evalstop_service.store.database import Database, Transaction, read_now
from evalstop_service.store.decisions import Decision
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import events

log = logging.getLogger(__name__)

OVER = STOPPED | {DecisionState.FAILED, DecisionState.MOOT, DecisionState.UNDONE}
"""States in which a stop can no longer be requested."""

_ENDS = {RunStatus.COMPLETED: EventType.COMPLETED, RunStatus.FAILED: EventType.FAILED}

ACTIONS = {
    Vetoed: "decision.vetoed",
    Postponed: "decision.postponed",
    Released: "decision.released",
    Undone: "decision.undone",
}
"""The names of the commands in the audit log."""


def apply_command(
    database: Database, project_id: UUID, decision_id: UUID, command: Vetoed | Released | Undone
) -> Decision:
    """Veto, release or undo a stop; raises Conflict if it was already requested, its project is paused, or it was never
    requested. The guards of a release are evaluated here."""
    with database.transaction() as tx:
        return carry_out_command(tx, project_id, decision_id, command)


def carry_out_command(
    tx: Transaction, project_id: UUID, decision_id: UUID, command: Vetoed | Postponed | Released | Undone
) -> Decision:
    """Like `apply_command`, within a transaction."""
    decision, run, project = decisions.lock_with_run(tx, project_id, decision_id)
    if isinstance(command, Released):
        project = projects.lock_project(tx, project_id)
        command = replace(command, guards=guards.find_guards(tx, project, run, command.at, decision))
    if isinstance(command, Undone):
        command = replace(command, heard_at=run.heard_at)
    moved = transitions.move_decision(tx, run, decision, command, project)
    if moved != decision:
        unpark_run(tx, run, moved, command.at)
        subject, details = f"decision {decision.id}", {"run": run.name, "reason": command.reason}
        action = ACTIONS[type(command)]
        audit.record_action(tx, project_id, command.actor, action, subject, details, command.at)
    return moved


def order_run_stop(tx: Transaction, project_id: UUID, run_id: UUID, command: StopOrdered) -> Decision:
    """Stop a run at once on a person's order; raises Conflict when it has ended, or its stop is in progress.

    1. If the run continues although its stop was carried out, undone or moot, begin a new attempt: receivers ignore a
       decision that they have seen before.
    2. Create the decision, or move the policy's one to `requested`.
    3. Raise the version of the run, so that processes with the run in their cache load the decision.
    4. Write the audit log.
    """
    run = runs.lock_run(tx, project_id, run_id)
    if run.status not in UNENDED:
        raise Conflict(f"the run {run.name!r} has ended: it is {run.status}")
    before = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if before is not None and before.state in OVER:
        run = transitions.begin_attempt(tx, run, command.at)
    decision = transitions.order_stop(tx, run, command)
    runs.save_run(tx, structs.replace(run, version=run.version + 1, updated_at=command.at))
    subject, details = f"decision {decision.id}", {"run": run.name, "reason": command.reason}
    audit.record_action(tx, project_id, command.actor, "run.stop_ordered", subject, details, command.at)
    return decision


def record_report(database: Database, project_id: UUID, decision_id: UUID, report: Reported) -> Decision:
    """Record a receiver's report; raises Conflict if the decision's state does not allow it.

    1. A confirmation ends the run, if it is still in the attempt that was to be stopped. A run whose job is parked
       becomes parked, even if its trainer reported a failure at its end.
    2. Move the decision; its event contains the change point of the ended run.
    3. Record the case of the attempt, now that run and decision are final.
    4. Write the audit log.
    """
    with database.transaction() as tx:
        decision, run, project = decisions.lock_with_run(tx, project_id, decision_id)
        confirms = report.state == DecisionState.CONFIRMED
        open_before = decision.state not in STOPPED and decision.state != DecisionState.UNDONE
        ends_run = confirms and open_before and run.attempt == decision.attempt
        if decision.action is Action.EXPLOIT and (confirms or report.state == DecisionState.PARKED):
            raise Conflict("the run copies another; its trainer confirms that by POST /runs/{run_id}/exploited")
        if ends_run:
            run = _save_end(tx, run, RunStatus.STOPPED, report.at, run.ended_at)
            if run.turn:
                report = replace(report, details=report.details | {"turn_step": run.turn.step})
        moved = transitions.move_decision(tx, run, decision, report, project)
        if ends_run:
            cases.record_case(tx, run, report.at)
        if moved.state == DecisionState.PARKED != decision.state and run.attempt == decision.attempt:
            park = {"status": RunStatus.PARKED, "ended_at": None, "turn": None}
            run = structs.replace(run, version=run.version + 1, updated_at=report.at, **park)
            runs.save_run(tx, run)
            cases.record_case(tx, run, report.at)
        if moved.state != decision.state:
            subject, details = f"decision {decision.id}", {"run": run.name, "state": report.state}
            audit.record_action(tx, project_id, report.actor, "decision.reported", subject, details, report.at)
        return moved


def tell_trainer(database: Database, clock: Clock, decision: Decision | None) -> bool:
    """Whether an answer tells the trainer to stop. The first one hands the stop over: it cannot be vetoed any more.

    False while this cannot be recorded: a later answer tells it.
    """
    if decision is None or not decision.stops or decision.handed_over_at is not None:
        return decision is not None and decision.should_stop
    return _hand_over(database, clock, decision)


def _hand_over(database: Database, clock: Clock, decision: Decision) -> bool:
    try:
        with database.transaction() as tx:
            key = (decision.run_id, decision.id)
            return bool(hand_overs.hand_over(tx, {key: hand_overs.TRAINER}, read_now(tx, clock)))
    except sa.exc.DBAPIError as error:
        log.warning("decision %s: the trainer is not told yet: %s", decision.id, error)
        return False


def tell_trainer_of(database: Database, clock: Clock, run: Run) -> bool:
    """Like `tell_trainer`, with the decision on the run's attempt."""
    with database.reading() as tx:
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    return tell_trainer(database, clock, decision)


def offer_exploit(database: Database, clock: Clock, run: Run) -> Exploit | None:
    """The copy that an answer asks the trainer to make. The first one hands it over, as `tell_trainer` does a stop.

    A run that is to stop is not asked to copy: the attempt that the copy begins would not be stopped.
    """
    if run.exploit is None:
        return None
    with database.reading() as tx:
        decision = decisions.load_decision(tx, run.project_id, run.exploit.decision_id)
        ending = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if decision.state not in AWAITING_CONFIRMATION or (ending is not None and ending.state in STOPPING):
        return None
    is_told = decision.handed_over_at is not None or _hand_over(database, clock, decision)
    return decision.exploit if is_told else None


def label_decision(database: Database, project_id: UUID, decision_id: UUID, label: Outcome) -> Decision:
    """Record whether a decision was right; a later label replaces it. Raises Invalid for a contradiction."""
    with database.transaction() as tx:
        decision, run, _ = decisions.lock_with_run(tx, project_id, decision_id)
        details = {"run": run.name} | _record_label(tx, run, decision.attempt, decision, label)
        subject = f"decision {decision.id}"
        audit.record_action(tx, project_id, label.actor, "decision.labeled", subject, details, label.at)
        return decision


def label_run(database: Database, project_id: UUID, run_id: UUID, label: Outcome) -> Run:
    """Record whether it was right to let a run continue, or to stop it if its present attempt has a decision."""
    with database.transaction() as tx:
        run = runs.lock_run(tx, project_id, run_id)
        decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
        decision = None if decision is not None and decision.group is not None else decision
        details = _record_label(tx, run, run.attempt, decision, label)
        audit.record_action(tx, project_id, label.actor, "run.labeled", f"run {run.name}", details, label.at)
        return run


def _record_label(tx: Transaction, run: Run, attempt: int, decision: Decision | None, label: Outcome) -> dict[str, Any]:
    step = label.turn_step
    if decision is not None and decision.group is not None:
        raise Conflict("the rule of a group decided, which says nothing about a turn of the run: label the run instead")
    if label.outcome == DecisionOutcome.RIGHT and step is not None:
        if decision is None:
            raise Invalid("letting a run continue was right if it did not turn: omit turn_step, or label it wrong")
        if step > decision.step:
            raise Invalid(
                f"a stop is right at or after the turn, but this one was decided at step {decision.step}, "
                f"before {step}: label it wrong, or give another turn_step"
            )
    add_outcome(tx, run.id, attempt, label)
    cases.recompute_case(tx, run, attempt)
    return {"outcome": label.outcome, "turn_step": step, "note": label.note}


def finish_run(
    database: Database,
    project_id: UUID,
    run_id: UUID,
    status: str,
    now: datetime,
    *,
    obeyed: UUID | None = None,
    actor: str = SERVICE,
) -> Run:
    """Record that a trainer ended its run; a stopped run stays stopped.

    `obeyed`: the decision for which it ended the run; `actor`: the key of the report.
    """
    with database.transaction() as tx:
        run = runs.lock_run(tx, project_id, run_id)
        if run.status not in UNENDED:
            return run
        ended = end_run(tx, run, status, now, obeyed=obeyed, actor=actor)
        details = {"id": str(run.id), "status": ended.status, "obeyed": None if obeyed is None else str(obeyed)}
        audit.record_action(tx, project_id, actor, "run.finished", f"run {run.name}", details, now)
        if ended.status in _ENDS:
            events.announce_run_event(tx, _ENDS[ended.status], projects.get_project(tx, project_id), ended, now)
        return ended


def end_run(
    tx: Transaction, run: Run, status: str, now: datetime, *, obeyed: UUID | None = None, actor: str = SERVICE
) -> Run:
    """End a run, which is locked and was not stopped: its trainer reported its end, or it is lost.

    1. A run that its trainer ended because of a requested stop is stopped, and its decision obeyed.
    2. Save the run with its change point in hindsight.
    3. Otherwise its decision becomes moot, unless a receiver may have the stop: then only the scheduler can confirm the
       end.
    4. Record the case of the attempt.
    """
    followed = transitions.list_followed(tx, run)
    is_obeyed = any(decision.id == obeyed and decision.stops for decision in followed)
    run = _save_end(tx, run, RunStatus.STOPPED if is_obeyed else RunStatus(status), now)
    for decision in followed:
        event: RunObeyed | RunEnded = RunObeyed(now, actor)
        if not is_obeyed or not decision.stops:
            event = RunEnded(now, status, outbox.read_stop_reach(tx, run.id, decision.id).addressed)
        transitions.move_decision(tx, run, decisions.lock_decision(tx, run.id, decision.id), event)
    cases.record_case(tx, run, now)
    return run


def unpark_run(tx: Transaction, run: Run, decision: Decision, now: datetime) -> Run:
    """The run, set running if its decision no longer parks it: its case is deleted, and its liveness checked."""
    is_taken_back = decision.state == DecisionState.UNDONE and decision.attempt == run.attempt
    if run.status != RunStatus.PARKED or not is_taken_back:
        return run
    run = structs.replace(run, version=run.version + 1, updated_at=now, status=RunStatus.RUNNING)
    runs.save_run(tx, run)
    cases.remove_case(tx, run)
    run_details.start_checks(tx, run.id, run.project_id, now, now)
    return run


def _save_end(tx: Transaction, run: Run, status: RunStatus, now: datetime, already_at: datetime | None = None) -> Run:
    """Save the end of a run; `already_at`: when it had ended before its scheduler confirmed it."""
    turn = change_point.load_change_point(tx, run) if run.pruned_at is None else run.turn
    ended = {"status": status, "ended_at": already_at or now, "turn": turn}
    run = structs.replace(run, version=run.version + 1, updated_at=now, **ended)
    runs.save_run(tx, run)
    return run
