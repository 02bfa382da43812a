"""Taking news in: many runs, one transaction."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from evalstop_detectors import BestCheckpoint, Observation, Verdict, advance, is_late, start, verdict_to_document
from msgspec.structs import replace

from evalstop_service.errors import Conflict, NotFound, ServiceError
from evalstop_service.evaluation import cases, change_point
from evalstop_service.ingest import announcements, attempts
from evalstop_service.ingest.identity import sort_out
from evalstop_service.ingest.load import after, recall, scores_of
from evalstop_service.ingest.messages import Arrival, Corrected, Points, Receipt, Resumed, Saved
from evalstop_service.ingest.run_cache import KEEP_EVERY, LATE_WEIGHT, SHARED_FOR, LiveRun, LiveRuns
from evalstop_service.ingest.unit_of_work import Work
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.observability.tracing import Tracer
from evalstop_service.rules.liveness import FOUND_AGAIN
from evalstop_service.rules.statuses import RunStatus
from evalstop_service.runs import metric_roles, watched_metrics
from evalstop_service.runs.metric_roles import RoleAssignment
from evalstop_service.runs.retention import refuse_pruned_run
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store import audit, checkpoints, projects, run_health, runs
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.database import Database
from evalstop_service.store.observations import Point

Answer = Receipt | ServiceError
"""What became of an arrival, or why it could not be taken: NotFound, Conflict. Then nothing of it was stored."""


def take(
    database: Database,
    live_runs: LiveRuns,
    arrivals: Sequence[Arrival],
    now: datetime,
    service_metrics: ServiceMetrics,
    tracer: Tracer | None = None,
    *,
    mistaken: Collection[UUID] = (),
) -> list[Answer]:
    """Take news in, in the order given, with one transaction; what the receipts say is durable when this returns.

    `mistaken`: runs that were not as this process remembered them.
    """
    tracer = tracer or Tracer()
    with database.transaction() as tx:
        held = recall(tx, live_runs, arrivals, service_metrics)
        for run_id in held.keys() & mistaken:
            held[run_id].shared = SHARED_FOR
        work = Work(now, held, tx)
        with tracer.span("step detectors", runs=len(held)):
            answers = [work_in(work, held.get(arrival.run_id), arrival) for arrival in arrivals]
        with tracer.span("write"):
            work.write()
    live_runs.put_back(held.values())
    service_metrics.detector_seconds.observe(work.detector_seconds)
    return answers


def work_in(work: Work, live: LiveRun | None, arrival: Arrival) -> Answer:
    """Work one arrival in: what is to be written of it is gathered. Raises NeedsTransaction before anything changed."""
    if live is None or live.run.project_id != arrival.project_id:
        return NotFound(f"there is no run {arrival.run_id} in this project; open one by POST /api/v1/runs")
    try:
        refuse_pruned_run(live.run)
        match arrival.news:
            case Points(points):
                return _take_points(work, live, points)
            case Saved(at, uri):
                return _take_checkpoint(work, live, at, uri)
            case Resumed(at):
                return _take_resumption(work, live, at)
            case Corrected(metrics, actor):
                return _take_correction(work, live, metrics, actor)
    except ServiceError as error:  # raised before anything of it was stored
        return error


def _take_points(work: Work, live: LiveRun, points: tuple[Point, ...]) -> Receipt:
    names = _names(live, points) if metric_roles.is_open(live.run) else None
    found = sort_out(work, live, points)
    fresh, seen = found.fresh, live.watch.observations(found.fresh)
    gold = [point for point in fresh if point.metric == live.watch.gold]
    if names is not None or _takes_more(live, seen, gold):
        work.needs_transaction()
    if fresh:
        live.last_steps = found.last_steps
        work.store(live, fresh, found.late)
    recast = None if names is None else _recognise(work, live, names)
    if fresh or live.reached:
        rewritten = recast is not None or _step(work, live, seen)
        late, moved = (False, recast) if recast is not None else _weigh(work, live, gold)
        last_step = live.run.last_step
        if fresh and (last_step is None or max(point.step for point in fresh) > last_step):
            moved["last_step"] = max(point.step for point in fresh)
        _settle(work, live, moved, rewritten=rewritten or late)
    return Receipt(
        live.run,
        work.decision(live),
        accepted=len(fresh),
        duplicates=len(points) - len(fresh) - len(found.contradictions),
        contradictions=found.contradictions,
    )


def _takes_more(live: LiveRun, seen: Sequence[Observation], gold: Sequence[Point]) -> bool:
    """Whether points take more than to be stored and to move the monitor on from where it stands."""
    return (
        (live.decided and live.let_run is None)
        or live.run.ended_at is not None
        or live.unkept + len(seen) >= KEEP_EVERY
        or (bool(seen) and is_late(live.monitor, seen[0]))
        or (bool(gold) and live.scores is None)
    )


def _take_checkpoint(work: Work, live: LiveRun, at: int, uri: str) -> Receipt:
    run = live.run
    known = checkpoints.find_checkpoint(work.tx, run.id, at)
    if known is not None and known.uri != uri:
        raise Conflict(f"the checkpoint of step {at} is on record at {known.uri!r}; it cannot move")
    if known is None:
        checkpoints.add_checkpoint(work.tx, run.id, Checkpoint(at, uri, run.attempt, work.now))
        if live.scores is not None:
            live.scores.saved(at, uri)
        _settle(work, live, _pointers(work, live))
    return Receipt(live.run, work.decision(live), created=known is None)


def _take_resumption(work: Work, live: LiveRun, at: int) -> Receipt:
    work.write()
    begun = attempts.begin(work, live, at)
    if begun is None:
        return Receipt(live.run, work.decision(live))
    live.last_steps, live.decided, live.let_run, live.scores = begun.last_steps, False, None, None
    _go_back(work, live, None)
    _settle(work, live, begun.changes | _pointers(work, live, ended=False), rewritten=True)
    return Receipt(live.run, work.decision(live), superseded=begun.superseded)


def _take_correction(work: Work, live: LiveRun, metrics: dict[str, dict[str, str]], actor: str) -> Receipt:
    run, as_said = live.run, metric_roles.correct_roles(live.run, metrics)
    if (run.metrics, run.recognition) != as_said:
        details = {"before": run.metrics, "after": metrics}
        audit.record_action(work.tx, run.project_id, actor, "run.metrics_changed", f"run {run.name}", details, work.now)
        _settle(work, live, _recast(work, live, as_said), rewritten=True)
    return Receipt(live.run, work.decision(live))


def _names(live: LiveRun, points: Sequence[Point]) -> set[str] | None:
    """All names of a run's metrics when these points bring new ones; None when they bring none."""
    known = live.last_steps.keys() | live.run.metrics.keys()
    new = {point.metric for point in points} - known
    return known | new if new and len(known) < metric_roles.MOST_NAMES else None


