"""`evalstop-lab cluster actions`: compares stopping a suspected job with parking it.

A parked job releases its GPUs to waiting jobs and runs on idle ones. The gain is counted in GPU-hours for
which a job waited; the cost in the completion time of healthy jobs, and in healthy jobs lost for good, which only a
stop causes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from evalstop_detectors import DETECTORS, Member, Policy, Thresholds, start, step
from evalstop_detectors.policy.calibration import find_threshold
from rich.console import Console

from evalstop_lab.replay import Run
from evalstop_lab.report import format_figure, format_percent, new_table
from evalstop_lab.simulator import study
from evalstop_lab.simulator.drawing import Hidden, draw_jobs, stop_at_peaks
from evalstop_lab.simulator.engine import Schedule, simulate_cluster
from evalstop_lab.simulator.jobs import Floats, Parked, Workload
from evalstop_lab.simulator.metrics import measure_contended_waste
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import GANGS, WORLDS, Setting
from evalstop_lab.simulator.stopping import STEPS_AN_EVAL, build_logs

SEEDS = 12
WORLDS_BY_NAME = {**GANGS, **WORLDS}
POSTERIOR = msgspec.convert({"model": "gru-2"}, DETECTORS["posterior"])
RETURN_BELOW = 0.12
"""A parked job returns when its probability of having turned falls below this."""


@dataclass(frozen=True)
class Rule:
    """The action, and the share of healthy runs that reach its level, by calibration."""

    action: str
    risk: float

    @property
    def name(self) -> str:
        return f"{self.action} at {format_percent(self.risk, 0)}"


RULES = tuple(Rule(action, risk) for action in ("stop", "park") for risk in (0.01, 0.05, 0.2))


FIGURES = ("returned", "healthy_time", "lost", "set_aside", "delay_hours")
"""The figures of a rule under a scheduler. `returned`: contended GPU-hours returned, as a share of the oracle's.
`healthy_time`: the change of the mean completion time of healthy jobs not stopped. `lost`, `set_aside`: shares
of the healthy jobs that were stopped, and parked. `delay_hours`: the mean delay of the latter."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("actions", help="compare stopping a suspected job with parking it")
    study.add_common(parser, seeds=SEEDS)
    text = "world from which jobs are drawn (default: %(default)s)"
    parser.add_argument("--world", choices=WORLDS_BY_NAME, default="gangs", help=text)
    names = list(SCHEDULERS)
    parser.add_argument("--schedulers", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    setting, seeds = study.get_setting(args, WORLDS_BY_NAME), study.get_seeds(args)
    simulate = partial(_simulate_seed, setting, tuple(args.schedulers))
    by_seed = study.sweep_each(args, simulate, seeds, "simulating actions")
    outcomes = study.estimate_figures(by_seed, ("rule", "scheduler"), FIGURES)
    report = {"outcomes": outcomes, "setting": study.encode_setting(setting, seeds)}
    return study.print_report(args, report, lambda console: _print_table(console, outcomes))


@dataclass(frozen=True)
class Decisions:
    """A rule's decisions on all jobs: the hours of running after which each ends, and when they are parked."""

    ends: Floats
    parked: Parked


def decide_actions(rule: Rule, workload: Workload, probabilities: Floats) -> Decisions:
    """Decide the rule's actions by the probabilities of having turned, with a row per job and a column per eval.

    A parked job returns when its probability falls below `RETURN_BELOW`.
    """
    level = find_threshold(POSTERIOR, rule.risk, ())
    ends, parked = workload.hours, {}
    for job, row in zip(workload.jobs, probabilities.tolist(), strict=True):
        if rule.action == "park":
            if changes := _find_changes(row, level):
                parked[job.number] = changes
        elif stop := next((number for number, value in enumerate(row, start=1) if value >= level), None):
            ends[job.number] = job.eval_at(stop)
    return Decisions(ends, parked)


def _find_changes(row: Sequence[float], level: float) -> list[tuple[int, bool]]:
    changes, is_parked = [], False
    for number, value in enumerate(row, start=1):
        if value < RETURN_BELOW if is_parked else value >= level:
            is_parked = not is_parked
            changes.append((number, is_parked))
    return changes


def find_probabilities(workload: Workload) -> Floats:
    """The probability of having turned that `default` uses, by job and eval; lengths are the users' estimates."""
    policy = Policy("posterior", (Member(POSTERIOR, Thresholds(None, None)),))
    evals = workload.eval_scores.shape[1]
    return np.array([_find_row(policy, run, evals) for run in build_logs(workload, policy.roles)])


def _find_row(policy: Policy, run: Run, evals: int) -> list[float]:
    state, row = start(policy), [0.0] * evals
    for observation in run.observations():
        state, _ = step(policy, state, observation)
        (evidence,) = state.evidence
        row[observation.step // STEPS_AN_EVAL - 1] = 0.0 if evidence is None else evidence.value
    return row


def _simulate_seed(setting: Setting, schedulers: Sequence[str], seed: int) -> dict[tuple[str, str], tuple[float, ...]]:
    """The numbers of `FIGURES`, by rule and scheduler."""
    workload, hidden = draw_jobs(setting, seed)
    cluster = setting.cluster
    probabilities = find_probabilities(workload)
    decided = {rule.name: decide_actions(rule, workload, probabilities) for rule in RULES}
    _, oracle_ends = stop_at_peaks(workload, hidden)
    numbers: dict[tuple[str, str], tuple[float, ...]] = {}
    for name in schedulers:

        def run_with(decisions: Decisions, name: str = name) -> Schedule:
            return simulate_cluster(workload, SCHEDULERS[name], cluster, decisions.ends, decisions.parked)

        untouched, oracle = (run_with(Decisions(ends, {})) for ends in (workload.hours, oracle_ends))
        waste = measure_contended_waste(workload, hidden, untouched, cluster.restore_hours)
        best = waste - measure_contended_waste(workload, hidden, oracle, cluster.restore_hours)
        for rule, decisions in decided.items():
            schedule = run_with(decisions)
            returned = waste - measure_contended_waste(workload, hidden, schedule, cluster.restore_hours)
            numbers[rule, name] = returned / best, *_measure_costs(workload, hidden, untouched, schedule, decisions)
    return numbers


def _measure_costs(
    workload: Workload, hidden: Hidden, before: Schedule, after: Schedule, decisions: Decisions
) -> tuple[float, float, float, float]:
    """Of healthy jobs: the change of the mean time, the shares lost and set aside, and the mean delay of the latter."""
    lost = ~hidden.hacking & (after.ran < workload.hours)
    continued = ~hidden.hacking & ~lost
    aside = np.zeros(len(continued), dtype=bool)
    aside[list(decisions.parked)] = True
    times = [schedule.ended - workload.submitted for schedule in (before, after)]
    delay = (times[1] - times[0])[continued & aside]
    healthy = (~hidden.hacking).sum()
    change = times[1][continued].mean() / times[0][continued].mean() - 1
    return change, lost.sum() / healthy, (continued & aside).sum() / healthy, delay.mean() if len(delay) else 0.0


def _print_table(console: Console, outcomes: Sequence[dict[str, Any]]) -> None:
    title = "contended GPU-hours returned, of the oracle's; costs to healthy jobs"
    headings = ("returned", "lost", "set aside", "their mean delay", "mean time, not stopped")
    table = new_table(title, "rule", "scheduler", *headings, left=2)
    for item in outcomes:
        shares = (format_percent(item[name]["value"]) for name in ("lost", "set_aside"))
        costs = f"{item['delay_hours']['value']:+.2f} h", format_figure(item["healthy_time"], sign=True)
        table.add_row(item["rule"], item["scheduler"], format_figure(item["returned"]), *shares, *costs)
    console.print(table)
