"""Creates decisions and moves them to their next state: load, apply the event, write. Closes attempts likewise.

Only this module turns the instructions of the life cycle into rows. Callers hold the lock of the run. Locks are
taken in one order, run before decision before project, so that transactions cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from msgspec import structs

from evalstop_service.decisions import group_rules, guards
from evalstop_service.domain.confidence_sequences import CARRIED_OUT, HELD_OUT, draw_number, observed_probability
from evalstop_service.domain.decision_commands import Postponed, StopOrdered
from evalstop_service.domain.decision_events import (
    Event,
    GuardsChecked,
    RunResumed,
    StopDecided,
    apply_event,
    is_allowed,
)
from evalstop_service.domain.decision_lifecycle import (
    OPEN_EXPLOIT,
    STOPPING,
    Action,
    Announce,
    Cancel,
    DecisionState,
    Instruction,
    Mode,
    Record,
    Refuse,
    Timeouts,
)
from evalstop_service.domain.event_types import PENDING_EVENTS, REQUEST_EVENTS
from evalstop_service.domain.run import Call, Verdict
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import cases, rollout_stage
from evalstop_service.projects import policies
from evalstop_service.store import decisions, projects, rollout_stages, runs
from evalstop_service.store.cases import delete_case
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import events


def create_decision(
    tx: Transaction, run: Run, step: int, now: datetime, ruled: Decision | None = None, *, enforces: bool = False
) -> Decision:
    """Record the stop verdict of a run, or what the rule of its group calls for, as a decision, and carry it out as far
    as permitted. `ruled`: that decision as it begins; `enforces`: the mode of the rule.

    1. Draw whether the rollout stage of the policy enforces this stop, and whether it is held out. Each draw depends
       only on the project's seed and the decision's id, so that anybody can repeat it. A rule has no rollout stage.
    2. Only a stop that would be carried out is checked against the guards, under the lock of the project: of two
       concurrent stops the second counts the first.
    3. Store the probability with which the run continues; evaluation weighs the case by it.
    4. Write the decision, its history and its events.
    """
    begun, project = ruled, projects.get_project(tx, run.project_id)
    if begun is None:
        action = Action(policies.read_policy(tx, run.policy_id).action)
        begun = replace(begin_decision(run, new_id(), now, step, run.verdict), action=action)
    enforced_share = 0.0
    may_enforce = run.mode is Mode.ENFORCE and project.max_mode is Mode.ENFORCE
    if may_enforce and ruled is not None:
        enforced_share = 1.0 if enforces else 0.0
    elif may_enforce:
        stage = rollout_stages.find_stage(tx, run.project_id, run.policy_name)
        enforced_share = rollout_stage.get_enforced_share(stage, run.policy_version)
    enforcement_draw = draw_number(project.seed, begun.id, CARRIED_OUT)
    hold_out_draw = draw_number(project.seed, begun.id, HELD_OUT)
    enforced, held_out = enforcement_draw < enforced_share, hold_out_draw < project.held_out_share
    if not may_enforce or (ruled is not None and not enforced):
        draw = {}
    elif enforced:
        draw = {"held_out_share": project.held_out_share, "drawn": hold_out_draw}
    else:
        draw = {"enforced_share": enforced_share, "drawn": enforcement_draw}
    begun = replace(begun, observed_probability=observed_probability(enforced_share, project.held_out_share))
    event = StopDecided(
        now,
        actor=f"policy {run.policy_name} version {run.policy_version}" if ruled is None else f"group {begun.group}",
        reason=begun.verdict.reason,
        mode=Mode.ENFORCE if enforced else Mode.SHADOW,
        guards=guards.find_guards(tx, projects.lock_project(tx, project.id), run, now, begun)
        if enforced and not held_out
        else (),
        held_out=held_out,
        draw=draw,
        action=begun.action,
    )
    return _insert_decision(tx, project, run, begun, event)


def order_stop(tx: Transaction, run: Run, command: StopOrdered) -> Decision:
    """Stop a run, which is locked, on a person's order; raises Conflict when it cannot be stopped.

    If the policy has not called for a stop, the decision has the person's reason and no evidence.
    """
    project = projects.lock_project(tx, run.project_id)
    event = replace(command, paused=bool(guards.find_pause(project)))
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if decision is not None:
        return move_decision(tx, run, decisions.lock_decision(tx, run.id, decision.id), event, project)
    step = run.last_step or 0
    verdict = Verdict(Call.STOP, step, None, f"{command.actor}: {command.reason}")
    return _insert_decision(tx, project, run, begin_decision(run, new_id(), command.at, step, verdict), event)


def begin_decision(run: Run, decision_id: UUID, now: datetime, step: int, verdict: Verdict) -> Decision:
    """A decision on a run that is not stored and has not begun its life cycle."""
    return Decision(
        id=decision_id,
        run_id=run.id,
        project_id=run.project_id,
        attempt=run.attempt,
        state=DecisionState.SHADOW,
        step=step,
        verdict=verdict,
        best_checkpoint=run.best_checkpoint,
        policy_id=run.policy_id,
        due_at=now,
        created_at=now,
        run_name=run.name,
        policy_name=run.policy_name,
        policy_version=run.policy_version,
        observed_probability=0.0,
    )


def _insert_decision(
    tx: Transaction, project: Project, run: Run, begun: Decision, event: StopDecided | StopOrdered
) -> Decision:
    decision, instructions = apply_event(begun, event, choose_timeouts(project))
    _raise_refusal(instructions)
    decisions.add_decision(tx, decision)
    _save_exploit(tx, run, decision)
    _carry_out(tx, project, run, decision, instructions, event.at)
    return decision


def move_decision(
    tx: Transaction, run: Run, decision: Decision, event: Event, project: Project | None = None
) -> Decision:
    """Apply an event to a decision that was locked after its run. Raises Conflict when the state does not allow it.

    `project`: the run's, if this transaction has read it.

    1. Apply the event to the state that the lock protects.
    2. Compare and set the state and the hand-over, so that of a veto and a claim exactly one wins.
    3. Write history and events in the same transaction: no state without its event, no event without its state.
    4. Recompute the case if the attempt is over, because cases depend on the state.
    """
    project = project or projects.get_project(tx, run.project_id)
    before = _load_history(tx, decision, event)
    moved, instructions = apply_event(before, event, choose_timeouts(project))
    _raise_refusal(instructions)
    if moved != decision and not decisions.update_decision(tx, decision, moved):
        raise Conflict(f"the decision {decision.id} was changed concurrently; reload it and try again")
    _save_exploit(tx, run, moved)
    _carry_out(tx, project, run, moved, instructions, event.at)
    if run.ended_at is not None or run.attempt != decision.attempt:
        cases.recompute_case(tx, run, decision.attempt)
    return moved


def recheck_guards(tx: Transaction, run: Run, decision: Decision, now: datetime) -> Decision:
    """Recheck the guards of a stop on hold; the decision was locked after its run.

    It stays on hold while its project allows no stops: `max_mode` may have been lowered since.
    """
    if decision.state != DecisionState.ON_HOLD:
        return decision
    project = projects.lock_project(tx, run.project_id)
    found, of_group = guards.find_guards(tx, project, run, now, decision), decision.group is not None
    allowed = may_stop(project, run, decision)
    # While a guard holds it, the rule of a group is not asked: that takes the evals of all its runs, under locks.
    ends = of_group and allowed and not found and not still_calls(tx, project, run, decision)
    withdrawn = "the rule of the group no longer calls for it" if ends else None
    checked = GuardsChecked(now, found, allowed and (of_group or run.verdict.stops), withdrawn)
    return move_decision(tx, run, decision, checked, project)


def may_stop(project: Project, run: Run, decision: Decision) -> bool:
    """Whether the attempt that a decision is about still runs, and its project allows stops."""
    is_current = run.status == RunStatus.RUNNING and run.attempt == decision.attempt
    return is_current and project.max_mode is Mode.ENFORCE


def still_calls(tx: Transaction, project: Project, run: Run, decision: Decision) -> bool:
    """Whether what decided, the policy or the rule of the run's group, still calls for it."""
    return run.verdict.stops if decision.group is None else group_rules.still_calls(tx, project, decision)


