"""The junction: news of a run is stored, its monitor moved on, a decision made and announced, in one transaction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from evalstop_detectors import (
    Best,
    Chooser,
    MonitorState,
    Policy,
    RawMaximum,
    SmoothedMaximum,
    StaleState,
    Verdict,
    is_late,
    policy_from_document,
    replay,
    state_from_json,
    state_to_json,
    step,
    verdict_to_document,
)

from evalstop_service import events, hindsight, lifecycle, watching
from evalstop_service.errors import Conflict, NotFound
from evalstop_service.store import checkpoints, decisions, observations, outbox, policies, projects, runs, verdicts
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run

CHOOSER: Chooser = SmoothedMaximum()


@dataclass(frozen=True)
class Points:
    """News: a batch of observations, in any order, with or without repeats."""

    points: tuple[Point, ...]


@dataclass(frozen=True)
class Saved:
    """News: the trainer saved the model of this step."""

    step: int
    uri: str


@dataclass(frozen=True)
class Resumed:
    """News: the trainer goes on from the checkpoint of this step; what it observed past it no longer counts."""

    step: int


News = Points | Saved | Resumed


@dataclass(frozen=True)
class Contradiction:
    """A point whose identity is on record with another value, which stands."""

    point: Point
    stored_value: float


@dataclass(frozen=True)
class Receipt:
    """What became of the news, and where the run stands after it."""

    run: Run
    decision: Decision | None
    accepted: int = 0
    duplicates: int = 0
    superseded: int = 0
    contradictions: tuple[Contradiction, ...] = ()
    created: bool = True


@dataclass(frozen=True)
class _Stored:
    """What was new in the news. `rewritten`: the past changed, so that the monitor has to be rebuilt."""

    run: Run
    points: tuple[Point, ...] = ()
    rewritten: bool = False
    checkpoints_changed: bool = False
    counts: dict[str, Any] = field(default_factory=dict)


def take(database: Database, project_id: UUID, run_id: UUID, news: News, now: datetime) -> Receipt:
    """Take in news of a run; what the receipt says is durable when this returns. Raises NotFound and Conflict."""
    with database.transaction() as tx:
        run = runs.lock(tx, project_id, run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id} in this project; open one by POST /api/v1/runs")
        stored = _store(tx, run, news, now)
        policy = policy_of(tx, stored.run.policy_id)
        monitor, reached = _follow(tx, stored, policy)
        run = _with_best(tx, stored)
        run = replace(
            run,
            verdict=verdict_to_document(monitor.verdict),
            monitor_state=state_to_json(policy, monitor).decode(),
            version=run.version + 1,
            updated_at=now,
        )
        runs.save(tx, run)
        decision = _decide(tx, run, monitor.verdict, now)
        _announce(tx, stored.run, run, reached, now)
        return Receipt(run=run, decision=decision, **stored.counts)


def policy_of(tx: Transaction, policy_id: UUID) -> Policy:
    """The policy with this id, ready to judge."""
    return policy_from_document(policies.get(tx, policy_id).document)


def _store(tx: Transaction, run: Run, news: News, now: datetime) -> _Stored:
    match news:
        case Points(points):
            return _store_points(tx, run, points, now)
        case Saved(at, uri):
            return _store_checkpoint(tx, run, Checkpoint(at, uri, run.attempt, now))
        case Resumed(at):
            return _begin_attempt(tx, run, at, now)


def _store_points(tx: Transaction, run: Run, points: tuple[Point, ...], now: datetime) -> _Stored:
    known = observations.live_values(tx, run.id, {point.identity for point in points})
    fresh: list[Point] = []
    contradictions: list[Contradiction] = []
    for point in points:
        if point.identity not in known:
            known[point.identity] = point.value
            fresh.append(point)
        elif not _same(known[point.identity], point.value):
            contradictions.append(Contradiction(point, known[point.identity]))
    observations.add(tx, run.id, run.attempt, fresh, now)
    last_step = max((point.step for point in fresh), default=None)
    if last_step is not None:
        run = replace(run, last_step=max(last_step, run.last_step if run.last_step is not None else last_step))
    counts = {
        "accepted": len(fresh),
        "duplicates": len(points) - len(fresh) - len(contradictions),
        "contradictions": tuple(contradictions),
    }
    return _Stored(run, tuple(fresh), counts=counts)


def _same(stored: float, sent: float) -> bool:
    return stored == sent or (stored != stored and sent != sent)  # NaN repeats NaN


def _store_checkpoint(tx: Transaction, run: Run, checkpoint: Checkpoint) -> _Stored:
    known = checkpoints.find(tx, run.id, checkpoint.step)
    if known is None:
        checkpoints.add(tx, run.id, checkpoint)
        return _Stored(run, checkpoints_changed=True)
    if known.uri != checkpoint.uri:
        raise Conflict(f"the checkpoint of step {checkpoint.step} is on record at {known.uri!r}; it cannot move")
    return _Stored(run, counts={"created": False})


def _begin_attempt(tx: Transaction, run: Run, at: int, now: datetime) -> _Stored:
    if run.status == "running" and runs.resumed_from(tx, run) == at and not _anything_since(tx, run):
        return _Stored(run)
    _withdraw(tx, run, at, now)
    run = replace(run, attempt=run.attempt + 1, status="running", ended_at=None, turn=None)
    superseded = observations.supersede(tx, run.id, at, run.attempt)
    checkpoints.supersede(tx, run.id, at, run.attempt)
    runs.add_attempt(tx, run, at, now)
    run = replace(run, last_step=observations.last_step(tx, run.id))
    return _Stored(run, rewritten=True, checkpoints_changed=True, counts={"superseded": superseded})


def _anything_since(tx: Transaction, run: Run) -> bool:
    saved = any(checkpoint.attempt == run.attempt for checkpoint in checkpoints.listing(tx, run.id))
    return saved or observations.any_since(tx, run.id, run.attempt)


def _withdraw(tx: Transaction, run: Run, at: int, now: datetime) -> None:
    """A stop that still waits for its grace period to end is not for the attempt that begins now."""
    decision = decisions.of_attempt(tx, run.id, run.attempt)
    if decision is None or decision.state != lifecycle.State.PENDING or decision.due_at <= now:
        return
    outbox.cancel(tx, run.id, decision.id, now)
    why = f"the trainer went on from step {at} before the grace period was over"
    decisions.change(tx, decision, lifecycle.State.VETOED, actor="evalstop", reason=why, details={}, now=now)


def _follow(tx: Transaction, stored: _Stored, policy: Policy) -> tuple[MonitorState, list[Verdict]]:
    """Move the monitor on by what is new, or rebuild it; gives its state and the verdicts it came to on the way."""
    run = stored.run
    fresh = watching.observations(run, policy, stored.points)
    state = None if stored.rewritten else _kept(run, policy)
    reached = []
    if state is None:  # as it was before the fresh points, so that they are taken in like any others
        state = _rebuilt(tx, run, policy, without={point.identity for point in stored.points})
        reached.append(state.verdict)
    if any(is_late(state, observation) for observation in fresh[:1]):
        state = _rebuilt(tx, run, policy)
        return state, [*reached, state.verdict]
    for observation in fresh:
        state, verdict = step(policy, state, observation)
        reached.append(verdict)
    return state, reached


def _kept(run: Run, policy: Policy) -> MonitorState | None:
    try:
        return state_from_json(policy, run.monitor_state) if run.monitor_state is not None else None
    except StaleState:
        return None


def _rebuilt(
    tx: Transaction, run: Run, policy: Policy, without: Collection[tuple[str, int]] = frozenset()
) -> MonitorState:
    past = observations.series(tx, run.id, watching.watched(run, policy))
    return replay(policy, watching.observations(run, policy, (item for item in past if item.identity not in without)))


def _with_best(tx: Transaction, stored: _Stored) -> Run:
    """The run with its pointer to the best checkpoint, the raw maximum to be shown beside it, and its turn."""
    run, gold = stored.run, watching.eval_metric(stored.run)
    if gold is None or not (stored.checkpoints_changed or any(point.metric == gold for point in stored.points)):
        return run
    scores = watching.scores(run, observations.series(tx, run.id, [gold]))
    saved = {checkpoint.step: checkpoint.uri for checkpoint in checkpoints.listing(tx, run.id)}
    best = CHOOSER.choose(scores, saved)
    raw = RawMaximum().choose(scores, {score.step for score in scores})
    sign = watching.sign(run.metrics, gold)
    return replace(
        run,
        best_checkpoint=_pointer(best, saved[best.step], sign) if best else None,
        raw_maximum={"step": raw.step, "score": sign * raw.score} if raw else None,
        turn=hindsight.turn_of(tx, run) if run.ended_at is not None else None,
    )


def _pointer(best: Best, uri: str, sign: float) -> dict[str, Any]:
    return {
        "step": best.step,
        "uri": uri,
        "score": sign * best.score,
        "chosen_by": best.chosen_by,
        "smoothed": None if best.smoothed is None else sign * best.smoothed,
        "smoothed_stderr": best.smoothed_stderr,
    }


def _decide(tx: Transaction, run: Run, verdict: Verdict, now: datetime) -> Decision | None:
    """The decision on this attempt; a new one where the verdict is the first to call for a stop of a running job."""
    decision = decisions.of_attempt(tx, run.id, run.attempt)
    if decision is not None or not verdict.stops or verdict.step is None or run.status != "running":
        return decision
    project = projects.get(tx, run.project_id)
    state = lifecycle.opening(lifecycle.Mode(run.mode), project.grace_seconds)
    decision = Decision(
        id=new_id(),
        run_id=run.id,
        project_id=run.project_id,
        attempt=run.attempt,
        state=state,
        step=verdict.step,
        verdict=run.verdict,
        best_checkpoint=run.best_checkpoint,
        policy_id=run.policy_id,
        due_at=now + timedelta(seconds=project.grace_seconds),
        created_at=now,
        run_name=run.name,
        policy_name=run.policy_name,
        policy_version=run.policy_version,
    )
    decisions.add(tx, decision, f"policy {run.policy_name} version {run.policy_version}", now)
    if state is not lifecycle.State.SHADOW:
        outbox.announce(
            tx,
            project_id=run.project_id,
            run_id=run.id,
            type="run.stop_requested",
            data=events.data(project, run, replace(decision, state=lifecycle.State.REQUESTED)),
            now=now,
            due_at=decision.due_at,
            decision_id=decision.id,
        )
    return decision


def _announce(tx: Transaction, before: Run, run: Run, reached: list[Verdict], now: datetime) -> None:
    """Record the changes of verdict on the way, and tell of a first suspicion and of a moved pointer."""
    news = []
    word = before.verdict["verdict"]
    for verdict in reached:
        if verdict.verdict != word:
            word = verdict.verdict
            if word == "suspect" and not verdicts.reached(tx, run.id, run.attempt, "suspect"):
                news.append("run.suspected")
            verdicts.add(tx, run.id, run.attempt, verdict_to_document(verdict), now)
    if _place(run) != _place(before):
        news.append("run.best_checkpoint_changed")
    if news:
        project = projects.get(tx, run.project_id)
        for event_type in news:
            data = events.data(project, run, None)
            outbox.announce(tx, project_id=project.id, run_id=run.id, type=event_type, data=data, now=now)


def _place(run: Run) -> tuple[int, str] | None:
    """The checkpoint pointed at: its smoothed score may change with every eval, which is no news."""
    best = run.best_checkpoint
    return (best["step"], best["uri"]) if best else None
