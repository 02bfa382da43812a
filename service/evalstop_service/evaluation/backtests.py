"""Backtests: a policy is tried on the runs of a project's past, before it is let loose on those to come.

Each run that has ended is replayed from its observations by the same `monitor.advance` that would have judged it while
it went on. What is found is kept every few runs, so that a process that dies costs no more than these: any other goes
on behind them once the lease is over.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from evalstop_detectors import (
    DetectorError,
    Policy,
    advance,
    policy_from_document,
    policy_to_document,
    start,
)

from evalstop_service.background import PeriodicJob, Wait
from evalstop_service.clock import Clock
from evalstop_service.errors import Conflict, Invalid
from evalstop_service.rules.outcome import Turn, judge_decision
from evalstop_service.rules.statuses import BacktestState, DecisionOutcome, RunOutcome
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store import audit, backtests, observations, projects
from evalstop_service.store.backtests import Backtest, PastRun
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.queue import queues

log = logging.getLogger(__name__)

MOST_RUNS = 500
MOST_UNFINISHED = 5
"""Of one project at one time."""

LOOK_SECONDS = 2.0
LEASE_SECONDS = 60.0
RUNS_AT_A_TIME = 10


@dataclass(frozen=True)
class Summary:
    """What a backtest found, counted over runs.

    `stops`: how many the policy would have stopped, of these `right`, `wrong` (the run was healthy, or had not turned
    yet) and the rest `unknown`. `missed`: runs that turned and that it would have let go on. `decided`: how many stops
    are on record. `only_it`, `only_decided`: where one would and the other did not. `hours_after`: the GPU-hours that
    runs spent after the stops that were right, `hours_wrong` after those that were wrong; `hours_unsaid`: of so many
    stops nobody said how many GPUs the run has.
    """

    runs: int
    stops: int
    right: int
    wrong: int
    unknown: int
    missed: int
    decided: int
    only_it: int
    only_decided: int
    hours_after: float
    hours_wrong: float
    hours_unsaid: int
    failed: int


def request_backtest(
    database: Database, project_id: UUID, document: dict[str, Any], most_runs: int, actor: str, now: datetime
) -> Backtest:
    """Have a policy tried on the newest runs that have ended; raises InvalidPolicy, and Conflict when many wait."""
    policy = policy_from_document(document)
    if not 1 <= most_runs <= MOST_RUNS:
        raise Invalid(f"runs is {most_runs}; it may be 1 to {MOST_RUNS}")
    with database.transaction() as tx:
        projects.lock_project(tx, project_id)
        if backtests.count_unfinished(tx, project_id) >= MOST_UNFINISHED:
            raise Conflict(f"{MOST_UNFINISHED} backtests of this project are not done yet; wait for one of them")
        backtest = Backtest(
            id=new_id(),
            project_id=project_id,
            document=policy_to_document(policy),
            most_runs=most_runs,
            state=BacktestState.WAITING,
            total=0,
            done=0,
            findings=[],
            actor=actor,
            lease_until=None,
            created_at=now,
            ended_at=None,
        )
        backtests.add_backtest(tx, backtest)
        details = {"policy": policy.name, "runs": most_runs}
        audit.record_action(tx, project_id, actor, "policy.backtested", f"backtest {backtest.id}", details, now)
    return backtest


def create_job(database: Database, clock: Clock) -> PeriodicJob:
    """Seeing to backtests that wait, or that another process left."""

    def do(pause: Wait) -> float:
        return 0.0 if run_next_backtest(database, clock, pause) else LOOK_SECONDS

    return PeriodicJob("backtests", do)


def run_next_backtest(database: Database, clock: Clock, pause: Wait = lambda _: False) -> bool:
    """Take up one backtest and see it through, or until `pause` says that it is time to end; False: there is none."""
    with database.transaction() as tx:
        now, _ = queues.read_clock(tx, clock())
        held = backtests.claim_backtest(tx, now, now + timedelta(seconds=LEASE_SECONDS))
    if held is None:
        return False
    try:
        policy = policy_from_document(held.document)
        while held.ended_at is None:
            begun = time.perf_counter()
            moved = _some(database, held, policy, clock)
            if moved is None:
                log.info("backtest %s went to another process", held.id)
                break
            held = moved
            # What ingestion does meanwhile in this process gets half of the time.
            if held.ended_at is None and pause(time.perf_counter() - begun):
                _give_back(database, held)
                break
    except sa.exc.OperationalError:
        raise
    except Exception:
        log.exception("backtest %s failed", held.id)
        _end(database, held, BacktestState.FAILED, clock)
    return True


def _some(database: Database, held: Backtest, policy: Policy, clock: Clock) -> Backtest | None:
    """Replay a few more runs and keep what they show; None when it is in other hands."""
    before = UUID(held.findings[-1]["run_id"]) if held.findings else held.id
    with database.reading() as tx:
        total = held.total or backtests.count_past_runs(tx, held.project_id, held.id, held.most_runs)
        left = min(RUNS_AT_A_TIME, held.most_runs - held.done)
        found = backtests.load_past_runs(tx, held.project_id, before, left) if left > 0 else []
    findings = []
    for one in found:
        with database.reading() as tx:
            findings.append(_replayed(tx, one, policy))
    done = held.done + len(findings)
    ended = len(found) < left or done >= held.most_runs
    with database.transaction() as tx:
        now, _ = queues.read_clock(tx, clock())
        moved = replace(
            held,
            total=done if ended else max(total, done),
            done=done,
            findings=held.findings + findings,
            state=BacktestState.DONE if ended else held.state,
            lease_until=None if ended else now + timedelta(seconds=LEASE_SECONDS),
            ended_at=now if ended else None,
        )
        return moved if backtests.save_progress(tx, held, moved) else None


def _give_back(database: Database, held: Backtest) -> None:
    with database.transaction() as tx:
        backtests.save_progress(tx, held, replace(held, lease_until=None))


def _end(database: Database, held: Backtest, state: BacktestState, clock: Clock) -> None:
    with database.transaction() as tx:
        now, _ = queues.read_clock(tx, clock())
        backtests.save_progress(tx, held, replace(held, state=state, lease_until=None, ended_at=now))


def _replayed(tx: Transaction, past: PastRun, policy: Policy) -> dict[str, Any]:
    """What the policy would have said of a run, beside what was decided and what was true of it."""
    run = past.run
    watch = WatchedMetrics(run, policy)
    finding: dict[str, Any] = {
        "run_id": str(run.id),
        "run_name": run.name,
        "status": run.status,
        "last_step": run.last_step,
        "policy": f"{run.policy_name}@{run.policy_version}",
        "decision_id": None if past.decision_id is None else str(past.decision_id),
        "decided_step": past.decided_step,
        "state": past.state,
        "run_outcome": past.run_outcome,
        "turn_step": past.turn_step,
        "verdict": "continue",
        "step": None,
        "reason": "",
        "outcome": DecisionOutcome.UNKNOWN,
        "hours_after": None,
        "error": None,
    }
    try:
        ends, _ = advance(
            policy, start(policy), watch.observations(observations.load_series(tx, run.id, watch.metrics))
        )
    except DetectorError as error:
        return finding | {"error": str(error)}
    step = ends.verdict.step if ends.verdict.stops else None
    return finding | {
        "verdict": str(ends.verdict.verdict),
        "step": step,
        "reason": ends.verdict.reason,
        "outcome": _outcome(past, step),
        "hours_after": _hours_after(past, step),
    }


def _outcome(past: PastRun, step: int | None) -> DecisionOutcome:
    """Whether it would have been right to stop the run at this step or, when it is None, never to."""
    if past.run_outcome is None:
        return DecisionOutcome.UNKNOWN
    turn = None
    if past.turn_step is not None:
        turn = Turn(past.turn_step, past.run.turn["low_step"] if past.run.turn else past.turn_step)
    return judge_decision(RunOutcome(past.run_outcome), step, turn)


def _hours_after(past: PastRun, step: int | None) -> float | None:
    """The GPU-hours that the attempt spent after this step, by its share of the steps."""
    last = past.run.last_step
    if step is None or past.gpu_hours is None or last is None or last <= past.began_at_step:
        return None
    share = (last - max(step, past.began_at_step)) / (last - past.began_at_step)
    return past.gpu_hours * min(max(share, 0.0), 1.0)


def differs(finding: Mapping[str, Any]) -> bool:
    """Whether the policy would have stopped a run that was not to be stopped, or the other way round."""
    return (finding["step"] is not None) != (finding["decided_step"] is not None)


def sort_findings(findings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What differs from what was decided first, of that what would have been wrong, then the other stops."""
    return sorted(
        findings,
        key=lambda one: (
            not differs(one),
            one["outcome"] != DecisionOutcome.WRONG,
            one["step"] is None,
            one["error"] is None,
        ),
    )


def summarize_findings(findings: Sequence[Mapping[str, Any]]) -> Summary:
    """The figures of a backtest."""
    stops = [one for one in findings if one["step"] is not None]
    by = {outcome: [one for one in stops if one["outcome"] == outcome] for outcome in DecisionOutcome}
    decided = [one for one in findings if one["decided_step"] is not None]
    return Summary(
        runs=len(findings),
        stops=len(stops),
        right=len(by[DecisionOutcome.RIGHT]),
        wrong=len(by[DecisionOutcome.WRONG]),
        unknown=len(by[DecisionOutcome.UNKNOWN]),
        missed=sum(one["run_outcome"] == RunOutcome.TURNED and one["step"] is None for one in findings),
        decided=len(decided),
        only_it=sum(differs(one) for one in stops),
        only_decided=sum(differs(one) for one in decided),
        hours_after=math.fsum(one["hours_after"] or 0.0 for one in by[DecisionOutcome.RIGHT]),
        hours_wrong=math.fsum(one["hours_after"] or 0.0 for one in by[DecisionOutcome.WRONG]),
        hours_unsaid=sum(one["hours_after"] is None for one in stops),
        failed=sum(one["error"] is not None for one in findings),
    )
