"""Loading runs: from the row, with what the cache still knows, a stored monitor, or all observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from uuid import UUID

from evalstop_detectors import MonitorState, Policy, StaleState, advance, find_request, start, state_from_json
from msgspec.structs import replace

from evalstop_service.errors import Behind, ServiceError
from evalstop_service.ingest.messages import CheckpointSaved, Message, Observations
from evalstop_service.ingest.monitor_moves import observations_past
from evalstop_service.ingest.run_state import KEEP_EVERY, RunState, Scores, with_decision
from evalstop_service.projects import policies
from evalstop_service.rules.run_results import Call
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store import checkpoints, decisions, eval_requests, monitor_states, observations, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.monitor_states import StoredMonitorState
from evalstop_service.store.runs import Run

TOGETHER = 64
"""Runs that are read at one time: with `KEEP_EVERY` values of each metric they are less than a hundred megabytes."""

REPLAY_WEIGHT = 8
"""What had to be replayed to restore a run would have to be again: each counts for so many towards storing it."""

SHARED_FOR = 16
"""Messages in a row that find a run unchanged before it is believed to be this process's alone again."""

Loaded = dict[UUID, RunState | ServiceError]


def load_runs(
    tx: Transaction,
    messages: Mapping[UUID, Sequence[Message]],
    known: Mapping[UUID, RunState],
    used: dict[UUID, Policy],
    counts: Counter[str],
) -> Loaded:
    """The runs of these messages as they stand; those that their projects do not have are left out.

    `known`: what is cached of them. `used`: policies in use, which never change; those that are read are added.
    `counts`: how many runs were loaded in which way (hit, moved_on, restored, rebuilt).
    """
    loaded: Loaded = {}
    run_ids = list(messages)
    for at in range(0, len(run_ids), TOGETHER):
        loaded |= _load_some(tx, run_ids[at : at + TOGETHER], messages, known, used, counts)
    return loaded


def _load_some(
    tx: Transaction,
    run_ids: Sequence[UUID],
    messages: Mapping[UUID, Sequence[Message]],
    known: Mapping[UUID, RunState],
    used: dict[UUID, Policy],
    counts: Counter[str],
) -> Loaded:
    """These runs, in as many statements as one would take.

    1. The rows come first. What is read after them may be newer; then the save fails, and the run is loaded again.
    2. A run that is as it is cached needs no more.
    3. The monitor of any other goes on from the cached one, from the stored one, or from the beginning.
    4. All catch up on what they have not seen, with the scores where a message brings an eval or a checkpoint.
    """
    found = runs.load_runs_with_counts(tx, run_ids)
    rows = {
        run_id: run
        for run_id, (run, _, _) in found.items()
        if any(message.project_id == run.project_id for message in messages[run_id])
    }
    loaded: Loaded = {}
    for run_id, run in rows.items():
        state = known.get(run_id)
        if state is not None and state.run.version == run.version:
            loaded[run_id] = replace(state, shared=max(0, state.shared - 1))
    counts["hit"] += len(loaded)
    moved = [run_id for run_id in rows if run_id not in loaded]
    if not moved:
        return loaded
    cold = [run_id for run_id in moved if not _was_only_added_to(rows[run_id], known.get(run_id))]
    stored = monitor_states.load_states(tx, cold) if cold else {}
    deciding = [run_id for run_id in moved if found[run_id].has_decision]
    decided = decisions.load_decisions(tx, deciding) if deciding else {}
    states: dict[UUID, RunState] = {}
    for run_id in moved:
        run = rows[run_id]
        policy = _find_policy(tx, run.policy_id, used)
        if policy is None:
            loaded[run_id] = Behind()
            continue
        state, way = _restored(run, policy, known.get(run_id), stored.get(run_id))
        counts[way] += 1
        state = replace(state, has_decision=False, final_decision=None)
        states[run_id] = with_decision(state, decided.get(run_id))
    scored = {run_id for run_id, state in states.items() if _brings_score(state, messages[run_id])}
    checkpoint_counts = {run_id: found[run_id].checkpoints for run_id in states}
    caught_up = _catch_up(tx, states, scored, checkpoint_counts)
    asked = {run_id: find_request(state.policy, state.monitor) for run_id, state in caught_up.items()}
    steps = {run_id: request.step for run_id, request in asked.items() if request is not None}
    unanswered = eval_requests.load_unanswered(tx, steps) if steps else {}
    for run_id, state in caught_up.items():
        state = replace(state, eval_request=unanswered.get(run_id))
        # Another policy or release may come to another verdict, which the next message records.
        differs = Call(state.monitor.verdict.verdict) is not state.run.verdict.verdict
        loaded[run_id] = replace(state, unrecorded=(state.monitor.verdict,)) if differs else state
    return loaded


