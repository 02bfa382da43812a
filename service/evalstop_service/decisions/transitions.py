"""Moves decisions on: load, step, write. The one place where the instructions of their life become rows.

Whoever calls this has locked the run. The run comes first, then its decision, then the project, so that no two
transactions can wait for each other in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

from evalstop_service.decisions import guards
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import cases, rollout_stage
from evalstop_service.rules import decision_lifecycle, random_assignment
from evalstop_service.rules.decision_lifecycle import (
    DecisionState,
    Event,
    Guard,
    GuardsChecked,
    GuardsRaised,
    Instruction,
    Lifecycle,
    Mode,
    StopDecided,
    StopOrdered,
    Timeouts,
)
from evalstop_service.store import decisions, projects, rollout_stages, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import events


def create_decision(tx: Transaction, run: Run, step: int, now: datetime) -> Decision:
    """Put the run's verdict on record as a decision, and have it carried out as mode, chance and guards allow."""
    decision_id, project = new_id(), projects.get_project(tx, run.project_id)
    enforced_share = _share_enforced(tx, run) if run.mode == Mode.ENFORCE else 0.0
    earned = random_assignment.draw_number(project.seed, decision_id, random_assignment.CARRIED_OUT)
    kept = random_assignment.draw_number(project.seed, decision_id, random_assignment.HELD_OUT)
    enforced, held_out = earned < enforced_share, kept < project.held_out_share
    event = StopDecided(
        now,
        actor=f"policy {run.policy_name} version {run.policy_version}",
        reason=str(run.verdict["reason"]),
        mode=Mode.ENFORCE if enforced else Mode.SHADOW,
        guards=guards.find_guards(tx, projects.lock_project(tx, project.id), run, now)
        if enforced and not held_out
        else (),
        held_out=held_out,
        chance=_numbers(run, enforced, (enforced_share, earned), (project.held_out_share, kept)),
    )
    observed = random_assignment.observed_probability(enforced_share, project.held_out_share)
    return _born(tx, project, run, decision_id, event, step, run.verdict, observed)


def order_stop(tx: Transaction, run: Run, actor: str, reason: str, now: datetime) -> Decision:
    """Have a run, which is locked, stopped because a person wants it; raises Conflict when it cannot be.

    Where its policy had called for no stop the decision is the person's alone: it has a reason and no evidence.
    """
    project = projects.lock_project(tx, run.project_id)
    event = StopOrdered(now, actor, reason, paused=bool(guards.find_pause(project)))
    found = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if found is not None:
        return move_decision(tx, run, decisions.lock_decision(tx, found), event)
    step = run.last_step or 0
    verdict = {"verdict": "stop", "step": step, "turn_step": None, "reason": f"{actor}: {reason}", "evidence": []}
    return _born(tx, project, run, new_id(), event, step, verdict, 0.0)


def _born(
    tx: Transaction,
    project: Project,
    run: Run,
    decision_id: UUID,
    event: StopDecided | StopOrdered,
    step: int,
    verdict: dict[str, Any],
    observed_probability: float,
) -> Decision:
    life, instructions = decision_lifecycle.start_lifecycle(event, _terms(project))
    decision = Decision(
        id=decision_id,
        run_id=run.id,
        project_id=run.project_id,
        attempt=run.attempt,
        state=life.state,
        step=step,
        verdict=verdict,
        best_checkpoint=run.best_checkpoint,
        policy_id=run.policy_id,
        due_at=life.due_at,
        created_at=event.at,
        run_name=run.name,
        policy_name=run.policy_name,
        policy_version=run.policy_version,
        deadline_at=life.deadline_at,
        escalations=life.escalations,
        observed_probability=observed_probability,
    )
    refused = next((one for one in instructions if isinstance(one, decision_lifecycle.Refuse)), None)
    if refused is not None:
        raise Conflict(refused.why)
    decisions.add_decision(tx, decision)
    _carry_out(tx, project, run, decision, instructions, event.at)
    return decision


