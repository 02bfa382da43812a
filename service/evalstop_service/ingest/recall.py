"""Bringing runs back: from this process's memory, from a kept state and what came since, or from all observations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from uuid import UUID

from evalstop_detectors import MonitorState, Observation, Policy, Score, StaleState, advance, start, state_from_json

from evalstop_service import watching
from evalstop_service.ingest.live import SHARED_FOR, LiveRun, LiveRuns, Scores
from evalstop_service.store import checkpoints, decisions, monitors, observations, runs
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.database import Transaction
from evalstop_service.store.monitors import KeptMonitor
from evalstop_service.store.observations import Point
from evalstop_service.store.runs import Run
from evalstop_service.telemetry import Telemetry
from evalstop_service.watching import Watch


def recall(tx: Transaction, live: LiveRuns, run_ids: Collection[UUID], telemetry: Telemetry) -> dict[UUID, LiveRun]:
    """Lock these runs and bring them back as they stand; those that do not exist are left out."""
    stamps = runs.lock_many(tx, list(run_ids))
    remembered = live.take_out(stamps)
    present = {run_id: held for run_id, held in remembered.items() if held.stamp == stamps[run_id]}
    telemetry.live_runs.labels("hit").inc(len(present))
    for held in present.values():
        held.shared = max(0, held.shared - 1)
    moved = [run_id for run_id in stamps if run_id not in present]
    return present | _brought_back(tx, live, moved, remembered, telemetry) if moved else present


def _brought_back(
    tx: Transaction,
    live: LiveRuns,
    run_ids: Sequence[UUID],
    remembered: Mapping[UUID, LiveRun],
    telemetry: Telemetry,
) -> dict[UUID, LiveRun]:
    rows = runs.load_many(tx, run_ids)  # after they were locked: what is read now stands until the commit
    kept = monitors.find_many(tx, run_ids)
    last_steps = observations.last_steps(tx, run_ids)
    decided = decisions.of_runs(tx, run_ids)
    unseen = [run_id for run_id, run in rows.items() if run.last_step is None]
    saved = checkpoints.of_runs(tx, unseen) if unseen else {}
    back = {}
    for run_id, run in rows.items():
        policy = live.policy(tx, run.policy_id)
        found, how = _monitored(tx, run, policy, remembered.get(run_id), kept.get(run_id))
        telemetry.live_runs.labels(how).inc()
        found.last_steps = last_steps.get(run_id, {})
        found.decided, found.let_run = run_id in decided, None  # a person may have had it stopped after all
        if run.last_step is None:  # many runs begin together: what there is of them has been read together
            found.scores = _scores((), saved.get(run_id, ()))
        if found.monitor.verdict.verdict != run.verdict["verdict"]:  # judged by another policy, or another release
            found.reached = [found.monitor.verdict]
        back[run_id] = found
    return back


def _monitored(
    tx: Transaction, run: Run, policy: Policy, held: LiveRun | None, kept: KeptMonitor | None
) -> tuple[LiveRun, str]:
    """The run with its monitor up to date, and how it was brought back."""
    # A state beside the row was written by a release that keeps no account of what it rewrote.
    trusted = run.monitor_state is None
    if trusted and held is not None and _goes_on(held.run, run):
        return _moved_on(tx, run, held), "moved_on"
    watch, state = Watch(run, policy), None
    if run.last_step is None:  # nothing was observed yet: there is nothing to read
        return LiveRun(run, policy, watch, start(policy), {}, decided=False), "rebuilt"
    if trusted and kept is not None and kept.version >= run.rewritten_version:
        state = _restored(policy, kept)
    if state is not None:
        since = after(tx, run, watch, state)
        found = LiveRun(run, policy, watch, state, {}, decided=False)
        how = "restored"
    else:
        since = watch.observations(observations.series(tx, run.id, watch.metrics))
        found = LiveRun(run, policy, watch, start(policy), {}, decided=False)
        how = "rebuilt"
    found.monitor, _ = advance(policy, found.monitor, since)
    found.count = found.unkept = len(since)
    found.trail.leave(found.count, found.monitor)
    return found, how


def _goes_on(before: Run, run: Run) -> bool:
    """Whether all that another process did to the run was to add to its end."""
    return before.version >= run.rewritten_version


def _moved_on(tx: Transaction, run: Run, held: LiveRun) -> LiveRun:
    since = after(tx, run, held.watch, held.monitor)
    held.run = run
    held.monitor, _ = advance(held.policy, held.monitor, since)
    held.count += len(since)
    held.unkept = 0  # whoever moved it on sees to keeping it
    held.shared = SHARED_FOR
    held.told = None
    if held.scores is not None and not _follow(tx, run, held.scores):
        held.scores = None
    return held


def _restored(policy: Policy, kept: KeptMonitor) -> MonitorState | None:
    try:
        return state_from_json(policy, kept.state)
    except StaleState:
        return None


def after(tx: Transaction, run: Run, watch: Watch, state: MonitorState) -> list[Observation]:
    """What the monitor has not seen yet."""
    seen = state.last
    if seen is None:
        return watch.observations(observations.series(tx, run.id, watch.metrics))
    points = observations.after(tx, run.id, watch.metrics, seen[0])
    return [item for item in watch.observations(points) if item.order > seen]


def scores_of(tx: Transaction, run: Run, gold: str) -> Scores:
    """All finite gold scores and all checkpoints of a run."""
    return _scores(watching.scores(run, observations.series(tx, run.id, [gold])), checkpoints.listing(tx, run.id))


def _scores(gold: Iterable[Score], saved: Iterable[Checkpoint]) -> Scores:
    scores = Scores()
    scores.add(gold)
    for checkpoint in saved:
        scores.saved(checkpoint.step, checkpoint.uri)
    return scores


def _follow(tx: Transaction, run: Run, scores: Scores) -> bool:
    """Take in the scores and checkpoints that came since; False if they do not simply follow."""
    for checkpoint in checkpoints.listing(tx, run.id):
        scores.saved(checkpoint.step, checkpoint.uri)
    gold = watching.eval_metric(run)
    if gold is None:
        return True
    since: list[Point] = observations.after(tx, run.id, [gold], scores.last_step + 1)
    return scores.add(watching.scores(run, since))