def _save_exploit(tx: Transaction, run: Run, decision: Decision) -> None:
    """Have the run's row hold its open copy, so that its posts need not look for one."""
    if decision.action is Action.EXPLOIT:
        is_open = decision.state in OPEN_EXPLOIT
        runs.raise_version(tx, run.id, exploit=decision.exploit if is_open else None)


def _raise_refusal(instructions: Sequence[Instruction]) -> None:
    for instruction in instructions:
        if isinstance(instruction, Refuse):
            raise Conflict(instruction.why)


def _carry_out(
    tx: Transaction, project: Project, run: Run, decision: Decision, instructions: Sequence[Instruction], now: datetime
) -> None:
    hours_left = None
    if any(isinstance(instruction, Announce) for instruction in instructions):
        hours_left = cases.estimate_hours_left(tx, run, decision)
    for instruction in instructions:
        match instruction:
            case Record():
                decisions.add_change(tx, decision.run_id, decision.id, instruction, now)
            case Cancel(why):
                outbox.cancel_stop(tx, run.id, decision.id, now, why)
            case Announce(event_type, data):
                data = data | {"gpu_hours_left": hours_left}
                if event_type in REQUEST_EVENTS:
                    data = data | {"job": _describe_job(tx, run, decision)}
                if decision.exploit is not None:
                    data["exploit"] = decision.exploit
                if event_type in PENDING_EVENTS:
                    data["act_from_messages"] = project.act_from_messages
                events.announce_run_event(tx, event_type, project, run, now, decision=decision, **data)