def move_decision(tx: Transaction, run: Run, decision: Decision, event: Event) -> Decision:
    """Let an event befall a decision that was locked after its run. Raises Conflict when it cannot follow."""
    project = projects.get_project(tx, run.project_id)
    before = _life(tx, decision)
    life, instructions = decision_lifecycle.apply_event(before, event, _terms(project))
    moved = replace(
        decision,
        state=life.state,
        due_at=life.due_at,
        deadline_at=life.deadline_at,
        escalations=life.escalations,
    )
    if moved != decision and not decisions.update_decision(tx, decision, life):
        raise Conflict(f"the decision {decision.id} was changed by another at the same time; read it and try again")
    _carry_out(tx, project, run, moved, instructions, event.at)
    if run.ended_at is not None or run.attempt != decision.attempt:
        cases.recompute_case(tx, run, decision.attempt)
    return moved


def recheck_guards(tx: Transaction, run: Run, decision: Decision, now: datetime) -> Decision:
    """Look whether the guards still hold back a stop that is on hold; the decision was locked after its run."""
    if decision.state != DecisionState.ON_HOLD:
        return decision
    project = projects.lock_project(tx, run.project_id)
    wanted = run.verdict["verdict"] == "stop" and run.status == "running" and run.attempt == decision.attempt
    return move_decision(tx, run, decision, GuardsChecked(now, guards.find_guards(tx, project, run, now), wanted))


def hold_stop(tx: Transaction, run: Run, held_by: Sequence[Guard], now: datetime) -> Decision | None:
    """Withhold the pending stop of a run, which is locked, for what has come up; None when none is pending.

    What waits to be sent is cancelled, `run.stop_on_hold` tells of the guards. A stop whose veto window is over has
    been requested, and is not called back.
    """
    found = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    if found is None or found.state != DecisionState.PENDING or not held_by:
        return None
    moved = move_decision(tx, run, decisions.lock_decision(tx, found), GuardsRaised(now, tuple(held_by)))
    return moved if moved.state == DecisionState.ON_HOLD else None


def hold_pending_stops(database: Database, project_id: UUID, held_by: Sequence[Guard], now: datetime) -> int:
    """Withhold all pending stops of a project, a transaction each; how many.

    To be called after the commit of what speaks against them: a stop that is decided from then on finds it by itself.
    """
    with database.reading() as tx:
        pending = decisions.list_pending_runs(tx, project_id)
    count = 0
    for run_id in pending:
        with database.transaction() as tx:
            run = runs.lock_run(tx, project_id, run_id)
            count += run is not None and hold_stop(tx, run, held_by, now) is not None
    return count


def _share_enforced(tx: Transaction, run: Run) -> float:
    """Of the stops of a run's policy the share that is carried out, by what it has earned."""
    return rollout_stage.share_enforced(
        rollout_stages.find_stage(tx, run.project_id, run.policy_name), run.policy_version
    )


def _numbers(run: Run, enforced: bool, earned: tuple[float, float], held_out: tuple[float, float]) -> dict[str, Any]:
    """By which share and which number drawn a stop that its run's mode would have had carried out is let run."""
    if run.mode != Mode.ENFORCE:
        return {}
    name, (share, drawn) = ("held_out_share", held_out) if enforced else ("enforced_share", earned)
    return {name: share, "drawn": drawn}


def _carry_out(
    tx: Transaction, project: Project, run: Run, decision: Decision, instructions: Sequence[Instruction], now: datetime
) -> None:
    for instruction in instructions:
        match instruction:
            case decision_lifecycle.Refuse(why):
                raise Conflict(why)
            case decision_lifecycle.Record():
                decisions.add_change(tx, decision, instruction, now)
            case decision_lifecycle.Cancel(why):
                outbox.cancel_stop(tx, run.id, decision.id, now, why)
            case decision_lifecycle.Announce(event_type, data, due_at):
                told = replace(decision, state=DecisionState.REQUESTED) if due_at is not None else decision
                events.announce_run_event(tx, event_type, project, run, now, decision=told, due_at=due_at, **data)


def _life(tx: Transaction, decision: Decision) -> Lifecycle:
    life = decision.life
    if life.state not in (DecisionState.ON_HOLD, DecisionState.UNDONE):
        return life
    history = [(change.state, change.details) for change in decisions.list_changes(tx, decision)]
    held_by, heard = decision_lifecycle.read_history(history)
    return replace(life, held_by=held_by, heard=heard)


def _terms(project: Project) -> Timeouts:
    return Timeouts(project.veto_window_seconds, project.confirm_seconds)
