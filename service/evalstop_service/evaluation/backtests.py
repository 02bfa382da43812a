"""Backtests: a policy judged on the past runs of a project, before it judges future ones.

Each ended run is replayed from its observations by the same `advance` that judged it while it ran. Whoever asks for a
backtest waits for it, so it replays as many of the newest runs as a few seconds allow: hundreds, unless they are long.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from evalstop_detectors import (
    DetectorError,
    Policy,
    Verdict,
    advance,
    name_calls,
    policy_from_document,
    policy_to_document,
    start,
)
from msgspec import structs

from evalstop_service.domain.fields import doc
from evalstop_service.domain.outcome import assess_run, judge_decision
from evalstop_service.domain.run import Turn
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome
from evalstop_service.errors import Invalid
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy, select_evals
from evalstop_service.store import audit, backtests, cases, decisions, observations, runs
from evalstop_service.store.backtests import Backtest, BacktestFinding
from evalstop_service.store.cases import Case
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

log = logging.getLogger(__name__)

MOST_RUNS = 500
MOST_SECONDS = 8.0
"""How long one backtest takes: clients wait for ten seconds."""

RUNS_AT_A_TIME = 10


@dataclass(frozen=True)
class Summary:
    """The findings of a backtest, counted over runs. A stop before the turn counts as wrong."""

    stops: Annotated[int, doc("runs that the policy would have stopped")]
    right: Annotated[int, doc("those of these stops whose runs had turned")]
    wrong: Annotated[int, doc("those of these stops whose runs were healthy")]
    unknown: Annotated[int, doc("those of these stops whose outcome is unknown")]
    missed: Annotated[int, doc("runs that turned and that the policy would not have stopped")]
    decided: Annotated[int, doc("recorded stops")]
    hours_after: Annotated[float, doc("GPU-hours after the policy's right stops")]
    failed: Annotated[int, doc("runs that could not be replayed")]


def run_backtest(
    database: Database, project_id: UUID, document: dict[str, Any], most_runs: int, actor: str, now: datetime
) -> Backtest:
    """Replay a policy on the newest runs that have ended, and store what was found.

    Raises InvalidPolicy, and Invalid for a bad number of runs.
    """
    policy = policy_from_document(document)
    if not 1 <= most_runs <= MOST_RUNS:
        raise Invalid(f"runs is {most_runs}; it must be from 1 to {MOST_RUNS}")
    backtest_id = new_id()
    findings, cut_short = _replay_runs(database, project_id, backtest_id, policy, most_runs)
    backtest = Backtest(
        id=backtest_id,
        project_id=project_id,
        document=policy_to_document(policy),
        most_runs=most_runs,
        replayed=len(findings),
        cut_short=cut_short,
        findings=findings,
        actor=actor,
        created_at=now,
    )
    with database.transaction() as tx:
        backtests.add_backtest(tx, backtest)
        details = {"policy": policy.name, "runs": most_runs}
        audit.record_action(tx, project_id, actor, "policy.backtested", f"backtest {backtest.id}", details, now)
    return backtest


def _replay_runs(
    database: Database, project_id: UUID, before: UUID, policy: Policy, most_runs: int
) -> tuple[list[BacktestFinding], bool]:
    """What was found in the newest runs before this id, and whether the time was over before all were replayed."""
    findings: list[BacktestFinding] = []
    until = time.monotonic() + MOST_SECONDS
    while len(findings) < most_runs:
        limit = min(RUNS_AT_A_TIME, most_runs - len(findings))
        with database.reading() as tx:
            batch = backtests.list_past_runs(tx, project_id, before, limit)
        for run in batch:
            started = time.monotonic()
            if started > until:
                return findings, True
            with database.reading() as tx:
                findings.append(_replay_run(tx, run, policy))
            time.sleep(time.monotonic() - started)  # ingestion in this process gets half of the time
        if len(batch) < limit:
            break
        before = batch[-1].id
    return findings, False


def _replay_run(tx: Transaction, run: Run, policy: Policy) -> BacktestFinding:
    """What the policy would have done to a run, what was decided about its last attempt, and the outcome of this."""
    decision = decisions.find_decision_of_attempt(tx, run.id, run.attempt)
    case = cases.find_case(tx, run.id, run.attempt)
    finding = BacktestFinding(
        run_id=run.id,
        run_name=run.name,
        status=run.status,
        last_step=run.last_step,
        policy=f"{run.policy_name}@{run.policy_version}",
        decision_id=decision.id if decision and decision.group is None else None,
        decided_step=decision.step if decision and decision.group is None else None,
        state=decision.state if decision and decision.group is None else None,
        run_outcome=case.run_outcome if case else None,
        turn_step=case.turn_step if case else None,
    )
    try:
        replay = replay_run(tx, run, policy)
    except DetectorError as error:
        return structs.replace(finding, error=str(error))
    verdict = replay.verdicts[-1]
    step = verdict.step if verdict.stops else None
    return structs.replace(
        finding,
        verdict=str(verdict.verdict),
        step=step,
        reason=verdict.reason,
        outcome=_judge_stop(run, case, step, replay),
        hours_after=None if case is None else _estimate_hours_after(tx, run, case, step),
        calls=replay.calls,
    )


def _judge_stop(run: Run, case: Case | None, step: int | None, replay: Replay) -> DecisionOutcome:
    """Whether it would have been right to stop the run at this step or (None) not to stop it."""
    critical = replay.verdicts[-1].critical
    if step is not None and critical is not None:  # that eval alone would judge a recorded decision
        assessment = assess_run(select_evals(run, replay.observations, critical), step)
        return judge_decision(assessment.run_outcome, step, assessment.turn)
    if case is None:
        return DecisionOutcome.UNKNOWN
    turn = None
    if case.turn_step is not None:
        turn = Turn(case.turn_step, run.turn.low_step if run.turn else case.turn_step)
    return judge_decision(case.run_outcome, step, turn)


def _estimate_hours_after(tx: Transaction, run: Run, case: Case, step: int | None) -> float | None:
    """The GPU-hours that the attempt spent after this step, by its share of the steps."""
    first, last = runs.get_resumed_step(tx, run) or 0, run.last_step
    if step is None or case.gpu_hours is None or last is None or last <= first:
        return None
    return case.gpu_hours * min(max((last - max(step, first)) / (last - first), 0.0), 1.0)


def sort_findings(findings: Iterable[BacktestFinding]) -> list[BacktestFinding]:
    """Findings that differ from the actual decision first, wrong ones before others, then the other stops."""
    return sorted(
        findings,
        key=lambda finding: (
            not finding.differs,
            finding.outcome is not DecisionOutcome.WRONG,
            finding.step is None,
            finding.error is None,
        ),
    )


def summarize_findings(findings: Sequence[BacktestFinding]) -> Summary:
    """Count the findings of a backtest."""
    stops = [finding for finding in findings if finding.step is not None]
    by_outcome = {outcome: [stop for stop in stops if stop.outcome is outcome] for outcome in DecisionOutcome}
    return Summary(
        stops=len(stops),
        right=len(by_outcome[DecisionOutcome.RIGHT]),
        wrong=len(by_outcome[DecisionOutcome.WRONG]),
        unknown=len(by_outcome[DecisionOutcome.UNKNOWN]),
        missed=sum(finding.run_outcome == RunOutcome.TURNED and finding.step is None for finding in findings),
        decided=sum(finding.decided_step is not None for finding in findings),
        hours_after=math.fsum(stop.hours_after or 0.0 for stop in by_outcome[DecisionOutcome.RIGHT]),
        failed=sum(finding.error is not None for finding in findings),
    )


@dataclass(frozen=True)
class Replay:
    """What a policy says of a run: each verdict that changed the call, and the final verdict.

    `calls`: see `name_calls`. `observations`: those that the policy watches.
    """

    verdicts: Sequence[Verdict]
    calls: dict[str, int | None]
    observations: Sequence[PostedObservation]


def replay_run(tx: Transaction, run: Run, policy: Policy) -> Replay:
    """Replay a run under a policy; raises DetectorError if a detector rejects the observations or fails on them."""
    policy = restrict_policy(policy, run)
    watched = WatchedMetrics(run, policy)
    series = observations.load_series(tx, run.id, watched.metrics)
    try:
        monitor, verdicts = advance(policy, start(policy), watched.observations(series))
    except DetectorError:
        raise
    except Exception as error:  # observations are stored although a detector fails on them
        log.exception("a detector failed in a replay of run %s (%s)", run.id, run.name)
        raise DetectorError(f"a detector failed: {error!r:.200}") from error
    return Replay(verdicts, name_calls(policy, monitor), series)
