"""Groups of runs with rules, copies and stops, stored as the rule's job and the trainers would."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from evalstop_service.clock import utc_now
from evalstop_service.decisions import commands, sweeps
from evalstop_service.domain.decision_lifecycle import Action, DecisionState, Exploit, Mode, Record
from evalstop_service.domain.run import Call, DescriptionIn, Verdict
from evalstop_service.ingest import CheckpointSaved, EvalChanged, Exploited, Resumed
from evalstop_service.runs.descriptions import describe_run
from evalstop_service.store import decisions, groups, policies
from evalstop_service.store.audit import Author
from evalstop_service.store.decisions import Decision
from evalstop_service.store.groups import Group
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.runs import Run

from tests.service.web.pages.recorded_runs import Tenant

PBT = {
    "kind": "pbt",
    "mode": "enforce",
    "ready_steps": 200,
    "hyperparameters": {"lr": {"low": 1e-6, "high": 1e-3}, "kl.coef": {"factors": [0.5, 2.0]}},
}
HALVING = {"kind": "halving", "first_rung": 100, "eta": 3}


def set_rule(tenant: Tenant, name: str, rule: dict[str, Any]) -> None:
    """Give a group a rule."""
    with tenant.database.transaction() as tx:
        groups.save_group(tx, Group(tenant.id, name, rule, tenant.now, "dana"))


def open_member(tenant: Tenant, group: str, name: str, params: Mapping[str, str] | None = None, **options: Any) -> Run:
    """Open a run of a group."""
    run = tenant.open_run(name, params=params or None, total_steps=1000, **options)
    describe_run(tenant.database, Author(tenant.id, "dana", tenant.now), run.id, DescriptionIn(group=group).change)
    return run


def post_rise(tenant: Tenant, run: Run, steps: Sequence[int], height: float) -> None:
    """Post evals that rise to a height, and a checkpoint at each."""
    for step in steps:
        tenant.submit(run, CheckpointSaved(step, f"file:///{run.name}/{step}"))
    points = [
        PostedObservation("reward/gold", step, height * (1 - math.exp(-step / 300)) + 0.01 * math.sin(step), 0.01)
        for step in steps
    ]
    tenant.post_observations(run, points)


def store_decision(tenant: Tenant, run: Run, group: str, step: int, reason: str, **fields: Any) -> Decision:
    """Store a decision of a group's rule on a run."""
    run = tenant.load_run(run)
    with tenant.database.transaction() as tx:
        policy = policies.find_policy(tx, tenant.id, run.policy_name, run.policy_version)
        assert policy is not None
        known: dict[str, Any] = {
            "state": DecisionState.CONFIRMED,
            "due_at": tenant.now,
            "id": new_id(),
            "run_id": run.id,
            "project_id": tenant.id,
            "attempt": run.attempt,
            "step": step,
            "verdict": Verdict(Call.STOP, step, None, reason),
            "best_checkpoint": None,
            "policy_id": policy.id,
            "created_at": tenant.now,
            "run_name": run.name,
            "policy_name": run.policy_name,
            "policy_version": run.policy_version,
            "observed_probability": 1.0,
            "group": group,
        }
        decision = Decision(**(known | fields))
        decisions.add_decision(tx, decision)
        decisions.add_change(tx, run.id, decision.id, Record(decision.state, "evalstop", reason), tenant.now)
    return decision


def call_copy(
    tenant: Tenant, group: str, run: Run, source: Run, step: int, hyperparameters: dict[str, float | str], state: str
) -> None:
    """Store the decision that a run is to copy the checkpoint of another one."""
    exploit = Exploit(
        decision_id=new_id(),
        source_run=source.id,
        source_name=source.name,
        source_step=step,
        source_checkpoint=f"file:///{source.name}/{step}",
        hyperparameters=hyperparameters,
    )
    details = {"id": exploit.decision_id, "action": Action.EXPLOIT, "exploit": exploit, "state": DecisionState(state)}
    store_decision(tenant, run, group, step, "it is in the bottom 25 %", **details)


def copy_run(
    tenant: Tenant, group: str, run: Run, source: Run, step: int, hyperparameters: dict[str, float | str], at: datetime
) -> None:
    """Have a run copy the checkpoint of another one, as its trainer confirms it."""
    call_copy(tenant, group, run, source, step, hyperparameters, "confirmed")
    tenant.submit(run, Resumed(step), at)
    tenant.submit(run, EvalChanged(step + 1, f"copy of {source.name} at step {step}", None, "dana"), at)


