"""The rollout stage of a policy: shadow ──> canary ──> enforce, as its measured precision allows, and back.

Each step up is proposed by the service and confirmed by an admin; steps down are automatic.

A policy may move up one stage when two lower bounds reach the required precision: that of all cases of its current
version, and that of the cases that ended since it reached its stage, so that each stage is earned by cases of that
stage. Only cases of real runs count (`domain.project_settings`), a limited number for each key and day. Undecided
cases count as wrong. All cases of a version, whatever the stage, form one confidence sequence: a policy whose precision
is below the requirement is ever moved up in at most a share alpha of all histories, however often it is reviewed and
however often it falls back.

A policy falls back to shadow when the requirement no longer holds: when the cases since it reached its stage refute
it (their upper bound, with undecided cases as right, is below), or when the measured precision itself, not only its
bound, is below. Between a lower bound above the requirement and a value below it lies half an interval, and a policy
that fell back needs new cases to move up: stages do not oscillate.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any
from uuid import UUID

import msgspec
from evalstop_detectors.wording import format_percent

from evalstop_service.background import PeriodicJob, Wait, handle_each
from evalstop_service.clock import Clock
from evalstop_service.domain.confidence_sequences import Estimate, StageNumbers, Stratum, estimate_precision
from evalstop_service.domain.decision_lifecycle import SERVICE
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.statuses import ProposalKind, ProposalState, Stage
from evalstop_service.errors import Conflict
from evalstop_service.evaluation import figures
from evalstop_service.store import audit, policies, projects, proposals, rollout_stages, runs
from evalstop_service.store.audit import Author
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.rollout_stages import RolloutStage
from evalstop_service.webhooks import events

log = logging.getLogger(__name__)

EVERY_SECONDS = 60.0

PROPOSED_AGAIN_AFTER = timedelta(days=7)
"""A refused proposal is not repeated sooner."""

_MOST_FORECAST = 100_000
"""The most further cases that a forecast counts."""


@dataclass(frozen=True)
class Move:
    """The stage that a policy moves to, and why."""

    stage: Stage
    reason: str


@dataclass(frozen=True)
class StageCases:
    """The precision of a policy by the cases that count: of its version, and of those since it reached its stage.

    `counted` stops of the version count, `not_counted` do not.
    """

    of_version: Estimate
    since: Estimate
    counted: int
    not_counted: int

    def count_missing(self, required: float) -> int | None:
        """The number of further cases, as often right as those so far, until both lower bounds reach the requirement.

        None: however many there are, they do not, because too many are wrong or undecided.
        """
        precisions = (self.of_version, self.since)
        known = [(item.decided + item.undecided, (item.value or 0.0) * item.decided) for item in precisions]
        share = known[0][1] / max(1, known[0][0])

        def find_low(more: int) -> float:
            strata = [Stratum(right + more * share, cases - right + more * (1 - share)) for cases, right in known]
            return min(estimate_precision([stratum]).low for stratum in strata)

        missing = bisect_left(range(_MOST_FORECAST), required, key=find_low) if share > required else _MOST_FORECAST
        return missing if missing < _MOST_FORECAST else None


class StageTerms(msgspec.Struct, frozen=True):
    """What a policy has to show for a higher stage, and the share of its stops that is carried out in canary."""

    required_precision: float
    canary_share: float


_NEXT = {Stage.SHADOW: Stage.CANARY, Stage.CANARY: Stage.ENFORCE}


def get_enforced_share(stage: RolloutStage | None, version: int) -> float:
    """The share of the stops of this version of a policy to carry out, in runs whose mode is enforce."""
    if stage is None:
        return 1.0
    if stage.version != version:
        return 0.0
    return {Stage.SHADOW: 0.0, Stage.CANARY: stage.canary_share, Stage.ENFORCE: 1.0}[stage.stage]


def choose_move(stage: Stage, required: float, of_version: Estimate, since: Estimate) -> Move | None:
    """The move of a policy by the precision of its version and of its cases since it reached its stage; None: it stays.

    1. Falling back comes first: a policy that no longer meets the requirement must not stay because of its long
       history.
    2. Moving up takes both lower bounds, so neither an old success nor a short lucky stretch is enough.
    """
    needed = f"{format_percent(required, 1)} are required"
    if stage is not Stage.SHADOW:
        if since.bounds.high < required:
            most = format_percent(since.bounds.high, 1)
            return Move(Stage.SHADOW, f"at most {most} of its stops were right since it became {stage}, and {needed}")
        if of_version.value is not None and of_version.value < required:
            return Move(Stage.SHADOW, f"{format_percent(of_version.value, 1)} of its stops were right, and {needed}")
    least = min(of_version.bounds.low, since.bounds.low)
    if stage in _NEXT and least >= required:
        return Move(_NEXT[stage], f"at least {format_percent(least, 1)} of its stops were right, and {needed}")
    return None


def load_stage_cases(tx: Transaction, stage: RolloutStage) -> StageCases:
    """The precision of the policy version that earns the stage."""
    needed = projects.get_project(tx, stage.project_id)
    of_version = CaseFilter(policy=stage.policy_name, version=stage.version)
    counted, not_counted = rollout_stages.count_towards_stage(tx, stage.project_id, of_version, needed)
    since, _ = rollout_stages.count_towards_stage(tx, stage.project_id, replace(of_version, since=stage.since), needed)
    return StageCases(
        figures.compute_total(counted).precision,
        figures.compute_total(since).precision,
        sum(count.cases for count in counted),
        not_counted,
    )


def create_job(database: Database, clock: Clock) -> PeriodicJob:
    """The periodic job that reviews all policies with a rollout stage."""

    def review(pause: Wait) -> None:
        with database.reading() as tx:
            stages = [(stage.project_id, stage.policy_name) for stage in rollout_stages.list_stages(tx)]
        handle_each(
            takewhile(lambda _: not pause(0.0), stages), lambda stage: review_rollout_stage(database, *stage, clock())
        )

    return PeriodicJob("rollout stages", review, EVERY_SECONDS)


def review_rollout_stage(database: Database, project_id: UUID, policy_name: str, now: datetime) -> RolloutStage | None:
    """Review a policy's stage by its cases; returns the stage. Idempotent.

    1. A new version of the policy starts in shadow: the cases of another version say nothing about it.
    2. Estimate the precision over all cases of the version, and over those since it reached its stage.
    3. Propose the next stage, fall back to shadow, or withdraw a proposal that no longer holds.
    """
    with database.transaction() as tx:
        current = rollout_stages.lock_stage(tx, project_id, policy_name)
        latest = policies.find_policy(tx, project_id, policy_name)
        if current is None or latest is None:
            return current
        if current.version != latest.version:
            moved = replace(current, stage=Stage.SHADOW, version=latest.version, since=now, numbers=StageNumbers())
            _withdraw_proposal(tx, current, now)
            return _save_move(tx, current, moved, f"version {latest.version} has no cases yet", SERVICE, now)
        moved, reason = _find_move(tx, current, now)
        if moved.stage is _NEXT.get(current.stage):
            _propose_move(tx, current, moved, reason, now)
            return current
        _withdraw_proposal(tx, current, now)
        return current if moved is current else _save_move(tx, current, moved, reason, SERVICE, now)


def raise_stage(tx: Transaction, author: Author, policy_name: str, target: Stage) -> RolloutStage:
    """Move a policy up to the proposed stage; raises Conflict when its cases no longer allow it."""
    current = rollout_stages.lock_stage(tx, author.project_id, policy_name)
    if current is not None:
        moved, reason = _find_move(tx, current, author.at)
        if moved.stage is target and target is _NEXT.get(current.stage):
            return _save_move(tx, current, moved, reason, author.actor, author.at)
    raise Conflict(f"the cases of policy {policy_name} no longer allow the stage {target}")


def lower_stage(tx: Transaction, author: Author, policy_name: str, reason: str) -> RolloutStage:
    """Move a policy back to shadow on a person's order; raises Conflict if it has no higher stage."""
    current = rollout_stages.lock_stage(tx, author.project_id, policy_name)
    if current is None or current.stage is Stage.SHADOW:
        raise Conflict(f"policy {policy_name} has no stage above shadow")
    _withdraw_proposal(tx, current, author.at)
    moved = replace(current, stage=Stage.SHADOW, since=author.at, numbers=StageNumbers())
    return _save_move(tx, current, moved, reason, author.actor, author.at)


