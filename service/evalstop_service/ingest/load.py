"""Loads runs: the row, with what the cache holds, a stored monitor, or all observations; and finds what is new."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from uuid import UUID

from evalstop_detectors import MonitorState, Policy, StaleState, start, state_from_json
from msgspec import structs
from msgspec.structs import replace

from evalstop_service.domain.run import Call, DetectorCall
from evalstop_service.ingest.messages import ValueConflict
from evalstop_service.ingest.run_state import SAVE_EVERY, RunState, move_monitor, observations_past
from evalstop_service.projects import policies
from evalstop_service.runs.watched_metrics import WatchedMetrics, record_verdict, restrict_policy, select_scores
from evalstop_service.store import decisions, ingest, observations, run_details, runs
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.ingest import StoredMonitorState
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.run_details import EvalRequest
from evalstop_service.store.runs import Run, RunWithCounts

TOGETHER = 64
"""Runs read at once: with `SAVE_EVERY` values of each metric they take less than a hundred megabytes."""

REPLAY_WEIGHT = 8
"""The weight of an observation replayed to restore a run, towards storing its monitor: it would be replayed again."""


class RunCache:
    """The states of recently used runs, up to `max_bytes`: only what was saved or loaded is put here.

    A state is valid while its version is that of the run's row. `shared`: runs that another process saved since this
    one did: their versions are compared before use, so that no commit is made in vain.
    """

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._states: OrderedDict[UUID, tuple[RunState, int]] = OrderedDict()
        self.bytes = 0
        self.shared: set[UUID] = set()

    def find_state(self, run_id: UUID) -> RunState | None:
        """The cached state of a run; its row may be newer."""
        entry = self._states.get(run_id)
        return entry[0] if entry is not None else None

    def put_states(self, states: Iterable[RunState]) -> None:
        """Cache these states; the least recently used ones are evicted."""
        for state in states:
            size, (_, before) = state.size_bytes, self._states.pop(state.run.id, (None, 0))
            self._states[state.run.id] = (state, size)
            self.bytes += size - before
        while self.bytes > self._max_bytes and len(self._states) > 1:
            self.drop_states([next(iter(self._states))])

    def drop_states(self, run_ids: Iterable[UUID]) -> None:
        """Evict these runs."""
        for run_id in run_ids:
            _, size = self._states.pop(run_id, (None, 0))
            self.bytes -= size
            self.shared.discard(run_id)

    def __len__(self) -> int:
        return len(self._states)


def load_runs(
    tx: Transaction,
    projects_by_run: Mapping[UUID, Set[UUID]],
    cached: Mapping[UUID, RunState],
    used: dict[UUID, Policy],
    counts: Counter[str],
) -> dict[UUID, RunState]:
    """The current states of these runs; those that belong to none of the projects given are left out.

    `cached`: their cached states. `used`: cache of policies, which never change; policies read are added. `counts`: the
    number of runs loaded each way (hit, moved_on, restored, rebuilt).
    """
    loaded: dict[UUID, RunState] = {}
    run_ids = list(projects_by_run)
    for at in range(0, len(run_ids), TOGETHER):
        some = {run_id: projects_by_run[run_id] for run_id in run_ids[at : at + TOGETHER]}
        loaded |= _load_some(tx, some, cached, used, counts)
    return loaded


def list_calls(tx: Transaction, run: Run) -> list[DetectorCall]:
    """What each detector of the run's policy makes of it, those with a say first.

    Evidence is that of the stored observations; calls are in the row, and stay when observations are deleted.
    """
    state = load_runs(tx, {run.id: {run.project_id}}, {}, {}, Counter())[run.id]
    monitor, row = state.monitor, state.run
    listed = []
    for place, ((name, member), item) in enumerate(zip(state.policy.panel.items(), monitor.evidence, strict=True)):
        value, note, turn = (None, "", None) if item is None else (item.value, item.note, item.turn_step)
        step, at = structs.astuple(row.calls[name]) if name in row.calls else (None, None)
        observes, limit = place >= len(state.policy.members), member.thresholds.stop_at
        listed.append(DetectorCall(name, observes, member.detector.kind, limit, value, note, turn, step, at))
    return listed


def load_followed(
    tx: Transaction, states: Iterable[RunState]
) -> tuple[dict[UUID, Decision | None], dict[UUID, EvalRequest]]:
    """The decisions of these runs, where they may have changed, and the paired evaluations that await their answers."""
    states = list(states)
    places = {
        state.run.id: (state.run.attempt, request.step)
        for state in states
        if (request := state.requested_eval) is not None
    }
    deciding = [state.run.id for state in states if state.awaits_decision]
    return (
        dict.fromkeys(deciding) | decisions.load_decisions(tx, deciding) if deciding else {},
        run_details.load_unanswered(tx, places) if places else {},
    )


def find_stored_monitor(policy: Policy, run: Run, stored: StoredMonitorState | None) -> MonitorState | None:
    """The stored monitor, unless the run's past was changed since, or it is of another policy or release."""
    if run.last_step is None or stored is None or stored.version < run.rewritten_version:
        return None
    try:
        return state_from_json(policy, stored.state)
    except StaleState:
        return None


