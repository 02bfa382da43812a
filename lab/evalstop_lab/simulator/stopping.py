"""Decides which jobs are stopped: a rule on top of any scheduler.

A stop depends only on the job's own evals, so the rule is applied to all jobs before the simulation, a policy by the
monitor of the service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from evalstop_detectors import POLICIES, MetricRole, Policy

from evalstop_lab.replay.judged import judge_run
from evalstop_lab.replay.runs import Run
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Workload

STEPS_AN_EVAL = 1000
FRACTION, PATIENCE = 0.85, 2


def flag_progress(job: Job) -> list[bool]:
    """Flag the evals from 85 % of the user's estimate on."""
    return [STEPS_AN_EVAL * number / plan_steps(job) >= FRACTION for number in range(1, job.evals + 1)]


def flag_loss_plateau(job: Job) -> list[bool]:
    """Flag the evals at which the training loss has not improved for two evals."""
    losses = job.losses
    return [number - losses.index(min(losses[: number + 1])) >= PATIENCE for number in range(len(losses))]


RULES: Mapping[str, Policy | Callable[[Job], list[bool]]] = {
    **POLICIES,
    "fixed-progress": flag_progress,
    "loss-plateau": flag_loss_plateau,
}
"""Policies, and the rules of the paper to compare with, which see no evals and stop at the first flag."""


def decide_stops(rule: str, workload: Workload) -> Integers:
    """The eval, from 1, after which this rule stops each job; 0: never."""
    decide = RULES[rule]
    if isinstance(decide, Policy):
        judged = [judge_run(decide.unobserved, run) for run in build_logs(workload, decide.deciding_roles)]
        return np.array([(item.stop_step or 0) // STEPS_AN_EVAL for item in judged], dtype=np.int64)
    flags = map(decide, workload.jobs)
    return np.array([row.index(True) + 1 if True in row else 0 for row in flags], dtype=np.int64)


def compute_ends(workload: Workload, stops: Integers) -> Floats:
    """The hours of running after which each job ends."""
    pairs = zip(workload.jobs, stops.tolist(), strict=True)
    return np.array([job.eval_at(after) if after else job.hours for job, after in pairs])


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