def remove_rollout_stage(tx: Transaction, author: Author, policy_name: str) -> None:
    """Delete a policy's rollout stage, so that only its runs' mode counts, and withdraw its proposals. Idempotent."""
    current = rollout_stages.lock_stage(tx, author.project_id, policy_name)
    if current is not None:
        rollout_stages.delete_stage(tx, author.project_id, policy_name)
        _withdraw_proposal(tx, current, author.at)
        author.record(tx, "rollout_stage.removed", f"policy {policy_name}", {})


def set_rollout_stage(
    tx: Transaction, project_id: UUID, policy_name: str, version: int, terms: StageTerms, now: datetime
) -> RolloutStage:
    """Give a policy a rollout stage, starting in shadow, or change the terms of an existing one."""
    projects.lock_project(tx, project_id)
    stage = rollout_stages.lock_stage(tx, project_id, policy_name)
    if stage is None:
        begun: dict[str, Any] = {"stage": Stage.SHADOW, "since": now, "numbers": StageNumbers(), "version": version}
        stage = RolloutStage(project_id, policy_name, **begun, **msgspec.structs.asdict(terms))
    else:
        stage = replace(stage, **msgspec.structs.asdict(terms))
    rollout_stages.save_stage(tx, stage)
    return stage


def describe_widening(stage: RolloutStage, terms: StageTerms) -> str:
    """The terms that a change eases, so that it permits more stops; empty: none."""
    widened = []
    if terms.required_precision < stage.required_precision:
        widened.append(f"required_precision = {format_percent(terms.required_precision, 1)}")
    if terms.canary_share > stage.canary_share:
        widened.append(f"canary_share = {format_percent(terms.canary_share, 1)}")
    return ", ".join(widened)


