"""Decides by the rules of groups: a job compares the runs of each group, and makes a decision for each call.

Any number of processes may do this concurrently, since their calls are the same. Each decision is made under the locks
of the runs that it is about, in the order of their ids, and only if nothing was decided in the meantime.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import UUID

from evalstop_detectors import GroupCall, GroupRule

from evalstop_service.background import PeriodicJob, Wait, handle_each
from evalstop_service.clock import Clock
from evalstop_service.decisions import group_rules, transitions
from evalstop_service.decisions.group_rules import KnownScores
from evalstop_service.domain.decision_lifecycle import OBSERVED, Action, DecisionState, Exploit, Mode
from evalstop_service.domain.run import Call, Verdict
from evalstop_service.domain.statuses import RunStatus
from evalstop_service.store import decisions, groups, projects, runs
from evalstop_service.store.database import Database, Transaction, read_now
from evalstop_service.store.decisions import Decision
from evalstop_service.store.groups import Group
from evalstop_service.store.ids import new_id
from evalstop_service.store.projects import Project
from evalstop_service.store.runs import Run

log = logging.getLogger(__name__)

EVERY_SECONDS, IDLE_SECONDS = 2.0, 5.0
"""The time between two comparisons, and without a group to compare."""


def create_job(database: Database, clock: Clock) -> PeriodicJob:
    """The periodic job that compares the runs of all groups that have a rule and a running run."""
    known: defaultdict[tuple[UUID, str], _Compared] = defaultdict(_Compared)

    def compare(pause: Wait) -> float:
        with database.reading() as tx:
            running = groups.list_running_groups(tx)
        for key in known.keys() - {(group.project_id, group.name) for group in running}:
            del known[key]
        handle_each(running, lambda group: decide(database, clock, group, known[group.project_id, group.name]))
        return EVERY_SECONDS if running else IDLE_SECONDS

    return PeriodicJob("sweeps", compare)


@dataclass
class _Compared:
    """What is known of a group from its last comparison: the scores of its runs, and all that its calls depend on."""

    scores: KnownScores = field(default_factory=dict)
    judged: object = None


def decide(database: Database, clock: Clock, group: Group, known: _Compared) -> None:
    """Make a decision for each call of the rule of a group, unless nothing has changed since it was compared."""
    rule = group_rules.read_rule(group)
    with database.reading() as tx:
        project = projects.get_project(tx, group.project_id)
        members = group_rules.load_members(tx, project.id, group.name, rule, known.scores)
    judged = (rule, [(member.run.id, member.run.version, member.is_live) for member in members])
    if known.judged == judged:
        return
    compared = {str(member.run.id): member.run for member in members}
    attempts = {run.id: run.attempt for run in compared.values()}
    calls = group_rules.judge_members(rule, project, group.name, members)
    with database.reading() as tx:  # a run that lags is called for again and again, and need not be locked each time
        calls = [call for call in calls if not _is_decided(tx, compared[call.member], project, group, rule, call)]

    def make(call: GroupCall) -> None:
        with database.transaction() as tx:
            decision = decide_call(tx, group, rule, call, attempts, read_now(tx, clock))
        if decision is not None:
            log.info("group %s: run %s is to %s: %s", group.name, decision.run_name, decision.action, call.reason)

    handle_each(calls, make)
    known.judged = judged


def decide_call(
    tx: Transaction, group: Group, rule: GroupRule, call: GroupCall, attempts: Mapping[UUID, int], now: datetime
) -> Decision | None:
    """The decision on a member, unless it or its source has changed since they were compared."""
    run_ids = [UUID(call.member)] + ([] if call.source is None else [UUID(call.source.source_run)])
    # In ascending order, as everybody locks several runs: of two that would copy each other, the first does.
    locked = {run_id: runs.lock_run(tx, group.project_id, run_id) for run_id in sorted(run_ids)}
    changed = [run for run in locked.values() if run.attempt != attempts[run.id] or run.status != RunStatus.RUNNING]
    run, source, project = locked[run_ids[0]], call.source, projects.get_project(tx, group.project_id)
    is_taken = any(member.exploit for member in locked.values())
    if changed or is_taken or _is_decided(tx, run, project, group, rule, call):
        return None
    verdict = Verdict(Call.STOP, call.step, None, call.reason)
    begun = replace(transitions.begin_decision(run, new_id(), now, call.step, verdict), group=group.name)
    if source is None:
        begun = replace(begun, action=Action(rule.action))
    else:
        name, checkpoint = locked[run_ids[1]].name, (source.source_step, source.source_checkpoint)
        exploit = Exploit(begun.id, run_ids[1], name, *checkpoint, source.hyperparameters)
        begun = replace(begun, action=Action.EXPLOIT, exploit=exploit)
    runs.raise_version(tx, run.id)
    return transitions.create_decision(tx, run, call.step, now, begun, enforces=rule.mode == Mode.ENFORCE.value)


def _is_decided(tx: Transaction, run: Run, project: Project, group: Group, rule: GroupRule, call: GroupCall) -> bool:
    """Whether the attempt is to end, or the rule has decided about it: at this step or, to end it, at any. What a
    person vetoed is not called for again at the same step; what was only recorded is, once the rule enforces."""
    enforces = rule.mode == run.mode == project.max_mode == Mode.ENFORCE
    for decision in decisions.list_of_attempt(tx, run.id, run.attempt):
        of_rule = decision.group == group.name
        if of_rule and enforces and decision.state is DecisionState.SHADOW:
            continue
        if of_rule and decision.step >= call.step:
            return True
        if decision.action is Action.EXPLOIT:
            continue
        if of_rule and decision.state is DecisionState.MOOT:
            continue
        if of_rule or call.source is None or decision.state not in OBSERVED:
            return True
    return False
