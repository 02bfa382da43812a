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
from evalstop_detectors import MetricRole, Policy
from evalstop_service.domain.outcome import assess_run, judge_decision
from evalstop_service.domain.run import RunAssessment
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome
from msgspec.structs import replace

from evalstop_lab.replay.command import choose_jobs
from evalstop_lab.replay.judged import Judged, judge_run
from evalstop_lab.replay.runs import Run
from evalstop_lab.report import to_json_values
from evalstop_lab.sweep import sweep
from evalstop_lab.worlds.scoring import Figure, Share, clopper_pearson, estimate_mean, wilson


@dataclass(frozen=True)
class PolicyOutcome:
    """What one policy would have done to one run.

    `outcome`: whether the stop, or the lack of one, was right. `saved`: the share of the run's steps after the stop, 0
    without a stop.
    """

    judged: Judged
    outcome: DecisionOutcome
    saved: float = 0.0

    @property
    def stop_step(self) -> int | None:
        return self.judged.stop_step

    def is_stop(self, outcome: DecisionOutcome) -> bool:
        """Whether it is a stop of this outcome."""
        return self.stop_step is not None and self.outcome is outcome


@dataclass(frozen=True)
class Case:
    """A past run, its outcome, and what each policy would have done to it, by the policy's label."""

    run: Run
    assessment: RunAssessment
    outcomes: Mapping[str, PolicyOutcome]

    @property
    def turn_step(self) -> int | None:
        """The step where the run turned, if it did."""
        return None if self.assessment.turn is None else self.assessment.turn.step


def encode_case(case: Case) -> dict[str, Any]:
    """The case as JSON values; NaN is null."""
    outcomes = {
        label: {
            "stop_step": item.stop_step,
            "suspect_step": item.judged.suspect_step,
            "best_step": item.judged.best_step,
            "outcome": item.outcome,
            "saved": item.saved,
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
    return sweep(partial(_judge_case, policies), runs, title, choose_jobs(jobs, runs))


def _judge_case(policies: Mapping[str, Policy], run: Run) -> Case:
    """The outcome of a run, and what each policy would have done to it."""
    assessment = assess_outcome(run)
    outcomes = {
        label: judge_outcome(run, assessment, judge_run(policy.unobserved, run)) for label, policy in policies.items()
    }
    return Case(run, assessment, outcomes)


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


def judge_outcome(run: Run, assessment: RunAssessment, judged: Judged) -> PolicyOutcome:
    """Compare a policy's verdict on the run with the run's outcome."""
    stop = judged.stop_step
    if stop is None:
        return PolicyOutcome(judged, judge_decision(assessment.run_outcome, None, None))
    assessment = assess_outcome(run, stop)
    outcome = judge_decision(assessment.run_outcome, stop, assessment.turn)
    last = run.last_step
    return PolicyOutcome(judged, outcome, (last - stop) / last if last else 0.0)


@dataclass(frozen=True)
class Compared:
    """A figure of a policy: its label, the runs that it is of (None: all), and what it is of one of them; `interval` of
    a share."""

    label: str
    among: RunOutcome | None
    of_run: Callable[[PolicyOutcome], float]
    interval: Callable[[int, int], Share] | None = None

    def list_values(self, cases: Sequence[Case], policy: str) -> list[float]:
        return [
            self.of_run(case.outcomes[policy]) for case in cases if self.among in (None, case.assessment.run_outcome)
        ]

    def estimate(self, values: Sequence[float]) -> Figure:
        return estimate_mean(values) if self.interval is None else self.interval(round(sum(values)), len(values))


RIGHT, WRONG = DecisionOutcome.RIGHT, DecisionOutcome.WRONG
FIGURES: Mapping[str, Compared] = {
    "false_stops": Compared(
        "healthy runs stopped wrongly", RunOutcome.HEALTHY, lambda result: float(result.is_stop(WRONG)), clopper_pearson
    ),
    "caught": Compared(
        "turned runs stopped rightly", RunOutcome.TURNED, lambda result: float(result.is_stop(RIGHT)), wilson
    ),
    "saved": Compared("steps saved by right stops", None, lambda result: result.saved * result.is_stop(RIGHT)),
    "cut": Compared("steps lost by wrong stops", None, lambda result: result.saved * result.is_stop(WRONG)),
}
"""The figures of a backtest, with 95 % intervals. Those of steps are means of the shares of each run."""


def summarize_policy(cases: Sequence[Case], label: str) -> dict[str, Any]:
    """A policy over all runs: its stops by outcome, their GPU-hours where these are known, and its figures."""
    results = [(case.run, case.outcomes[label]) for case in cases]
    return {
        "policy": label,
        "stopped": sum(result.stop_step is not None for _, result in results),
        "stops": {outcome: sum(result.is_stop(outcome) for _, result in results) for outcome in DecisionOutcome},
        "gpu_hours": {
            outcome: sum((run.gpu_hours or 0.0) * result.saved for run, result in results if result.is_stop(outcome))
            for outcome in DecisionOutcome
        },
        "figures": {name: item.estimate(item.list_values(cases, label)) for name, item in FIGURES.items()},
    }


def compare_policies(cases: Sequence[Case], first: str, second: str) -> dict[str, Figure]:
    """The figures of the first policy minus those of the second, run by run: means with 95 % intervals."""
    return {
        name: estimate_mean(np.subtract(item.list_values(cases, first), item.list_values(cases, second)))
        for name, item in FIGURES.items()
    }
