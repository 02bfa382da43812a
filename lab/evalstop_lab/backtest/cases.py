"""What a policy would have done to each past run, and whether the run's later evals show that it was right.

The outcome of a run is determined as in the service (`evalstop_service.rules.outcome`): from all of its evals, the best
mean of neighbors against the last. A stop is judged only if enough evals came after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from evalstop_detectors import Ground, Policy, Score, select_version
from evalstop_service.rules.outcome import assess_run, judge_decision, judge_levelled_off, locate_turn
from evalstop_service.rules.run_results import RunAssessment
from evalstop_service.rules.statuses import DecisionOutcome, RunOutcome

from evalstop_lab.replay.command import CHUNK, choose_jobs
from evalstop_lab.replay.judged import Judged, judge_runs
from evalstop_lab.replay.runs import Run
from evalstop_lab.sweep import sweep_chunks


@dataclass(frozen=True)
class PolicyOutcome:
    """What one policy would have done to one run.

    `outcome`: whether the stop, or the lack of one, was right. `saved`: the share of the run's steps after the stop, 0
    without a stop. `gpu_hours`: the same in GPU-hours at a constant pace; None if the run's GPUs or length are unknown.
    `later`: how much higher the best mean of evals after the stop is than the best before it, as a share of the range
    of the means; None without a stop or with too few evals on either side.
    """

    judged: Judged
    outcome: DecisionOutcome
    saved: float
    gpu_hours: float | None
    later: float | None

    @property
    def stop_step(self) -> int | None:
        return self.judged.stop_step


@dataclass(frozen=True)
class Case:
    """A past run, its outcome, and what each policy would have done to it, by the policy's label."""

    run: Run
    assessment: RunAssessment
    outcomes: Mapping[str, PolicyOutcome]

    @property
    def turn_step(self) -> int | None:
        """The step where the run turned, if it did."""
        return locate_turn(self.assessment)[0] if self.assessment.run_outcome is RunOutcome.TURNED else None


def judge_cases(runs: Sequence[Run], policies: Mapping[str, Policy], jobs: int | None = None) -> list[Case]:
    """Judge these settled runs under labeled policies, with a progress bar."""
    title = f"judging under {' and '.join(policies)}"
    results = sweep_chunks(partial(_judge_chunk, policies), runs, title, choose_jobs(jobs, runs), CHUNK)
    return [Case(run, *item) for run, item in zip(runs, results, strict=True)]


def _judge_chunk(
    policies: Mapping[str, Policy], runs: Sequence[Run]
) -> list[tuple[RunAssessment, dict[str, PolicyOutcome]]]:
    """The outcome of each run, and what each policy would have done to it."""
    assessments = [assess_outcome(run) for run in runs]
    by_policy = [
        [judge_case(*item) for item in zip(runs, assessments, judge_runs(policy, runs), strict=True)]
        for policy in policies.values()
    ]
    return [
        (assessment, dict(zip(policies, outcomes, strict=True)))
        for assessment, *outcomes in zip(assessments, *by_policy, strict=True)
    ]


def assess_outcome(run: Run) -> RunAssessment:
    """Assess the outcome of the run from all of its evals."""
    return assess_run(run.scores())


def judge_case(run: Run, assessment: RunAssessment, judged: Judged) -> PolicyOutcome:
    """Compare a policy's verdict on the run with the run's outcome."""
    stop, scores = judged.stop_step, run.scores()
    if stop is None:
        outcome = judge_decision(assessment.run_outcome, None, None)
        return PolicyOutcome(judged, outcome, 0.0, 0.0 if run.gpu_hours is not None else None, None)
    if judged.ground == Ground.LEVELLED_OFF:
        outcome = judge_levelled_off(scores, stop)
    else:
        assessment = assess_run(scores, stop)
        turn = locate_turn(assessment) if assessment.run_outcome is RunOutcome.TURNED else None
        outcome = judge_decision(assessment.run_outcome, stop, turn)
    last = run.last_step
    saved = (last - stop) / last if last else 0.0
    hours = run.gpu_hours
    later = _compute_later_gain(select_version(scores, stop), stop, assessment)
    return PolicyOutcome(judged, outcome, saved, None if hours is None else hours * saved, later)


def _compute_later_gain(scores: Sequence[Score], stop: int, assessment: RunAssessment) -> float | None:
    width = assessment.window
    if len(scores) < 2 * width:
        return None
    values = np.clip([score.value for score in scores], -1e150, 1e150)
    means = np.convolve(values, np.full(width, 1 / width), "valid")
    stop_count = sum(score.step <= stop for score in scores)
    before, after = means[: max(stop_count - width + 1, 0)], means[stop_count:]
    span = float(np.ptp(means))
    if not len(before) or not len(after) or span == 0:
        return None
    return float((after.max() - before.max()) / span)
