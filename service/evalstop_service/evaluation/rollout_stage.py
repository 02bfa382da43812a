"""The rollout stage that a policy earns: shadow ──> canary ──> enforce, as its measured precision allows, and back.

Up, a stage at a time, when two lower bounds pass the operator's line: that of all cases of the policy's present
version, and that of the cases that ended since it came to its stage, so that each stage is earned by what was seen
there. Undecided cases count as wrong. All cases of a version, whatever the stages, make one confidence sequence: a
policy whose precision lies below the line is ever let up in a share of alpha of all histories at most, however often
it is looked at and however often it falls back.

Back to shadow, all the way, when the line no longer holds: when the cases since it came to its stage alone refute it
(their upper bound, undecided cases counted as right, lies below), or when the measured precision itself, not only its
bound, has fallen below. Between a lower bound above the line and a value below it lies half an interval, and whoever
fell back has to pass with new cases: a policy does not flutter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.clock import Clock
from evalstop_service.evaluation.figures import estimate_to_json, load_figures
from evalstop_service.rules.confidence_sequences import Estimate
from evalstop_service.rules.decision_lifecycle import SERVICE
from evalstop_service.rules.event_types import EventType
from evalstop_service.rules.statuses import Stage
from evalstop_service.store import audit, policies, projects, rollout_stages
from evalstop_service.store.case_counts import CaseFilter
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.webhooks import events

log = logging.getLogger(__name__)

EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class Move:
    """To which stage a policy moves, and why."""

    stage: Stage
    reason: str


_NEXT = {Stage.SHADOW: Stage.CANARY, Stage.CANARY: Stage.ENFORCE}


def share_enforced(held: RolloutStage | None, version: int) -> float:
    """Of the stops that this version of a policy calls for in runs that are enforced, the share to carry out."""
    if held is None:
        return 1.0
    if held.version != version:
        return 0.0
    return {Stage.SHADOW: 0.0, Stage.CANARY: held.canary_share, Stage.ENFORCE: 1.0}[Stage(held.stage)]


def choose_move(stage: Stage, line: float, of_version: Estimate, since: Estimate) -> Move | None:
    """Where a policy moves to by the precision of its version, and of its cases since it came to its stage."""
    if stage is not Stage.SHADOW:
        if since.bounds[1] < line:
            seen = f"{since.bounds[1]:.1%} at most were right since it became {stage}"
            return Move(Stage.SHADOW, f"{seen}, and {line:.1%} are wanted")
        if of_version.value is not None and of_version.value < line:
            return Move(Stage.SHADOW, f"{of_version.value:.1%} of its stops were right, and {line:.1%} are wanted")
    if stage in _NEXT and min(of_version.bounds[0], since.bounds[0]) >= line:
        least = min(of_version.bounds[0], since.bounds[0])
        return Move(_NEXT[stage], f"at least {least:.1%} of its stops were right, and {line:.1%} are wanted")
    return None


def create_job(database: Database, clock: Clock) -> PeriodicJob:
    """Weighing all policies that have to earn their rollout stage."""

    def do(pause: Wait) -> float:
        with database.reading() as tx:
            found = rollout_stages.list_stages(tx)
        for held in found:
            if pause(0.0):
                break
            review_rollout_stage(database, held.project_id, held.policy_name, clock())
        return EVERY_SECONDS

    return PeriodicJob("rollout_stage", do)


def review_rollout_stage(database: Database, project_id: UUID, policy_name: str, now: datetime) -> RolloutStage | None:
    """Weigh a policy by all that is known now, and have it move; how it stands then. Doing it twice is harmless."""
    with database.transaction() as tx:
        held = rollout_stages.lock_stage(tx, project_id, policy_name)
        latest = policies.find_policy(tx, project_id, policy_name)
        if held is None or latest is None:
            return held
        if held.version != latest.version:
            moved = replace(held, stage=Stage.SHADOW, version=latest.version, since=now, numbers={})
            return _keep(tx, held, moved, f"version {latest.version} has shown nothing yet", now)
        wanted = CaseFilter(policy=policy_name, version=held.version)
        of_version = _precision(tx, project_id, wanted)
        since = _precision(tx, project_id, replace(wanted, since=held.since))
        move = choose_move(Stage(held.stage), held.required_precision, of_version, since)
        if move is None:
            return held
        numbers = {"precision": estimate_to_json(of_version), "precision_since": estimate_to_json(since)}
        return _keep(tx, held, replace(held, stage=move.stage, since=now, numbers=numbers), move.reason, now)


def set_rollout_stage(
    tx: Transaction, project_id: UUID, policy_name: str, version: int, line: float, share: float, now: datetime
) -> RolloutStage:
    """Have a policy earn its rollout stage from now on, from shadow; or change the terms of one that does."""
    projects.lock_project(tx, project_id)
    held = rollout_stages.lock_stage(tx, project_id, policy_name)
    if held is None:
        held = RolloutStage(
            project_id=project_id,
            policy_name=policy_name,
            stage=Stage.SHADOW,
            required_precision=line,
            canary_share=share,
            since=now,
            numbers={},
            version=version,
        )
    changed = replace(held, required_precision=line, canary_share=share)
    rollout_stages.save_stage(tx, changed)
    return changed


def _precision(tx: Transaction, project_id: UUID, wanted: CaseFilter) -> Estimate:
    (found,) = load_figures(tx, project_id, wanted)
    return found.precision


def _keep(tx: Transaction, held: RolloutStage, moved: RolloutStage, reason: str, now: datetime) -> RolloutStage:
    rollout_stages.save_stage(tx, moved)
    run_id = rollout_stages.find_newest_run(tx, held.project_id, held.policy_name)
    if moved.stage == held.stage or run_id is None:
        return moved
    project = projects.get_project(tx, held.project_id)
    numbers = {
        "from": held.stage,
        "to": moved.stage,
        "reason": reason,
        "required_precision": moved.required_precision,
        "canary_share": moved.canary_share,
        **moved.numbers,
    }
    fields = {
        "project": project,
        "policy": {"name": moved.policy_name, "version": moved.version},
        "rollout_stage": numbers,
    }
    # Events are kept by run: this one by the newest that the policy looks after.
    events.announce_event(tx, EventType.ROLLOUT_STAGE_CHANGED, project.id, run_id, fields, now)
    audit.record_action(tx, project.id, SERVICE, "rollout_stage.moved", f"policy {moved.policy_name}", numbers, now)
    log.warning("policy %s of %s: %s -> %s: %s", moved.policy_name, project.name, held.stage, moved.stage, reason)
    return moved
