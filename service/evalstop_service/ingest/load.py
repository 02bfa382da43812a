"""Bringing runs back: from this process's memory, from a kept state and what came since, or from all observations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from uuid import UUID

from evalstop_detectors import MonitorState, Observation, Policy, Score, StaleState, advance, start, state_from_json

from evalstop_service.ingest.messages import Arrival, News, Points, Saved
from evalstop_service.ingest.run_cache import KEEP_EVERY, SHARED_FOR, LiveRun, LiveRuns, Scores
from evalstop_service.observability.metrics import ServiceMetrics
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics
from evalstop_service.store import checkpoints, decisions, monitor_states, observations, runs
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.database import Transaction
from evalstop_service.store.monitor_states import StoredMonitorState
from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run

TOGETHER = 64
"""Runs that are read at one time: with `KEEP_EVERY` values of each metric they are less than a hundred megabytes."""

REPLAY_WEIGHT = 8
"""What had to be replayed to bring a run back would have to be again: each counts for so many towards a keeping."""


def recall(
    tx: Transaction, live: LiveRuns, arrivals: Iterable[Arrival], service_metrics: ServiceMetrics
) -> dict[UUID, LiveRun]:
    """Lock the runs of these arrivals and bring them back as they stand; those that do not exist are left out."""
    news: dict[UUID, list[News]] = defaultdict(list)
    for arrival in arrivals:
        news[arrival.run_id].append(arrival.news)
    stamps = runs.lock_runs(tx, list(news))
    remembered = live.take_out(stamps)
    held = {run_id: known for run_id, known in remembered.items() if known.stamp == stamps[run_id]}
    service_metrics.live_runs.labels("hit").inc(len(held))
    for known in held.values():
        known.shared = max(0, known.shared - 1)
    moved = [run_id for run_id in stamps if run_id not in held]
    for at in range(0, len(moved), TOGETHER):
        some = {run_id: news[run_id] for run_id in moved[at : at + TOGETHER]}
        held |= _brought_back(tx, live, some, remembered, service_metrics)
    return held


def _brought_back(
    tx: Transaction,
    live: LiveRuns,
    news: Mapping[UUID, Sequence[News]],
    remembered: Mapping[UUID, LiveRun],
    service_metrics: ServiceMetrics,
) -> dict[UUID, LiveRun]:
    """These runs, in as many statements as one would take."""
    run_ids = list(news)
    rows = runs.load_runs(tx, run_ids)  # after they were locked: what is read now stands until the commit
    kept = monitor_states.load_states(tx, run_ids)
    last_steps = observations.load_last_steps(tx, run_ids)
    decided = decisions.load_decisions(tx, run_ids)
    back = {}
    for run_id, run in rows.items():
        policy = live.policy(tx, run.policy_id)
        back[run_id], how = _left_off(run, policy, remembered.get(run_id), kept.get(run_id))
        service_metrics.live_runs.labels(how).inc()
    _read_on(tx, back, {run_id for run_id in back if _weighs(rows[run_id], news[run_id])})
    for run_id, run in rows.items():
        found = back[run_id]
        found.last_steps = last_steps.get(run_id, {})
        found.decided, found.let_run = run_id in decided, None  # a person may have had it stopped after all
        if found.monitor.verdict.verdict != run.verdict["verdict"]:  # judged by another policy, or another release
            found.reached = [found.monitor.verdict]
    return back


def _left_off(run: Run, policy: Policy, held: LiveRun | None, kept: StoredMonitorState | None) -> tuple[LiveRun, str]:
    """The run with its monitor as it was left, and how it is brought back from there."""
    if held is not None and _goes_on(held.run, run):
        held.run, held.told, held.shared = run, None, SHARED_FOR
        return held, "moved_on"
    state = None
    # Nothing was observed yet: there is nothing to go on from.
    if run.last_step is not None and kept is not None and kept.version >= run.rewritten_version:
        state = _restored(policy, kept)
    how = "rebuilt" if state is None else "restored"
    return LiveRun(run, policy, WatchedMetrics(run, policy), state or start(policy), {}, decided=False), how


def _goes_on(before: Run, run: Run) -> bool:
    """Whether all that another process did to the run was to add to its end."""
    return before.version >= run.rewritten_version


def _weighs(run: Run, news: Iterable[News]) -> bool:
    """Whether these news bring gold or a checkpoint, among which the best one is to be chosen."""
    gold = watched_metrics.find_eval_metric(run)
    return any(
        isinstance(item, Saved) or (isinstance(item, Points) and any(point.metric == gold for point in item.points))
        for item in news
    )


def _restored(policy: Policy, kept: StoredMonitorState) -> MonitorState | None:
    try:
        return state_from_json(policy, kept.state)
    except StaleState:
        return None


def _read_on(tx: Transaction, back: Mapping[UUID, LiveRun], weighed: Collection[UUID]) -> None:
    """Take in what these runs have not seen yet; those of `weighed` are to have their scores."""
    for run_id, found in back.items():
        if found.scores is None and (run_id in weighed or found.run.last_step is None):
            found.scores = Scores()
    scored = [run_id for run_id, found in back.items() if found.scores is not None]
    saved = checkpoints.load_checkpoints(tx, scored) if scored else {}
    wanted = {(run_id, name): step for run_id, found in back.items() for name, step in _unseen(found).items()}
    points = observations.load_series_after(tx, wanted, KEEP_EVERY) if wanted else {}
    for run_id, found in back.items():
        run, some = found.run, points.get(run_id, [])
        if some is None:  # there are many: they are read for this run alone, and its scores when they are asked for
            since, found.scores = after(tx, run, found.watch, found.monitor), None
        else:
            since = _past(found.watch, some, found.monitor)
        if found.scores is not None:
            gold = [
                score for score in watched_metrics.select_scores(run, some or ()) if score.step > found.scores.last_step
            ]
            _take_in(found.scores, gold, saved.get(run_id, ()))
        found.unkept += len(since) if found.count else REPLAY_WEIGHT * len(since)
        found.monitor, _ = advance(found.policy, found.monitor, since)
        found.count += len(since)
        found.trail.leave(found.count, found.monitor)


def _unseen(found: LiveRun) -> dict[str, int]:
    """From which step on each metric is to be read; nothing where nothing was observed."""
    if found.run.last_step is None:
        return {}
    seen, gold = found.monitor.last, found.watch.gold
    steps = dict.fromkeys(found.watch.metrics, 0 if seen is None else seen[0])
    if gold is not None and found.scores is not None:
        after_scores = found.scores.last_step + 1
        steps[gold] = min(after_scores, steps.get(gold, after_scores))
    return steps


def after(tx: Transaction, run: Run, watch: WatchedMetrics, state: MonitorState) -> list[Observation]:
    """What the monitor has not seen yet."""
    step = 0 if state.last is None else state.last[0]
    return _past(watch, observations.load_observations_after(tx, run.id, watch.metrics, step), state)


def _past(watch: WatchedMetrics, points: Iterable[Point], state: MonitorState) -> list[Observation]:
    last = state.last
    if last is None:
        return watch.observations(points)
    near = (point for point in points if point.step >= last[0])  # older gold is there for the scores alone
    return [item for item in watch.observations(near) if item.order > last]


def scores_of(tx: Transaction, run: Run, gold: str) -> Scores:
    """All finite gold scores and all checkpoints of a run."""
    scores = Scores()
    points = observations.load_series(tx, run.id, [gold])
    _take_in(scores, watched_metrics.select_scores(run, points), checkpoints.list_checkpoints(tx, run.id))
    return scores


def _take_in(scores: Scores, gold: Iterable[Score], saved: Iterable[Checkpoint]) -> None:
    scores.add(gold)
    for checkpoint in saved:
        scores.saved(checkpoint.step, checkpoint.uri)
