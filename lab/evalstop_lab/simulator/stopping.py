"""Decides which jobs are stopped: a policy on top of any scheduler.

A stop depends only on the job's own evals, so the policy is applied to all jobs before the simulation, by the monitor
of the service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from evalstop_detectors import POLICIES, MetricRole, Policy

from evalstop_lab.replay import Run, judge_runs
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Workload

STEPS_AN_EVAL = 1000
FRACTION, PATIENCE = 0.85, 2


@dataclass(frozen=True, eq=False)
class Stops:
    """A rule's stops, by job. `after`: the eval, from 1, after which the job is stopped (0: never)."""

    after: Integers

    def ends(self, workload: Workload) -> Floats:
        """The hours of running after which each job ends."""
        return np.array(
            [
                job.eval_at(after) if after else job.hours
                for job, after in zip(workload.jobs, self.after.tolist(), strict=True)
            ]
        )


def no_stops(workload: Workload) -> Stops:
    return Stops(np.zeros(len(workload.jobs), dtype=np.int64))


def stop_at_progress(workload: Workload) -> Stops:
    """Stop at 85 % of the user's estimate."""
    return _stop_at_first(
        [STEPS_AN_EVAL * number / plan_steps(job) >= FRACTION for number in range(1, job.evals + 1)]
        for job in workload.jobs
    )


def stop_at_loss_plateau(workload: Workload) -> Stops:
    """Stop when the training loss has not improved for two evals."""
    rows = []
    for job in workload.jobs:
        best, since, row = math.inf, 0, []
        for loss in job.losses:
            best, since = (loss, 0) if loss < best else (best, since + 1)
            row.append(since >= PATIENCE)
        rows.append(row)
    return _stop_at_first(rows)


def _stop_at_first(rows: Iterable[Sequence[bool]]) -> Stops:
    return Stops(np.array([row.index(True) + 1 if True in row else 0 for row in map(list, rows)], dtype=np.int64))


@dataclass(frozen=True)
class NaiveRule:
    """A rule of the paper to compare with, which sees no evals."""

    name: str
    decide: Callable[[Workload], Stops]


Rule = Policy | NaiveRule

RULES: Mapping[str, Rule] = {
    **POLICIES,
    "fixed-progress": NaiveRule("fixed-progress", stop_at_progress),
    "loss-plateau": NaiveRule("loss-plateau", stop_at_loss_plateau),
}


def decide_stops(rule: Rule, workload: Workload) -> Stops:
    """The rule's decisions on all jobs, in advance."""
    if isinstance(rule, NaiveRule):
        return rule.decide(workload)
    judged = judge_runs(rule, build_logs(workload, rule.deciding_roles))
    return Stops(np.array([(item.stop_step or 0) // STEPS_AN_EVAL for item in judged], dtype=np.int64))


def plan_steps(job: Job) -> int:
    """The number of steps that the user expects."""
    return max(round(STEPS_AN_EVAL * job.evals * job.estimate_hours / job.hours), 1)


def build_logs(workload: Workload, roles: frozenset[MetricRole]) -> list[Run]:
    """The metrics of these roles that the jobs' trainers post; the planned end is the user's estimate."""
    runs = []
    for job, scores, proxy in zip(workload.jobs, workload.eval_scores.tolist(), workload.proxy.tolist(), strict=True):
        posted = {MetricRole.EVAL: scores, MetricRole.PROXY: proxy, MetricRole.LOSS: job.losses}
        run = Run(str(job.number), plan_steps(job))
        for role in roles & posted.keys():
            for number, value in enumerate(posted[role], start=1):
                run.add(role, STEPS_AN_EVAL * number, value, None)
        runs.append(run)
    return runs