def populate_groups(tenant: Tenant) -> None:
    """A population with copies, a group with halving, one without a rule, and a rule without runs."""
    set_rule(tenant, "population", PBT)
    rates = (1e-5, 3e-5, 1e-4, 3e-4)
    runs = [
        open_member(tenant, "population", f"pop-{place}", {"lr": str(rate), "kl.coef": "0.1", "seed": "1"})
        for place, rate in enumerate(rates)
    ]
    for run, height in zip(runs, (0.5, 0.7, 0.9, 0.3), strict=True):
        post_rise(tenant, run, range(0, 201, 20), height)
    at = tenant.now + timedelta(minutes=5)
    copy_run(tenant, "population", runs[3], runs[2], 200, {"lr": 1.25e-4, "kl.coef": 0.2}, at)
    copy_run(tenant, "population", runs[0], runs[1], 180, {"lr": 2.4e-5, "kl.coef": 0.05}, at)
    for run, height in zip(runs, (0.75, 0.72, 0.88, 0.97), strict=True):
        post_rise(tenant, run, range(220, 401, 20), height)
    copy_run(tenant, "population", runs[1], runs[3], 400, {"lr": 1e-4, "kl.coef": 0.4}, at + timedelta(minutes=5))
    for run, height in zip(runs[:3], (0.8, 1.05, 0.86), strict=True):
        post_rise(tenant, run, range(420, 601, 20), height)
    call_copy(tenant, "population", runs[0], runs[1], 600, {"lr": 8e-5, "kl.coef": 0.2}, "pending")
    tenant.finish_run(runs[3], "failed")
    set_rule(tenant, "halving", HALVING)
    for place, height in enumerate((0.5, 0.9, 0.6)):
        run = open_member(tenant, "halving", f"seed-{place}")
        post_rise(tenant, run, range(0, 121 if place == 0 else 301, 20), height)
        if place == 0:
            reason = "its score 0.15 at the rung of step 100 is not among the best 1 of 3, which have 0.27 or more"
            store_decision(tenant, run, "halving", 100, reason, state=DecisionState.SHADOW)
    for place in range(2):
        open_member(tenant, "no rule", f"lone-{place}")
    set_rule(tenant, "empty", {"kind": "median", "from_step": 100})


def train_population(tenant: Tenant, name: str) -> None:
    """Six trainers under a rule that has them copy each other: the nearer the learning rate to 3e-6, the steeper the
    rise of the eval."""
    rule = {
        "kind": "pbt",
        "mode": "enforce",
        "ready_steps": 200,
        "fewest": 3,
        "hyperparameters": PBT["hyperparameters"],
    }
    set_rule(tenant, name, rule)
    job, draws = sweeps.create_job(tenant.database, utc_now), random.Random(4)
    trainers: list[Run] = []
    rates: dict[str, float] = {}
    levels: dict[str, float] = {}
    for place, rate in enumerate((2e-7, 5e-7, 1e-6, 1.5e-6, 1e-5, 2e-5)):
        params = {"lr": str(rate), "kl.coef": "0.1"}
        trainers.append(open_member(tenant, name, f"ppo-{place}", params, mode=Mode.ENFORCE))
        rates[f"ppo-{place}"], levels[f"ppo-{place}"] = rate, 0.1
    for first in range(0, 800, 200):
        for run in trainers:
            points = []
            for step in range(first + 20, first + 201, 20):
                steepness = math.exp(-abs(math.log(rates[run.name] / 3e-6)))
                levels[run.name] += 0.03 * steepness * (1 - levels[run.name] / 1.4)
                points.append(PostedObservation("reward/gold", step, levels[run.name] + draws.gauss(0, 0.005), 0.005))
                tenant.submit(run, CheckpointSaved(step, f"file:///{run.name}/{step}"))
            tenant.post_observations(run, points)
        job.do(lambda _: False)
        for run in trainers:
            exploit = commands.offer_exploit(tenant.database, utc_now, tenant.load_run(run))
            if exploit is not None and first < 600:
                tenant.submit(run, Exploited(exploit.decision_id, "a trainer"), utc_now())
                rates[run.name], levels[run.name] = float(exploit.hyperparameters["lr"]), levels[exploit.source_name]
