"""Decides which jobs are stopped: a policy on top of any scheduler, evaluated at each eval or in advance.

`with_stop` is what the paper adds to a cluster: it leaves everything to the scheduler and ends jobs whose evals
say so. A stop depends on the job's own evals, so that `decide` may ask the policy about all jobs before anything runs:
the same policy, through the same `monitor.step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from evalstop_detectors import (
    POLICIES,
    MetricRole,
    MonitorState,
    Observation,
    Policy,
    policy_from_document,
    start,
    step,
)

from evalstop_lab.replay import Run, judge_runs
from evalstop_lab.simulator.engine import Cluster
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Workload
from evalstop_lab.simulator.schedulers import Scheduler

STEPS_AN_EVAL = 1000


FIXED_PROGRESS = policy_from_document(
    {
        "name": "fixed-progress",
        "description": "A strawman: stop at 85 % of what the user estimated.",
        "members": [{"detector": "fixed_progress", "params": {"fraction": 0.85}}],
        "eval_required": False,
    }
)
LOSS_PLATEAU = policy_from_document(
    {
        "name": "loss-plateau",
        "description": "A strawman: stop when the training loss has not improved for two evals.",
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
    """By job: the number of evals, from 1, after which a rule stops it (0: never), and the eval whose checkpoint is
    kept (0: none, the job's last stands)."""

    after: Integers
    kept: Integers

    def ends(self, workload: Workload, cluster: Cluster) -> Floats:
        """After how many hours of running each job ends."""
        return np.array(
            [
                min(job.eval_at(after) + cluster.stop_hours, job.hours) if after else job.hours
                for job, after in zip(workload.jobs, self.after.tolist(), strict=True)
            ]
        )


def no_stops(workload: Workload) -> Stops:
    """No stops."""
    nothing = np.zeros(len(workload.jobs), dtype=np.int64)
    return Stops(nothing, nothing)


def decide(policy: Policy, workload: Workload) -> Stops:
    """The policy's decisions on all jobs, in advance."""
    found = judge_runs(policy, logs(workload, policy.roles))
    return Stops(_evals([item.stop_step for item in found]), _evals([item.best_step for item in found]))


def logs(workload: Workload, roles: frozenset[MetricRole]) -> list[Run]:
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


def with_stop(base: Scheduler, policy: Policy, workload: Workload) -> Scheduler:
    """Extend the scheduler to stop jobs: at each eval of a job the policy gets the metrics that the job posted with
    it."""
    posted = logs(workload, policy.roles)
    states: dict[int, MonitorState] = {}
    unseen: dict[int, Sequence[Observation]] = {}

    def stops(job: Job, evals: int) -> bool:
        if base.stops(job, evals):
            return True
        state = states.get(job.number) or start(policy)
        for item in unseen.setdefault(job.number, posted[job.number].observations()):
            if item.step == evals * STEPS_AN_EVAL:
                state, _ = step(policy, state, item)
        states[job.number] = state
        return state.verdict.stops

    return replace(base, name=f"{base.name} + {policy.name}", stops=stops)


def _evals(steps: Sequence[int | None]) -> Integers:
    return np.array([(at or 0) // STEPS_AN_EVAL for at in steps], dtype=np.int64)
