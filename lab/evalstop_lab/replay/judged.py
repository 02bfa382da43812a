"""One logged run through a policy: by the same `monitor.step` that the service calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from evalstop_detectors import (
    BestSoFar,
    Chooser,
    Evidence,
    Policy,
    SmoothedMaximum,
    start,
    step,
)

from evalstop_lab.replay.runs import Run

CHOOSER: Chooser = SmoothedMaximum()


@dataclass(frozen=True)
class Judged:
    """What became of a run.

    `ground`: why it was stopped, `turned` or `levelled_off`. `best_step` is the eval whose checkpoint would have been
    kept, chosen among those up to the stop. `detectors` holds the evidence of each member of the policy by its id, as
    it was at the stop or at the end.
    """

    run: str
    verdict: str
    stop_step: int | None
    suspect_step: int | None
    best_step: int | None
    reason: str
    ground: str | None
    detectors: dict[str, dict[str, Any]]


def judge(policy: Policy, run: Run) -> Judged:
    """Replay a settled run up to its stop: later observations change no verdict, and there would have been none."""
    state = start(policy)
    for observation in run.observations():
        state, verdict = step(policy, state, observation)
        if verdict.stops:
            break
    verdict = state.verdict
    stop_step = verdict.step if verdict.stops else None
    scores = run.scores(stop_step)
    chosen = BestSoFar(CHOOSER)
    for score in scores:
        chosen.saved(score.step)
        chosen.add(score)
    best = chosen.best()
    return Judged(
        run=run.name,
        verdict=str(verdict.verdict),
        stop_step=stop_step,
        suspect_step=state.suspect_step,
        best_step=None if best is None else best.step,
        reason=verdict.reason,
        ground=verdict.ground,
        detectors=_by_member(policy, state.evidence),
    )


def _by_member(policy: Policy, evidence: Sequence[Evidence | None]) -> dict[str, dict[str, Any]]:
    """What each member found and what it was held against; a member that has seen nothing is left out."""
    found = {}
    for name, member, item in zip(policy.ids, policy.members, evidence, strict=True):
        if item is not None:
            thresholds = msgspec.to_builtins(member.thresholds)
            found[name] = {"detector": member.detector.name} | msgspec.to_builtins(item) | thresholds
    return found