def _recognise(work: Work, live: LiveRun, names: set[str]) -> dict[str, Any] | None:
    """Find out the roles of a run with these metrics; what it changes of the row if they are others than before."""
    patterns = projects.get_project(work.tx, live.run.project_id).role_patterns
    found = metric_roles.assign_roles(names, live.run.labels, patterns)
    if found.metrics != live.run.metrics:
        return _recast(work, live, found)
    if found.recognition != live.run.recognition:
        _store_cast(work, live, found)
    return None


def _recast(work: Work, live: LiveRun, roles: RoleAssignment) -> dict[str, Any]:
    """Show the detectors other metrics than before, from the first observation on; what it changes of the row."""
    _store_cast(work, live, roles)
    live.watch, live.scores = WatchedMetrics(live.run, live.policy), None
    work.write()
    _go_back(work, live, None)
    return {"best_checkpoint": None, "raw_maximum": None} | _pointers(work, live)


def _store_cast(work: Work, live: LiveRun, roles: RoleAssignment) -> None:
    runs.save_roles(work.tx, live.run.id, roles.metrics, roles.recognition)
    live.run = replace(live.run, metrics=roles.metrics, recognition=roles.recognition)


def _settle(work: Work, live: LiveRun, changes: dict[str, Any], *, rewritten: bool = False) -> None:
    """Bring the run's row up to where its monitor stands, decide, and announce what changed."""
    before, verdict = live.run, live.monitor.verdict
    version = before.version + 1
    if verdict is not live.told:
        changes["verdict"] = _document(verdict, live.told, before.verdict)
        live.told = verdict
    if rewritten:
        changes["rewritten_version"] = version
    if before.status == RunStatus.LOST:
        changes |= FOUND_AGAIN
    live.run = run = replace(before, version=version, updated_at=work.now, **changes)
    work.changed(live)
    if before.ended_at is not None and run.ended_at is None:  # it goes on after its end, and may fall silent again
        run_health.start_checks(work.tx, run.id, run.project_id, work.now, work.now)
        if run.attempt == before.attempt:
            cases.remove_case(work.tx, run)
    if verdict.stops and run.status == RunStatus.RUNNING:
        if not live.decided:
            work.then(live, partial(announcements.decide, work, live, verdict))
        elif "best_checkpoint" in changes:
            announcements.reconsider(work, live)
    if run.ended_at is not None and "turn" in changes:  # gold came after the end
        cases.record_case(work.tx, run, work.now)
    reached, live.reached = live.reached, []
    if announcements.is_news(before, run, reached):
        work.then(live, partial(announcements.announce, work, before, run, reached))


