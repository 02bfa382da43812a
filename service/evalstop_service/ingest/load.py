"""Loads runs: the row, with what the cache holds, a stored monitor, or all observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from uuid import UUID

from evalstop_detectors import MonitorState, Policy, StaleState, advance, find_request, start, state_from_json
from msgspec.structs import replace

from evalstop_service.errors import ServiceError, UnreadableRow
from evalstop_service.ingest.messages import CheckpointSaved, Message, Observations
from evalstop_service.ingest.monitor_moves import move_monitor, observations_past
from evalstop_service.ingest.run_state import (
    CHOICE_FAILED,
    KEEP_EVERY,
    RunState,
    Scores,
    describe_failure,
    with_decision,
)
from evalstop_service.projects import policies
from evalstop_service.rules.run_results import Call
from evalstop_service.runs import watched_metrics
from evalstop_service.runs.watched_metrics import WatchedMetrics, restrict_policy
from evalstop_service.store import checkpoints, decisions, eval_requests, monitor_states, observations, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.monitor_states import StoredMonitorState
from evalstop_service.store.runs import Run, RunWithCounts

TOGETHER = 64
"""Runs read at once: with `KEEP_EVERY` values of each metric they take less than a hundred megabytes."""

REPLAY_WEIGHT = 8
"""The weight of an observation replayed to restore a run, towards storing its monitor: it would be replayed again."""

SHARED_FOR = 16
"""After this many consecutive messages without outside changes a run counts as this process's alone."""

Loaded = dict[UUID, RunState | ServiceError]


def load_runs(
    tx: Transaction,
    messages: Mapping[UUID, Sequence[Message]],
    cached: Mapping[UUID, RunState],
    used: dict[UUID, Policy],
    counts: Counter[str],
) -> Loaded:
    """The current states of these messages' runs; runs that their projects do not have are left out.

    `cached`: their cached states. `used`: cache of policies, which never change; policies read are added. `counts`: the
    number of runs loaded each way (hit, moved_on, restored, rebuilt).
    """
    loaded: Loaded = {}
    run_ids = list(messages)
    for at in range(0, len(run_ids), TOGETHER):
        loaded |= _load_some(tx, run_ids[at : at + TOGETHER], messages, cached, used, counts)
    return loaded


def _load_some(
    tx: Transaction,
    run_ids: Sequence[UUID],
    messages: Mapping[UUID, Sequence[Message]],
    cached: Mapping[UUID, RunState],
    used: dict[UUID, Policy],
    counts: Counter[str],
) -> Loaded:
    """Load these runs, in as many statements as for one.

    1. Read the rows first. Later reads may be newer; then the save fails, and the run is loaded again.
    2. A run that equals its cached state needs nothing else.
    3. The monitor of any other continues from the cached one, the stored one, or the beginning.
    4. All catch up on new observations, with their scores if a message brings an eval or a checkpoint.
    """
    rows = {
        run_id: row
        for run_id, row in runs.load_runs_with_counts(tx, run_ids).items()
        if any(message.project_id == row.run.project_id for message in messages[run_id])
    }
    loaded: Loaded = {}
    for run_id, (run, _, _) in rows.items():
        state = cached.get(run_id)
        if state is not None and state.run.version == run.version:
            loaded[run_id] = replace(state, shared=max(0, state.shared - 1))
    counts["hit"] += len(loaded)
    changed = {run_id: row for run_id, row in rows.items() if run_id not in loaded}
    if not changed:
        return loaded
    restored = _restore_states(tx, changed, cached, used, counts)
    loaded |= restored
    states = {run_id: state for run_id, state in restored.items() if isinstance(state, RunState)}
    scored = {run_id for run_id, state in states.items() if _brings_score(state, messages[run_id])}
    caught_up = _catch_up(tx, states, scored, {run_id: row.checkpoints for run_id, row in changed.items()})
    policy_requests = {run_id: find_request(state.policy, state.monitor) for run_id, state in caught_up.items()}
    places = {
        run_id: (caught_up[run_id].run.attempt, request.step)
        for run_id, request in policy_requests.items()
        if request is not None
    }
    unanswered = eval_requests.load_unanswered(tx, places) if places else {}
    for run_id, state in caught_up.items():
        state = replace(state, eval_request=unanswered.get(run_id))
        # Another policy or release may reach another verdict, which the next message records.
        differs = Call(state.monitor.verdict.verdict) is not state.run.verdict.verdict
        loaded[run_id] = replace(state, unrecorded=(state.monitor.verdict,)) if differs else state
    return loaded


