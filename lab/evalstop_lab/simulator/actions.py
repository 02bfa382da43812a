"""`evalstop-lab cluster actions`: compares stopping a suspected job with demoting or parking it.

A demoted or parked job releases its GPUs to waiting jobs and runs on idle ones. The gain is counted in GPU-hours for
which a job waited; the cost in the completion time of healthy jobs, and in healthy jobs lost for good, which only a
stop causes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import msgspec
import numpy as np
from evalstop_detectors import DETECTORS, Member, Policy, Thresholds, start, step
from evalstop_detectors.policy.calibration import find_threshold
from rich.console import Console

from evalstop_lab.replay import Run
from evalstop_lab.report import format_figure, format_percent, new_table
from evalstop_lab.simulator import options, plots
from evalstop_lab.simulator.drawing import draw_jobs
from evalstop_lab.simulator.engine import Schedule, simulate_cluster
from evalstop_lab.simulator.hidden import Hidden, stop_at_peaks
from evalstop_lab.simulator.jobs import Floats, Workload
from evalstop_lab.simulator.metrics import measure_contended_waste
from evalstop_lab.simulator.priorities import NEVER_SET_ASIDE, Changes, Priorities, Priority
from evalstop_lab.simulator.schedulers import SCHEDULERS
from evalstop_lab.simulator.setting import GANGS, WORLDS, Setting
from evalstop_lab.simulator.stopping import STEPS_AN_EVAL, build_logs
from evalstop_lab.worlds.scoring import Figure, estimate_mean

SEEDS = 12
WORLDS_BY_NAME = {**GANGS, **WORLDS}
POSTERIOR = msgspec.convert({"model": "gru-1"}, DETECTORS["posterior"])
RETURN_BELOW = 0.12
"""A job that was set aside returns when its probability of having turned falls below this."""


@dataclass(frozen=True)
class Rule:
    """For each action the share of healthy runs that reach its level, by calibration; None: the action is not taken."""

    name: str
    demote: float | None = None
    park: float | None = None
    stop: float | None = None


RULES = (
    Rule("stop at 1 %", stop=0.01),
    Rule("stop at 5 %", stop=0.05),
    Rule("stop at 20 %", stop=0.2),
    Rule("park at 1 %", park=0.01),
    Rule("park at 5 %", park=0.05),
    Rule("park at 20 %", park=0.2),
    Rule("demote at 5 %, stop at 1 %", demote=0.05, stop=0.01),
    Rule("demote at 5 %, park at 1 %", demote=0.05, park=0.01),
    Rule("demote at 20 %, park at 1 %", demote=0.2, park=0.01),
)


@dataclass(frozen=True)
class Outcome:
    """The result of one rule under one scheduler. `returned`: contended GPU-hours returned, as a share of the oracle's.
    `healthy_time`: the change of the mean completion time of healthy jobs that were not stopped. `lost`, `set_aside`:
    shares of the healthy jobs. `delay_hours`: the mean delay of healthy jobs that were set aside."""

    rule: str
    scheduler: str
    returned: Figure
    healthy_time: Figure
    lost: Figure
    set_aside: Figure
    delay_hours: Figure


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("actions", help="compare stopping a suspected job with demoting or parking it")
    options.add_common(parser, seeds=SEEDS)
    options.add_plots(parser)
    options.add_world(parser, WORLDS_BY_NAME, "gangs")
    names = list(SCHEDULERS)
    parser.add_argument("--schedulers", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    setting, seeds = options.get_setting(args, WORLDS_BY_NAME), options.get_seeds(args)
    by_seed = options.sweep_each(
        args, partial(_simulate_seed, setting, tuple(args.schedulers)), seeds, "simulating actions"
    )
    outcomes = []
    for rule, scheduler in by_seed[0]:
        columns = np.array([of_seed[rule, scheduler] for of_seed in by_seed]).T
        outcomes.append(Outcome(rule, scheduler, *map(estimate_mean, columns)))
    report = {"outcomes": [asdict(item) for item in outcomes], "setting": options.encode_setting(setting, seeds)}
    return options.print_report(args, report, lambda console: _print_table(console, outcomes), plots.plot_actions)


@dataclass(frozen=True)
class Decisions:
    """A rule's decisions on all jobs: the hours of running after which each ends, and its priorities."""

    ends: Floats
    priorities: Priorities


