"""Replays logged runs through a policy: the verdicts of `monitor.step`, as in the service, for many runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from evalstop_detectors import (
    Evidence,
    PastRun,
    Policy,
    choose_best,
    find_calls,
    name_calls,
    replay,
    replay_runs,
    start,
    step,
)

from evalstop_lab.replay.runs import MAX_STEP, Run


@dataclass(frozen=True)
class Judged:
    """The result of replaying a run.

    `best_step` is the eval of the best checkpoint, chosen among those up to the stop. `detectors` has the evidence of
    each member of the policy by its id, at the stop or at the end. `calls`: by id of all members, observers included,
    the step of the first call for a stop in the whole run.
    """

    run: str
    verdict: str
    stop_step: int | None
    suspect_step: int | None
    best_step: int | None
    reason: str
    detectors: dict[str, dict[str, Any]]
    calls: dict[str, int | None] = field(default_factory=dict)


def judge_runs(policy: Policy, runs: Sequence[Run]) -> list[Judged]:
    """Replay settled runs, each up to its stop: later observations change no verdict. No run is stopped on a guess."""
    judged: dict[int, Judged] = {}
    for guessed in {run.roles.guessed for run in runs}:
        places = [place for place, run in enumerate(runs) if run.roles.guessed == guessed]
        alike = _judge_alike(policy.with_guessed(guessed), [runs[place] for place in places])
        judged.update(zip(places, alike, strict=True))
    return [judged[place] for place in range(len(runs))]


def _judge_alike(policy: Policy, runs: Sequence[Run]) -> list[Judged]:
    columns = [run.columns() for run in runs]
    together = iter(replay_runs(policy, [item for item in columns if item is not None]))
    past_runs = (
        _replay_steps(policy.unobserved, run) if item is None else next(together)
        for run, item in zip(runs, columns, strict=True)
    )
    return [_judge_run(policy, run, past) for run, past in zip(runs, past_runs, strict=True)]


def judge_with_calls(policy: Policy, runs: Sequence[Run]) -> list[Judged]:
    """`judge_runs`, with the calls."""
    columns = [run.columns() for run in runs]
    together = iter(find_calls(policy, [item for item in columns if item is not None]))
    calls = (
        name_calls(policy, replay(policy, run.observations())) if item is None else next(together)
        for run, item in zip(runs, columns, strict=True)
    )
    return [replace(item, calls=called) for item, called in zip(judge_runs(policy, runs), calls, strict=True)]


def _replay_steps(policy: Policy, run: Run) -> PastRun:
    state = start(policy)
    for observation in run.observations():
        state, verdict = step(policy, state, observation)
        if verdict.stops:
            break
    return PastRun(state.verdict, state.suspect_step, state.evidence)


def _judge_run(policy: Policy, run: Run, past: PastRun) -> Judged:
    verdict = past.verdict
    stop_step = verdict.step if verdict.stops else None
    best = choose_best(run.score_columns(MAX_STEP if stop_step is None else stop_step))
    return Judged(
        run=run.name,
        verdict=str(verdict.verdict),
        stop_step=stop_step,
        suspect_step=past.suspect_step,
        best_step=None if best is None else best.step,
        reason=verdict.reason,
        detectors=_encode_members(policy, past.evidence),
    )


def _encode_members(policy: Policy, evidence: Sequence[Evidence | None]) -> dict[str, dict[str, Any]]:
    """The evidence and thresholds of each member; members without evidence are left out."""
    by_member = {}
    for name, member, item in zip(policy.ids, policy.members, evidence, strict=True):
        if item is not None:
            thresholds = msgspec.to_builtins(member.thresholds)
            by_member[name] = {"detector": member.detector.name} | msgspec.to_builtins(item) | thresholds
    return by_member