def _restore_states(
    tx: Transaction,
    rows: Mapping[UUID, RunWithCounts],
    cached: Mapping[UUID, RunState],
    used: dict[UUID, Policy],
    counts: Counter[str],
) -> Loaded:
    """The runs of these rows with a monitor to continue from and their decision."""
    cold = [run_id for run_id, row in rows.items() if not _was_only_added_to(row.run, cached.get(run_id))]
    stored = monitor_states.load_states(tx, cold) if cold else {}
    deciding = [run_id for run_id, row in rows.items() if row.has_decision]
    decided = decisions.load_decisions(tx, deciding) if deciding else {}
    restored: Loaded = {}
    for run_id, (run, _, _) in rows.items():
        policy = _find_policy(tx, run.policy_id, used)
        if policy is None:
            restored[run_id] = UnreadableRow("a later release stored the run's policy, or it is damaged")
            continue
        state, source = _restore_state(run, policy, cached.get(run_id), stored.get(run_id))
        counts[source] += 1
        state = replace(state, has_decision=False, final_decision=None)
        restored[run_id] = with_decision(state, decided.get(run_id))
    return restored


def _find_policy(tx: Transaction, policy_id: UUID, used: dict[UUID, Policy]) -> Policy | None:
    """The policy with this id; None when a later release stored it and this one cannot read it."""
    if policy_id not in used:
        policy = policies.read_policy(tx, policy_id)
        if policy is None:
            return None
        used[policy_id] = policy
    return used[policy_id]


def _restore_state(
    run: Run, policy: Policy, cached: RunState | None, stored: StoredMonitorState | None
) -> tuple[RunState, str]:
    """The run with a monitor to continue from, and where that came from."""
    if cached is not None and _was_only_added_to(run, cached):
        scores = cached.usable_scores
        state = replace(cached, run=run, recorded=None, unrecorded=(), shared=SHARED_FOR, scores=scores, combined=None)
        return state, "moved_on"
    policy = restrict_policy(policy, run)
    shared = SHARED_FOR if cached is not None else 0
    monitor = None
    if run.last_step is not None and stored is not None and stored.version >= run.rewritten_version:
        monitor = _decode_monitor(policy, stored)
    source = "rebuilt" if monitor is None else "restored"
    return RunState(run, policy, WatchedMetrics(run, policy), monitor or start(policy), {}, shared=shared), source


def _was_only_added_to(run: Run, cached: RunState | None) -> bool:
    """Whether other processes have only appended to a run since it was cached."""
    return cached is not None and cached.run.version >= run.rewritten_version


def _decode_monitor(policy: Policy, stored: StoredMonitorState) -> MonitorState | None:
    try:
        return state_from_json(policy, stored.state)
    except StaleState:
        return None


def _brings_score(state: RunState, messages: Iterable[Message]) -> bool:
    """Whether these messages bring an eval or a checkpoint, so that the best one has to be chosen."""
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
    """Catch the states up on what they have not seen; those in `scored` get their scores.

    Checkpoints are only ever added while scores are kept, so an equal count means that they are the same.
    """
    scores = {
        run_id: state.scores or Scores()
        for run_id, state in states.items()
        if state.scores is not None or run_id in scored or state.run.last_step is None
    }
    grown = [run_id for run_id, scores_of_run in scores.items() if len(scores_of_run.uris) != checkpoint_counts[run_id]]
    saved = checkpoints.load_checkpoints(tx, grown) if grown else {}
    scoreless = {
        (run_id, metric): step
        for run_id, state in states.items()
        for metric, step in _find_unseen_steps(state, scores.get(run_id)).items()
    }
    last_steps, series = observations.load_last_steps_and_series(tx, list(states), scoreless, KEEP_EVERY)
    caught_up = {}
    for run_id, state in states.items():
        points = series.get(run_id, [])
        if points is None:  # too many to read together: read alone, and its scores on demand
            first = 0 if state.monitor.last is None else state.monitor.last[0]
            points = observations.load_observations_after(tx, run_id, state.watch.metrics, first)
            scores.pop(run_id, None)
        unseen = observations_past(state.monitor, state.watch.observations(points))
        # Without pauses: on the embedded database all commits wait for the thread that loads.
        moved, _ = move_monitor(state, unseen, advance) if unseen else (state, [])
        run_scores = scores.get(run_id)
        if run_scores is not None:
            evals = watched_metrics.select_scores(state.run, points)
            try:
                run_scores.add_scores([score for score in evals if score.step > run_scores.last_step])
                run_scores.add_checkpoints(saved.get(run_id, ()))
            except Exception as error:  # the message that needs them builds them again, and records a failure
                describe_failure(state.run, CHOICE_FAILED, error)
                run_scores = None
        caught_up[run_id] = replace(
            moved,
            last_steps=last_steps[run_id],
            scores=run_scores,
            scores_count=run_scores.count if run_scores is not None else 0,
            unkept=state.unkept + (1 if state.count else REPLAY_WEIGHT) * (moved.unkept - state.unkept),
        )
    return caught_up


def _find_unseen_steps(state: RunState, scores: Scores | None) -> dict[str, int]:
    """The step from which each metric has to be read; empty if nothing was observed."""
    if state.run.last_step is None:
        return {}
    last_step, eval_metric = state.monitor.last, state.watch.eval_metric
    steps = dict.fromkeys(state.watch.metrics, 0 if last_step is None else last_step[0])
    if eval_metric is not None and scores is not None:
        after_scores = scores.last_step + 1
        steps[eval_metric] = min(after_scores, steps.get(eval_metric, after_scores))
    return steps