def _document(verdict: Verdict, told: Verdict | None, document: dict[str, Any]) -> dict[str, Any]:
    """The verdict as its run's row says it; most are what was told before, of a later step."""
    if (
        told is not None
        and verdict.evidence is told.evidence
        and verdict.reason is told.reason
        and (verdict.verdict, verdict.turn_step) == (told.verdict, told.turn_step)
    ):
        return document | {"step": verdict.step}
    return verdict_to_document(verdict)


def _step(work: Work, live: LiveRun, seen: Sequence[Observation]) -> bool:
    """Move the monitor on by what is new; true when something new belonged into its past."""
    if not seen:
        return False
    if is_late(live.monitor, seen[0]):
        work.write()
        _go_back(work, live, seen[0])
        return True
    _advance(work, live, seen)
    return False


def _go_back(work: Work, live: LiveRun, first: Observation | None) -> None:
    """Rebuild the monitor from where `first` belongs, or from the beginning; all it is to see has been written."""
    remembered = live.trail.back_to(first) if first is not None else None
    live.count, live.monitor = remembered or (0, start(live.policy))
    if remembered is None:
        live.trail.forget()
    _advance(work, live, after(work.tx, live.run, live.watch, live.monitor), on_the_way=False)
    live.unkept += LATE_WEIGHT


def _advance(work: Work, live: LiveRun, seen: Sequence[Observation], *, on_the_way: bool = True) -> None:
    begun, word = time.perf_counter(), live.monitor.verdict.verdict
    live.monitor, changes = advance(live.policy, live.monitor, seen)
    work.detector_seconds += time.perf_counter() - begun
    if not on_the_way:
        live.reached.append(live.monitor.verdict)
    elif len(changes) > 1 or live.monitor.verdict.verdict is not word:
        live.reached += changes
    live.count += len(seen)
    live.unkept += len(seen)
    live.trail.leave(live.count, live.monitor)


def _weigh(work: Work, live: LiveRun, gold: Sequence[Point]) -> tuple[bool, dict[str, Any]]:
    """Take new gold scores into the choice of the best checkpoint: whether one was late, and what it changes."""
    if not gold:
        return False, {}
    by_step = sorted(gold, key=lambda point: point.step)
    late = live.scores is not None and not live.scores.add(watched_metrics.select_scores(live.run, by_step))
    if late:
        live.scores = None
    return late, _pointers(work, live)


def _pointers(work: Work, live: LiveRun, *, ended: bool | None = None) -> dict[str, Any]:
    """The best checkpoint, the raw maximum that is shown beside it and, once the run has ended, its turn."""
    run, gold, sign = live.run, live.watch.gold, live.watch.gold_sign
    if gold is None:
        return {}
    if live.scores is None:
        work.write()
        live.scores = scores_of(work.tx, run, gold)
    best, raw = live.scores.best.best(), live.scores.best.raw()
    found: dict[str, Any] = {
        "best_checkpoint": _pointer(best, live.scores.uris[best.step], sign) if best else None,
        "raw_maximum": {"step": raw.step, "score": sign * raw.score} if raw else None,
    }
    if run.ended_at is not None if ended is None else ended:
        work.write()
        found["turn"] = change_point.find_change_point(work.tx, run)
    return found


def _pointer(best: BestCheckpoint, uri: str, sign: float) -> dict[str, Any]:
    return {
        "step": best.step,
        "uri": uri,
        "score": sign * best.score,
        "chosen_by": best.chosen_by,
        "smoothed": None if best.smoothed is None else sign * best.smoothed,
        "smoothed_stderr": best.smoothed_stderr,
    }