def _find_move(tx: Transaction, current: RolloutStage, now: datetime) -> tuple[RolloutStage, str]:
    """The stage that the cases allow, and why; the current stage if no move is due."""
    stage_cases = load_stage_cases(tx, current)
    move = choose_move(current.stage, current.required_precision, stage_cases.of_version, stage_cases.since)
    if move is None:
        return current, ""
    numbers = StageNumbers(stage_cases.of_version, stage_cases.since)
    return replace(current, stage=move.stage, since=now, numbers=numbers), move.reason


def _propose_move(tx: Transaction, before: RolloutStage, moved: RolloutStage, reason: str, now: datetime) -> None:
    """Propose a step up once: not while the proposal is open, nor soon after it was refused."""
    newest = proposals.find_newest(tx, before.project_id, ProposalKind.RAISE_STAGE, before.policy_name)
    if newest is not None and newest.argument == moved.stage:
        refused_at = newest.closed_at if newest.state is ProposalState.REFUSED else None
        if newest.is_open(now) or (refused_at is not None and now < refused_at + PROPOSED_AGAIN_AFTER):
            return
    _withdraw_proposal(tx, before, now)
    proposal = Proposal(
        new_id(),
        before.project_id,
        ProposalKind.RAISE_STAGE,
        before.policy_name,
        f"Move policy {moved.policy_name} version {moved.version} from {before.stage} to {moved.stage}",
        moved.stage,
        reason,
        SERVICE,
        (),
        ProposalState.OPEN,
        now,
    )
    proposals.add_proposal(tx, proposal)
    _announce_move(tx, EventType.ROLLOUT_STAGE_PROPOSED, before, moved, reason, now)
    log.warning("policy %s may move from %s to %s: %s", moved.policy_name, before.stage, moved.stage, reason)


def _withdraw_proposal(tx: Transaction, current: RolloutStage, now: datetime) -> None:
    """Withdraw the open proposal for a policy, which no longer holds."""
    newest = proposals.find_newest(tx, current.project_id, ProposalKind.RAISE_STAGE, current.policy_name)
    if newest is not None and newest.is_open(now):
        proposals.close_proposal(tx, newest, ProposalState.WITHDRAWN, now)


def _save_move(
    tx: Transaction, before: RolloutStage, moved: RolloutStage, reason: str, actor: str, now: datetime
) -> RolloutStage:
    rollout_stages.save_stage(tx, moved)
    if moved.stage != before.stage:
        numbers = _announce_move(tx, EventType.ROLLOUT_STAGE_CHANGED, before, moved, reason, now)
        subject = f"policy {moved.policy_name}"
        audit.record_action(tx, moved.project_id, actor, "rollout_stage.moved", subject, numbers, now)
        log.warning("policy %s: %s -> %s: %s", moved.policy_name, before.stage, moved.stage, reason)
    return moved


def _announce_move(
    tx: Transaction, event_type: EventType, before: RolloutStage, moved: RolloutStage, reason: str, now: datetime
) -> dict[str, object]:
    """Announce a move that was made or is proposed; returns its numbers."""
    project = projects.get_project(tx, before.project_id)
    numbers = {
        "from": before.stage,
        "to": moved.stage,
        "reason": reason,
        "required_precision": moved.required_precision,
        "canary_share": moved.canary_share,
        **{name: item for name, item in msgspec.to_builtins(moved.numbers).items() if item is not None},
    }
    fields = {
        "project": project,
        "policy": {"name": moved.policy_name, "version": moved.version},
        "rollout_stage": numbers,
    }
    # Events belong to a run: this one to the newest run of the policy.
    run = runs.find_newest_run(tx, project.id, before.policy_name)
    if run is not None:
        events.announce_event(tx, event_type, project.id, run.id, fields, now)
    return numbers