def _describe_job(tx: Transaction, run: Run, decision: Decision) -> dict[str, object]:
    """What a receiver may end: the job, or the part of it that the run names while others go on."""
    spared = [other for other in runs.list_spared_runs(tx, run, decision.action) if not other.waits]
    part = runs.find_own_part(run, decision.action)
    ends = part.kind if spared and part is not None else "job"
    return {"ends": ends, "other_runs": [other.name for other in spared[: guards.SHOWN_RUNS]]}


def list_allowed(tx: Transaction, decision: Decision, events: Iterable[Event]) -> list[Event]:
    """Those of these events that would change a decision."""
    listed = list(events)
    lifecycle = _load_history(tx, decision, *listed)
    return [event for event in listed if is_allowed(lifecycle, event)]


def _load_history(tx: Transaction, decision: Decision, *events: Event) -> Decision:
    """The decision with the part of its history that these events depend on."""
    if not any(isinstance(event, Postponed) for event in events):
        return decision
    was_postponed = False  # in the present veto window
    for change in decisions.list_changes(tx, decision):
        is_pending = change.state is DecisionState.PENDING
        was_postponed = is_pending and (was_postponed or "postponed_until" in change.details)
    return replace(decision, was_postponed=was_postponed)


def choose_timeouts(project: Project) -> Timeouts:
    return Timeouts(project.veto_window_seconds, project.confirm_seconds, project.stop_hours)


CLOSES_ATTEMPT = STOPPING | {DecisionState.MOOT}
"""States in which the stop of an attempt was or never will be sent: a run that continues could no longer be stopped.
Decisions that follow their run are not included."""


def list_followed(tx: Transaction, run: Run) -> list[Decision]:
    """The decisions that change with the run: the one to end its attempt, and its open copy."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    copy = None if run.exploit is None else decisions.load_decision(tx, run.project_id, run.exploit.decision_id)
    return [item for item in (decision, copy) if item is not None]


def leave_attempt(tx: Transaction, run: Run, step: int, now: datetime) -> None:
    """Cancel the undelivered stop of a run's current attempt, and record its case; the run is locked."""
    for decision in list_followed(tx, run):  # what was not delivered must not apply to the attempt that begins now
        tried = outbox.read_stop_reach(tx, run.id, decision.id).tried
        locked = decisions.lock_decision(tx, run.id, decision.id)
        move_decision(tx, run, locked, RunResumed(now, step, tried))
    if run.ended_at is None:
        cases.record_case(tx, run, now)


def carry_decision(tx: Transaction, run: Run) -> Decision | None:
    """Detach a decision that follows the run from the previous attempt; None: the run begins without one."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt - 1)
    if decision is None or not decision.follows_run:
        return None
    delete_case(tx, run.id, decision.attempt)
    return decisions.carry_to_attempt(tx, decision, run.attempt)


def begin_attempt(tx: Transaction, run: Run, now: datetime) -> Run:
    """The run, which is locked, in a new attempt that continues from the same step: all its observations count.

    The caller saves its row, and raises its version.
    """
    step = run.last_step or 0
    leave_attempt(tx, run, step, now)
    runs.add_attempt(tx, run.id, run.attempt + 1, step, now)
    return structs.replace(run, attempt=run.attempt + 1, updated_at=now, exploit=None)


def continue_lost_run(tx: Transaction, run: Run, now: datetime) -> Run:
    """A lost run, which is locked, as it continues: in a new attempt if its stop was moot since it was lost.

    The caller saves its row, whose version was raised.
    """
    delete_case(tx, run.id, run.attempt)
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if decision is None or decision.state is not DecisionState.MOOT:
        return run
    return begin_attempt(tx, run, now)


def is_spent(tx: Transaction, run: Run) -> bool:
    """Whether the stop of the run's current attempt was sent, or can no longer be."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    return decision is not None and decision.state in CLOSES_ATTEMPT and not decision.follows_run