def compare_with_stored(
    tx: Transaction, before: RunState, points: Sequence[PostedObservation]
) -> tuple[list[PostedObservation], tuple[ValueConflict, ...]]:
    """The observations that are new, and those that contradict stored ones."""
    last_steps = dict(before.last_steps)
    new: list[PostedObservation] = []
    doubtful: list[PostedObservation] = []
    for point in points:
        (new if point.step > last_steps.get(point.metric, -1) else doubtful).append(point)
        last_steps[point.metric] = max(point.step, last_steps.get(point.metric, -1))
    identities = {point.identity for point in doubtful}
    values = observations.load_live_values(tx, before.run.id, identities) if identities else {}
    values |= {point.identity: point.value for point in new}
    late: list[PostedObservation] = []
    conflicts: list[ValueConflict] = []
    for point in doubtful:
        value = values.get(point.identity)
        if value is None:
            values[point.identity] = point.value
            late.append(point)
        elif value != point.value and not (value != value and point.value != point.value):  # NaN repeats NaN
            conflicts.append(ValueConflict(point, value))
    return [*new, *late], tuple(conflicts)


def _load_some(
    tx: Transaction,
    projects_by_run: Mapping[UUID, Set[UUID]],
    cached: Mapping[UUID, RunState],
    used: dict[UUID, Policy],
    counts: Counter[str],
) -> dict[UUID, RunState]:
    """Load these runs, in as many statements as for one.

    1. Read the rows first. Later reads may be newer; then the save fails, and the run is loaded again.
    2. A run that equals its cached state needs nothing else.
    3. The monitor of any other continues from the cached one, the stored one, or the beginning.
    4. All catch up on new observations and checkpoints.
    """
    rows = {
        run_id: row
        for run_id, row in runs.load_runs_with_counts(tx, list(projects_by_run)).items()
        if row.run.project_id in projects_by_run[run_id]
    }
    loaded: dict[UUID, RunState] = {}
    for run_id, (run, _, _) in rows.items():
        state = cached.get(run_id)
        if state is not None and state.run.version == run.version:
            loaded[run_id] = state
    counts["hit"] += len(loaded)
    changed = {run_id: row for run_id, row in rows.items() if run_id not in loaded}
    if changed:
        restored = _restore_states(tx, changed, cached, used, counts)
        loaded |= _catch_up(tx, restored, {run_id: row.checkpoints for run_id, row in changed.items()})
    return loaded


