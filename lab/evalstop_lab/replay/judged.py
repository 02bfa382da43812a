"""Replays logged runs through a policy: the verdicts of the monitor, as in the service."""

from __future__ import annotations

from dataclasses import dataclass

from evalstop_detectors import Policy, advance, choose_best, name_calls, start
from evalstop_detectors.policy.catalog import Finding

from evalstop_lab.replay.runs import MAX_STEP, Run


@dataclass(frozen=True)
class Judged:
    """The result of replaying a run.

    `best_step` is the eval of the best checkpoint, chosen among those up to the stop. `evidence` is that of the verdict
    at the stop or at the end. `calls`: by id of all members, observers included, the step of the first call for a stop
    in the whole run.
    """

    run: str
    verdict: str
    stop_step: int | None
    suspect_step: int | None
    best_step: int | None
    reason: str
    evidence: tuple[Finding, ...]
    calls: dict[str, int | None]


def judge_run(policy: Policy, run: Run) -> Judged:
    """Replay a settled run. It is not stopped on a guess."""
    policy = policy.with_guessed(run.roles.guessed)
    state, verdicts = advance(policy, start(policy), run.observations())
    verdict = next((item for item in verdicts if item.stops), state.verdict)
    stop_step = verdict.step if verdict.stops else None
    best = choose_best(run.score_columns(MAX_STEP if stop_step is None else stop_step))
    return Judged(
        run=run.name,
        verdict=str(verdict.verdict),
        stop_step=stop_step,
        suspect_step=state.suspect_step,
        best_step=None if best is None else best.step,
        reason=verdict.reason,
        evidence=verdict.evidence,
        calls=name_calls(policy, state),
    )
