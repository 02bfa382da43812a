"""Decides which jobs are stopped: a policy on top of any scheduler.

A stop depends only on the job's own evals, so the policy is applied to all jobs before the simulation, by the monitor
of the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from evalstop_detectors import POLICIES, MetricRole, Policy, policy_from_document

from evalstop_lab.replay import Run, judge_runs
from evalstop_lab.simulator.jobs import Floats, Integers, Workload

STEPS_AN_EVAL = 1000


FIXED_PROGRESS = policy_from_document(
    {
        "name": "fixed-progress",
        "description": "A naive rule for comparison: stop at 85 % of the user's estimate.",
        "members": [{"detector": "fixed_progress", "params": {"fraction": 0.85}}],
        "eval_required": False,
    }
)
LOSS_PLATEAU = policy_from_document(
    {
        "name": "loss-plateau",
        "description": "A naive rule for comparison: stop when the training loss has not improved for two evals.",
        "members": [{"detector": "loss_plateau", "params": {"patience": 2}}],
        "eval_required": False,
    }
)
RULES: Mapping[str, Policy] = {
    **{name: POLICIES[name] for name in POLICIES},
    **{policy.name: policy for policy in (FIXED_PROGRESS, LOSS_PLATEAU)},
}


@dataclass(frozen=True, eq=False)
class Stops:
    """A rule's stops, by job. `after`: the eval, from 1, after which the job is stopped (0: never). `kept`: the eval
    whose checkpoint is kept (0: the job's last)."""

    after: Integers
    kept: Integers

    def ends(self, workload: Workload) -> Floats:
        """The hours of running after which each job ends."""
        return np.array(
            [
                job.eval_at(after) if after else job.hours
                for job, after in zip(workload.jobs, self.after.tolist(), strict=True)
            ]
        )


def no_stops(workload: Workload) -> Stops:
    zeros = np.zeros(len(workload.jobs), dtype=np.int64)
    return Stops(zeros, zeros)


def decide_stops(policy: Policy, workload: Workload) -> Stops:
    """The policy's decisions on all jobs, in advance."""
    judged = judge_runs(policy, build_logs(workload, policy.roles))
    stops, kept_evals = [item.stop_step for item in judged], [item.best_step for item in judged]
    return Stops(_to_evals(stops), _to_evals(kept_evals))


def build_logs(workload: Workload, roles: frozenset[MetricRole]) -> list[Run]:
    """The metrics of these roles that the jobs' trainers post; the planned end is the user's estimate."""
    runs = []
    for job, scores, proxy in zip(workload.jobs, workload.eval_scores.tolist(), workload.proxy.tolist(), strict=True):
        posted = {MetricRole.EVAL: scores, MetricRole.PROXY: proxy, MetricRole.LOSS: job.losses}
        planned = round(STEPS_AN_EVAL * job.evals * job.estimate_hours / job.hours)
        run = Run(str(job.number), max(planned, 1))
        for role in roles & posted.keys():
            for number, value in enumerate(posted[role], start=1):
                run.add(role, STEPS_AN_EVAL * number, value, None)
        runs.append(run)
    return runs


def _to_evals(steps: Sequence[int | None]) -> Integers:
    return np.array([(at or 0) // STEPS_AN_EVAL for at in steps], dtype=np.int64)