def _restore_states(
    tx: Transaction,
    rows: Mapping[UUID, RunWithCounts],
    cached: Mapping[UUID, RunState],
    used: dict[UUID, Policy],
    counts: Counter[str],
) -> dict[UUID, RunState]:
    """The runs of these rows with a monitor to continue from and their decision."""
    appended = {run_id for run_id, row in rows.items() if _was_only_added_to(row.run, cached.get(run_id))}
    cold = [run_id for run_id in rows if run_id not in appended]
    stored = ingest.load_states(tx, cold) if cold else {}
    deciding = [run_id for run_id, row in rows.items() if row.has_decision]
    decided = decisions.load_decisions(tx, deciding) if deciding else {}
    restored: dict[UUID, RunState] = {}
    for run_id, (run, _, _) in rows.items():
        if run.policy_id not in used:
            used[run.policy_id] = policies.read_policy(tx, run.policy_id)
        decision = decided.get(run_id)
        if run_id in appended:
            counts["moved_on"] += 1
            restored[run_id] = replace(cached[run_id], run=run, decision=decision, combined=None)
            continue
        policy = restrict_policy(used[run.policy_id], run)
        monitor = find_stored_monitor(policy, run, stored.get(run_id))
        counts["rebuilt" if monitor is None else "restored"] += 1
        watch = WatchedMetrics(run, policy)
        restored[run_id] = RunState(run, watch, monitor or start(policy), {}, decision=decision)
    return restored


def _was_only_added_to(run: Run, cached: RunState | None) -> bool:
    """Whether other processes have only appended to a run since it was cached."""
    return cached is not None and cached.run.version >= run.rewritten_version


def _catch_up(
    tx: Transaction, states: Mapping[UUID, RunState], checkpoint_counts: Mapping[UUID, int]
) -> dict[UUID, RunState]:
    """Catch the states up on what they have not seen.

    Checkpoints are only ever added to a cached run, so an equal count means that they are the same.
    """
    grown = [run_id for run_id, state in states.items() if len(state.scores.addresses) != checkpoint_counts[run_id]]
    saved = run_details.load_checkpoints(tx, grown) if grown else {}
    unseen = {run_id: _find_unseen_steps(state) for run_id, state in states.items()}
    series_steps = {(run_id, metric): step for run_id, steps in unseen.items() for metric, step in steps.items()}
    last_steps = observations.load_last_steps(tx, [state.run for state in states.values()])
    series = observations.load_together(tx, series_steps, SAVE_EVERY)
    caught_up = {}
    for run_id, state in states.items():
        points = series.get(run_id, [])
        if points is None:  # too many to read together
            points = observations.load_each_after(tx, run_id, unseen[run_id])
        past = observations_past(state.monitor, state.watch.observations(points))
        # Without pauses: on the embedded database all commits wait for the thread that loads.
        moved, _ = move_monitor(state, past, pauses=False)
        last_score = int(state.scores.steps[-1]) if len(state.scores.steps) else -1
        evals = [score for score in select_scores(state.run, points) if score.step > last_score]
        scores = state.scores.add_scores(evals)
        if run_id in saved:
            scores = scores.add_checkpoints({item.step: item.uri for item in saved[run_id]})
        weight = 1 if state.last_steps else REPLAY_WEIGHT  # only a cached state has seen steps
        caught_up[run_id] = replace(
            moved,
            run=_correct_evidence(moved),
            last_steps=last_steps[run_id],
            scores=scores,
            unsaved=state.unsaved + weight * (moved.unsaved - state.unsaved),
        )
    return caught_up


def _find_unseen_steps(state: RunState) -> dict[str, int]:
    """The first step to read of each metric; empty if nothing was observed."""
    if state.run.last_step is None:
        return {}
    last, eval_metric = state.monitor.last, state.watch.eval_metric
    steps = dict.fromkeys(state.watch.metrics, 0 if last is None else last[0])
    if eval_metric is not None:
        after_scores = int(state.scores.steps[-1]) + 1 if len(state.scores.steps) else 0
        steps[eval_metric] = min(after_scores, steps.get(eval_metric, after_scores))
    return steps


def _correct_evidence(state: RunState) -> Run:
    """The row with the verdict of the monitor, if both call for the same: its evidence may be of another plan."""
    run, verdict = state.run, state.monitor.verdict
    if Call(verdict.verdict) is not run.verdict.verdict:
        return run
    recorded = record_verdict(verdict)
    return run if recorded == run.verdict else replace(run, verdict=recorded)
