"""What a policy would have done to each past run, and whether the run's later evals show that it was right.

The outcome of a run is determined as in the service (`evalstop_service.domain.outcome`): from all of its evals, the
best mean of neighbors against the last. A stop is judged only if enough evals came after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from evalstop_detectors import MetricRole, Policy, Score, select_version
from evalstop_service.domain.outcome import assess_run, judge_decision, locate_turn
from evalstop_service.domain.run import RunAssessment
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome
from msgspec.structs import replace

from evalstop_lab.replay.command import CHUNK, choose_jobs
from evalstop_lab.replay.judged import Judged, judge_runs
from evalstop_lab.replay.runs import Run
from evalstop_lab.report import to_json_values
from evalstop_lab.sweep import sweep_chunks
from evalstop_lab.worlds.scoring import Figure, Share, clopper_pearson, estimate_mean, wilson


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


def encode_case(case: Case) -> dict[str, Any]:
    """The case as JSON values; NaN is null."""
    outcomes = {
        label: {
            "stop_step": item.stop_step,
            "suspect_step": item.judged.suspect_step,
            "best_step": item.judged.best_step,
            "outcome": item.outcome,
            "saved": item.saved,
            "gpu_hours": item.gpu_hours,
            "later": item.later,
            "reason": item.judged.reason,
        }
        for label, item in case.outcomes.items()
    }
    document: dict[str, Any] = to_json_values(
        {
            "run": case.run.name,
            "truth": case.assessment.run_outcome,
            "why": case.assessment.reason,
            "turn_step": case.turn_step,
            "last_step": case.run.last_step,
            "gpu_hours": case.run.gpu_hours,
            "policies": outcomes,
        }
    )
    return document


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


ENOUGH_OF_A_PLAN = 0.9
LEAST_STOPPED, LEAST_STOPPED_SHARE = 10, 0.3
"""Early stopping is inferred if so many runs, and such a share, end the same number of evals after their best."""


def assess_outcome(run: Run, decided_step: int | None = None) -> RunAssessment:
    """Assess the outcome of the run from all of its evals. One that ended before its plan, by its own early stopping or
    a crash, is not healthy: what would have followed is unknown."""
    assessment = assess_run(run.scores(), decided_step)
    if assessment.run_outcome is RunOutcome.HEALTHY and (reason := explain_early_end(run)):
        return replace(assessment, run_outcome=RunOutcome.UNDECIDED, reason=reason)
    return assessment


def explain_early_end(run: Run) -> str:
    """Why the run tells nothing about what would have followed; nothing if it ran to its end."""
    plan = run.total_steps or 0
    ended = f"it ended at step {run.last_step:,} of {plan:,} planned ones"
    return run.stopped_early or (ended if run.last_step < ENOUGH_OF_A_PLAN * plan else "")


def infer_early_stopping(runs: Sequence[Run]) -> None:
    """Note which of these runs seem to have been ended by an early stopping that their logs do not mention: runs of
    different lengths that end the same number of evals, at least two, after their best one."""
    by_distance: dict[int, list[Run]] = {}
    for run in runs:
        series = run.series.get(MetricRole.EVAL)
        values = run.roles.sign(MetricRole.EVAL) * np.frombuffer(series.values) if series else np.empty(0)
        if np.isfinite(values).any() and not run.stopped_early:
            by_distance.setdefault(len(values) - 1 - int(np.nanargmax(values)), []).append(run)
    for distance, alike in by_distance.items():
        unplanned = [run for run in alike if not run.total_steps or explain_early_end(run)]
        lengths = Counter(len(run.series[MetricRole.EVAL].steps) for run in unplanned)
        enough = len(unplanned) >= max(LEAST_STOPPED, LEAST_STOPPED_SHARE * len(runs))
        if distance >= 2 and enough and max(lengths.values()) <= len(unplanned) / 2:
            many = f"{len(unplanned):,} of {len(runs):,} runs"
            for run in unplanned:
                run.stopped_early = f"{many} end {distance} evals after their best, as by early stopping"


def judge_case(run: Run, assessment: RunAssessment, judged: Judged) -> PolicyOutcome:
    """Compare a policy's verdict on the run with the run's outcome."""
    stop = judged.stop_step
    if stop is None:
        outcome = judge_decision(assessment.run_outcome, None, None)
        return PolicyOutcome(judged, outcome, 0.0, 0.0 if run.gpu_hours is not None else None, None)
    scores = run.scores()
    assessment = assess_outcome(run, stop)
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


@dataclass(frozen=True)
class Summary:
    """A policy over all runs. Shares and means have 95 % intervals.

    `precision`: right stops among right and wrong ones. `false_stops`: wrong stops per healthy run. `caught`: right
    stops per turned run. `saved`, `cut`: the mean share of a run's steps that are saved by right stops, and lost by
    wrong ones. `gpu_hours`: the same in GPU-hours by outcome, over the runs with known costs.
    """

    policy: str
    stops: dict[DecisionOutcome, int]
    precision: Share
    false_stops: Share
    caught: Share
    saved: Figure
    cut: Figure
    gpu_hours: dict[DecisionOutcome, float]

    @property
    def stopped(self) -> int:
        return sum(self.stops.values())


@dataclass(frozen=True)
class Difference:
    """The first policy minus the second, run by run: means with 95 % intervals, in the units of `Summary`.

    `first_alone` and `second_alone`: the runs that only this policy would have stopped.
    """

    false_stops: Figure
    caught: Figure
    saved: Figure
    cut: Figure
    first_alone: int
    second_alone: int


def summarize_policy(cases: Sequence[Case], label: str) -> Summary:
    healthy, turned = _select(cases, RunOutcome.HEALTHY), _select(cases, RunOutcome.TURNED)
    results = [case.outcomes[label] for case in cases]

    def count_stops(among: Sequence[Case], outcome: DecisionOutcome) -> int:
        return sum(_is_stop(case.outcomes[label], outcome) for case in among)

    stops = {outcome: count_stops(cases, outcome) for outcome in DecisionOutcome}
    return Summary(
        label,
        stops,
        wilson(stops[DecisionOutcome.RIGHT], stops[DecisionOutcome.RIGHT] + stops[DecisionOutcome.WRONG]),
        clopper_pearson(count_stops(healthy, DecisionOutcome.WRONG), len(healthy)),
        wilson(count_stops(turned, DecisionOutcome.RIGHT), len(turned)),
        estimate_mean([_get_saved_share(result, DecisionOutcome.RIGHT) for result in results]),
        estimate_mean([_get_saved_share(result, DecisionOutcome.WRONG) for result in results]),
        {
            outcome: sum(result.gpu_hours or 0.0 for result in results if _is_stop(result, outcome))
            for outcome in DecisionOutcome
        },
    )


def compare_policies(cases: Sequence[Case], first: str, second: str) -> Difference:

    def estimate_difference(among: Sequence[Case], figure: Callable[[PolicyOutcome], float]) -> Figure:
        return estimate_mean([figure(case.outcomes[first]) - figure(case.outcomes[second]) for case in among])

    stopped = [tuple(case.outcomes[label].stop_step is not None for label in (first, second)) for case in cases]
    healthy, turned = _select(cases, RunOutcome.HEALTHY), _select(cases, RunOutcome.TURNED)
    return Difference(
        estimate_difference(healthy, lambda result: float(_is_stop(result, DecisionOutcome.WRONG))),
        estimate_difference(turned, lambda result: float(_is_stop(result, DecisionOutcome.RIGHT))),
        estimate_difference(cases, lambda result: _get_saved_share(result, DecisionOutcome.RIGHT)),
        estimate_difference(cases, lambda result: _get_saved_share(result, DecisionOutcome.WRONG)),
        stopped.count((True, False)),
        stopped.count((False, True)),
    )


def _select(cases: Sequence[Case], outcome: RunOutcome) -> list[Case]:
    return [case for case in cases if case.assessment.run_outcome is outcome]


def _is_stop(result: PolicyOutcome, outcome: DecisionOutcome) -> bool:
    return result.stop_step is not None and result.outcome is outcome


def _get_saved_share(result: PolicyOutcome, outcome: DecisionOutcome) -> float:
    return result.saved if _is_stop(result, outcome) else 0.0
