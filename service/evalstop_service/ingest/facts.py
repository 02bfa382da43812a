"""Facts: what a message needs to know beyond the run's state, and how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import msgspec

from evalstop_service.ingest.run_state import RunState
from evalstop_service.store import checkpoints, decisions, observations, projects, runs
from evalstop_service.store.checkpoints import Checkpoint
from evalstop_service.store.database import Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run


class Needs(msgspec.Struct, frozen=True):
    """The facts that have to be loaded before a message can be applied.

    `identities`: (metric, step) whose stored values are needed. `series`: the step from which each metric is needed.
    `resumed_at`: an attempt begins at this step.
    """

    identities: frozenset[tuple[str, int]] = frozenset()
    series: tuple[tuple[str, int], ...] = ()
    checkpoints: bool = False
    decision: bool = False
    role_patterns: bool = False
    metrics_quota: bool = False
    resumed_at: int | None = None

    def __or__(self, other: Needs) -> Needs:
        if other is NOTHING_NEEDED:
            return self
        if self is NOTHING_NEEDED:
            return other
        first_steps = dict(self.series)
        for metric, step in other.series:
            first_steps[metric] = min(step, first_steps.get(metric, step))
        return Needs(
            self.identities | other.identities,
            tuple(sorted(first_steps.items())),
            self.checkpoints or other.checkpoints,
            self.decision or other.decision,
            self.role_patterns or other.role_patterns,
            self.metrics_quota or other.metrics_quota,
            other.resumed_at if self.resumed_at is None else self.resumed_at,
        )


NOTHING_NEEDED = Needs()
_DECISION = Needs(decision=True)


class Facts(msgspec.Struct, frozen=True):
    """The facts for the next message of a run at this `version`; `needs` says which of them were loaded.

    `points`: of the series, by ascending step. `decision`: on the current attempt. `attempt_began_at`: the step from
    which the current attempt was resumed. `attempt_is_empty`: it has no observations or checkpoints. `last_steps`: the
    highest live step of each metric that is not past `needs.resumed_at`.
    """

    needs: Needs = NOTHING_NEEDED
    version: int | None = None
    values: Mapping[tuple[str, int], float] = {}
    points: tuple[PostedObservation, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    decision: Decision | None = None
    role_patterns: tuple[Mapping[str, str], ...] = ()
    metrics_quota: int = 0
    attempt_began_at: int | None = None
    attempt_is_empty: bool = False
    last_steps: Mapping[str, int] = {}

    def find_missing(self, needs: Needs) -> Needs | None:
        """What to load, together with what was, if anything that is needed was not loaded."""
        if needs is NOTHING_NEEDED:
            return None
        all_needs = self.needs | needs
        return None if all_needs == self.needs else all_needs

    @property
    def of_later_messages(self) -> Facts:
        """The facts that stay true while messages of the run wait to be saved: all but those about its observations."""
        return Facts(Needs(decision=self.needs.decision), self.version, decision=self.decision)


NO_FACTS = Facts()


def needs_of_decision(state: RunState) -> Needs:
    """The decision, if there is one that may have changed since it was loaded."""
    return _DECISION if state.has_decision and state.final_decision is None else NOTHING_NEEDED


def needs_of_past(state: RunState, *, replayed: bool = False, rescored: bool = False, turned: bool = False) -> Needs:
    """The stored observations that a replay, rebuilt scores or a new change point in hindsight require."""
    if not (replayed or rescored or turned):
        return NOTHING_NEEDED
    series: dict[str, int] = {}
    if replayed:
        series = dict.fromkeys(state.watch.metrics, 0 if state.monitor.last is None else state.monitor.last[0])
    if state.watch.eval_metric is not None and (rescored or turned):
        series[state.watch.eval_metric] = 0
    return Needs(series=tuple(sorted(series.items())), checkpoints=rescored and state.watch.eval_metric is not None)


def load_facts(tx: Transaction, needs_by_run: Mapping[UUID, tuple[Run, Needs]]) -> dict[UUID, Facts]:
    """The facts that these runs' messages need."""
    # The versions are read first: if the facts are newer, the version comparison fails when they are saved.
    versions = runs.load_versions(tx, list(needs_by_run))
    deciding = [run_id for run_id, (_, needs) in needs_by_run.items() if needs.decision]
    by_run = decisions.load_decisions(tx, deciding) if deciding else {}
    return {
        run_id: _facts_of(tx, run, needs, versions.get(run_id), by_run.get(run_id))
        for run_id, (run, needs) in needs_by_run.items()
    }


def _facts_of(tx: Transaction, run: Run, needs: Needs, version: int | None, decision: Decision | None) -> Facts:
    saved = checkpoints.list_checkpoints(tx, run.id) if needs.checkpoints or needs.resumed_at is not None else []
    project = projects.get_project(tx, run.project_id) if needs.role_patterns or needs.metrics_quota else None
    facts = Facts(
        needs,
        version,
        values=observations.load_live_values(tx, run.id, needs.identities) if needs.identities else {},
        points=tuple(observations.load_each_after(tx, run.id, dict(needs.series))) if needs.series else (),
        checkpoints=tuple(saved),
        decision=decision,
        role_patterns=tuple(project.role_patterns) if project is not None else (),
        metrics_quota=project.quotas.metrics_per_run if project is not None else 0,
    )
    if needs.resumed_at is None:
        return facts
    in_this_attempt = any(checkpoint.attempt == run.attempt for checkpoint in saved)
    return msgspec.structs.replace(
        facts,
        attempt_began_at=runs.get_resumed_step(tx, run),
        attempt_is_empty=not in_this_attempt and not observations.has_observations(tx, run.id, run.attempt),
        last_steps=observations.load_last_steps(tx, [run.id], until=needs.resumed_at)[run.id],
    )