def _find_policy(tx: Transaction, policy_id: UUID, used: dict[UUID, Policy]) -> Policy | None:
    """The policy with this id; None when a later release stored it and this one cannot read it."""
    if policy_id not in used:
        policy = policies.read_policy(tx, policy_id)
        if policy is None:
            return None
        used[policy_id] = policy
    return used[policy_id]


def _restored(
    run: Run, policy: Policy, known: RunState | None, stored: StoredMonitorState | None
) -> tuple[RunState, str]:
    """The run with a monitor to go on from, and which one."""
    if known is not None and _was_only_added_to(run, known):
        scores = known.usable_scores
        state = replace(known, run=run, recorded=None, unrecorded=(), shared=SHARED_FOR, scores=scores, combined=None)
        return state, "moved_on"
    policy = restrict_policy(policy, run)
    shared = SHARED_FOR if known is not None else 0
    monitor = None
    if run.last_step is not None and stored is not None and stored.version >= run.rewritten_version:
        monitor = _decoded(policy, stored)
    way = "rebuilt" if monitor is None else "restored"
    return RunState(run, policy, WatchedMetrics(run, policy), monitor or start(policy), {}, shared=shared), way


def _was_only_added_to(run: Run, known: RunState | None) -> bool:
    """Whether all that other processes did to a run since it was cached was to add to its end."""
    return known is not None and known.run.version >= run.rewritten_version


def _decoded(policy: Policy, stored: StoredMonitorState) -> MonitorState | None:
    try:
        return state_from_json(policy, stored.state)
    except StaleState:
        return None


def _brings_score(state: RunState, messages: Iterable[Message]) -> bool:
    """Whether these messages bring an eval or a checkpoint, among which the best one is to be chosen."""
    for message in messages:
        match message.content:
            case CheckpointSaved():
                return True
            case Observations(points) if any(state.watch.is_eval(point.metric) for point in points):
                return True
    return False


def _catch_up(
    tx: Transaction, states: Mapping[UUID, RunState], scored: Collection[UUID], checkpoint_counts: Mapping[UUID, int]
) -> dict[UUID, RunState]:
    """The states with what they have not seen yet; those of `scored` get their scores.

    Checkpoints were only added to those that scores know: as many are the same.
    """
    scores = {
        run_id: state.scores or Scores()
        for run_id, state in states.items()
        if state.scores is not None or run_id in scored or state.run.last_step is None
    }
    grown = [run_id for run_id, known in scores.items() if len(known.uris) != checkpoint_counts[run_id]]
    saved = checkpoints.load_checkpoints(tx, grown) if grown else {}
    wanted = {
        (run_id, metric): step
        for run_id, state in states.items()
        for metric, step in _unseen(state, scores.get(run_id)).items()
    }
    last_steps, series = observations.load_last_steps_and_series(tx, list(states), wanted, KEEP_EVERY)
    caught_up = {}
    for run_id, state in states.items():
        points = series.get(run_id, [])
        if points is None:  # too many to be read together: by itself, and its scores when they are asked for
            first = 0 if state.monitor.last is None else state.monitor.last[0]
            points = observations.load_observations_after(tx, run_id, state.watch.metrics, first)
            scores.pop(run_id, None)
        unseen = observations_past(state.monitor, state.watch.observations(points))
        monitor, _ = advance(state.policy, state.monitor, unseen)
        count = state.count + len(unseen)
        run_scores = scores.get(run_id)
        if run_scores is not None:
            evals = watched_metrics.select_scores(state.run, points)
            run_scores.add_scores([score for score in evals if score.step > run_scores.last_step])
            run_scores.add_checkpoints(saved.get(run_id, ()))
        caught_up[run_id] = replace(
            state,
            last_steps=last_steps[run_id],
            monitor=monitor,
            scores=run_scores,
            scores_taken=run_scores.taken if run_scores is not None else 0,
            count=count,
            unkept=state.unkept + (1 if state.count else REPLAY_WEIGHT) * len(unseen),
            trail=state.trail.extended(count, monitor) if unseen else state.trail,
        )
    return caught_up


def _unseen(state: RunState, scores: Scores | None) -> dict[str, int]:
    """From which step on each metric is to be read; nothing where nothing was observed."""
    if state.run.last_step is None:
        return {}
    seen, eval_metric = state.monitor.last, state.watch.eval_metric
    steps = dict.fromkeys(state.watch.metrics, 0 if seen is None else seen[0])
    if eval_metric is not None and scores is not None:
        after_scores = scores.last_step + 1
        steps[eval_metric] = min(after_scores, steps.get(eval_metric, after_scores))
    return steps