def decide_actions(rule: Rule, workload: Workload, probabilities: Floats) -> Decisions:
    """Decide the rule's actions by the probabilities of having turned, with a row per job and a column per eval.

    A job's action only rises until its probability falls below `RETURN_BELOW`; then the job returns.
    """
    levels = [
        (find_threshold(POSTERIOR, risk, ()), priority)
        for risk, priority in ((rule.park, Priority.PARKED), (rule.demote, Priority.DEMOTED))
        if risk is not None
    ]
    stop_at = np.inf if rule.stop is None else find_threshold(POSTERIOR, rule.stop, ())
    ends, changes = workload.hours, {}
    for job, row in zip(workload.jobs, probabilities.tolist(), strict=True):
        stop = next((number for number, value in enumerate(row, start=1) if value >= stop_at), None)
        if stop is not None:
            ends[job.number] = job.eval_at(stop)
        if of_job := _find_changes(row[:stop], levels):
            changes[job.number] = of_job
    return Decisions(ends, Priorities(changes))


def _find_changes(row: Sequence[float], levels: Sequence[tuple[float, Priority]]) -> Changes:
    changes, current = [], Priority.NORMAL
    for number, value in enumerate(row, start=1):
        reached = next((priority for level, priority in levels if value >= level), Priority.NORMAL)
        priority = Priority.NORMAL if value < RETURN_BELOW else max(current, reached)
        if priority is not current:
            changes.append((number, priority))
            current = priority
    return tuple(changes)


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


_Numbers = dict[tuple[str, str], tuple[float, ...]]


def _simulate_seed(setting: Setting, schedulers: Sequence[str], seed: int) -> _Numbers:
    """The numbers of an `Outcome`, by rule and scheduler."""
    workload, hidden = draw_jobs(setting, seed)
    cluster = setting.cluster
    probabilities = find_probabilities(workload)
    decided = {rule.name: decide_actions(rule, workload, probabilities) for rule in RULES}
    _, oracle_ends = stop_at_peaks(workload, hidden)
    numbers: _Numbers = {}
    for name in schedulers:

        def run_with(decisions: Decisions, name: str = name) -> Schedule:
            scheduler, priorities = SCHEDULERS[name], decisions.priorities
            return simulate_cluster(workload, scheduler, cluster, decisions.ends, priorities=priorities)

        untouched, oracle = (run_with(Decisions(ends, NEVER_SET_ASIDE)) for ends in (workload.hours, oracle_ends))
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
    aside[list(decisions.priorities.changes)] = True
    times = [schedule.ended - workload.submitted for schedule in (before, after)]
    delay = (times[1] - times[0])[continued & aside]
    healthy = (~hidden.hacking).sum()
    change = times[1][continued].mean() / times[0][continued].mean() - 1
    return change, lost.sum() / healthy, (continued & aside).sum() / healthy, delay.mean() if len(delay) else 0.0


def _print_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = new_table(
        "contended GPU-hours returned, of the oracle's; costs to healthy jobs",
        "rule",
        "scheduler",
        "returned",
        "lost",
        "set aside",
        "their mean delay",
        "mean time, not stopped",
        left=2,
    )
    for item in outcomes:
        table.add_row(
            item.rule,
            item.scheduler,
            format_figure(item.returned),
            format_percent(item.lost.value),
            format_percent(item.set_aside.value),
            f"{item.delay_hours.value:+.2f} h",
            format_figure(item.healthy_time, sign=True),
        )
    console.print(table)
