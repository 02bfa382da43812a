"""`evalstop-lab cluster population`: compares a hyper-parameter sweep without stops, with stops, and as a population.

Source      Population Based Training (Jaderberg et al., arXiv 1711.09846): after each eval the worst fifth of the
            members copy the checkpoint of a member of the best fifth, and its hyper-parameter times 0.8 or 1.2
            (truncation selection).
Departs     A member has a position on Gao's curve of the eval score over d (arXiv 2210.10760), called the frontier, and
            one hyper-parameter, the speed at which it moves along the curve. All members move along the same curve, as
            Gao et al. found for a KL penalty: a population can keep members near the peak, but not above it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from evalstop_detectors import Policy
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import format_figure, new_table
from evalstop_lab.simulator import study
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Kind, Workload
from evalstop_lab.simulator.stopping import decide_stops
from evalstop_lab.worlds.scoring import Figure, estimate_mean

SEEDS = 40
FIFTH = 5
PERTURBED = (0.8, 1.2)


@dataclass(frozen=True)
class Sweep:
    """A sweep of members that are trained in parallel.

    `speed_sd`: the standard deviation of the logarithm of speeds. `peak`: the share of its plan at which a member of
    speed 1 peaks. `noise_sd`: of one eval, as a share of the height of the frontier.
    """

    members: int = 20
    evals: int = 40
    speed_sd: float = 0.4
    peak: float = 0.6
    noise_sd: float = 0.05


@dataclass(frozen=True, eq=False)
class Trained:
    """The true and the measured eval scores, by member and eval."""

    eval_scores: Floats
    measured: Floats


@dataclass(frozen=True)
class Outcome:
    """The result of one strategy. `gpu_hours`: as a share of all plans. `kept`: the true eval score of the checkpoint
    with the highest measured score. `at_the_end`: the mean true eval score of the members at their ends. Scores are
    relative to the maximum of the frontier."""

    strategy: str
    gpu_hours: Figure
    kept: Figure
    at_the_end: Figure


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "population", help="compare a sweep without stops, with stops, and trained as a population"
    )
    study.add_common(parser, seeds=SEEDS)
    parser.add_argument("--members", type=positive_number, default=Sweep.members, help="default: %(default)s")
    study.add_policies(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.cluster_jobs is not None:
        raise UnusableArguments("A sweep has no jobs; give --members instead of --cluster-jobs.")
    if args.members < FIFTH:
        raise UnusableArguments(f"--members must be at least {FIFTH}.")
    setting = Sweep(members=args.members)
    work = partial(_simulate_seed, setting, study.get_policies(args))
    by_seed = study.sweep_each(args, work, study.get_seeds(args), "simulating sweeps")
    outcomes = [
        Outcome(strategy, *(estimate_mean(column) for column in np.array([row[strategy] for row in by_seed]).T))
        for strategy in by_seed[0]
    ]
    report = {"outcomes": [asdict(outcome) for outcome in outcomes], "sweep": asdict(setting), "seeds": args.seeds}
    return study.print_report(args, report, lambda console: _print_table(console, outcomes, setting))


def train_members(setting: Sweep, seed: int, population: bool) -> Trained:
    """Train all members in parallel; a seed has the same members and noise with and without `population`."""
    start, noise, chance = (np.random.default_rng([seed, stream]) for stream in range(3))
    speeds = np.exp(setting.speed_sd * start.standard_normal(setting.members))
    errors = setting.noise_sd * noise.standard_normal((setting.evals, setting.members))
    places = np.zeros(setting.members)
    eval_scores = np.zeros((setting.evals, setting.members))
    for index in range(setting.evals):
        places = places + speeds / setting.peak / setting.evals
        eval_scores[index] = places * (1 - np.log(places))
        if population:
            replace_worst(eval_scores[index] + errors[index], places, speeds, chance)
    return Trained(eval_scores.T, (eval_scores + errors).T)


def replace_worst(measured: Floats, places: Floats, speeds: Floats, chance: np.random.Generator) -> None:
    """Replace place and speed of each of the worst fifth by those of one of the best fifth, and perturb the speed."""
    order = np.argsort(measured)
    count = len(order) // FIFTH
    worst, models = order[:count], chance.choice(order[-count:], count)
    places[worst] = places[models]
    speeds[worst] = speeds[models] * chance.choice(PERTURBED, count)


def _simulate_seed(setting: Sweep, policies: Sequence[Policy], seed: int) -> dict[str, tuple[float, ...]]:
    """GPU-hours, the kept eval score and the mean eval score at the end, by strategy."""
    independent, population = (train_members(setting, seed, population=value) for value in (False, True))
    whole = np.full(setting.members, setting.evals)
    outcomes: dict[str, tuple[float, ...]] = {
        "no stops": _measure_outcome(independent, whole),
        "population": _measure_outcome(population, whole),
    }
    workload = _build_workload(setting, independent)
    for policy in policies:
        after = decide_stops(policy, workload).after
        ends = np.where(after > 0, after, setting.evals)
        outcomes[f"stopped by {policy.name}"] = _measure_outcome(independent, ends)
    return outcomes


def _measure_outcome(trained: Trained, ends: Integers) -> tuple[float, float, float]:
    members, evals = trained.measured.shape
    is_run = np.arange(evals) < ends[:, None]
    best = np.unravel_index(np.where(is_run, trained.measured, -np.inf).argmax(), trained.measured.shape)
    at_the_end = trained.eval_scores[np.arange(members), ends - 1].mean()
    return float(ends.mean() / evals), float(trained.eval_scores[best]), float(at_the_end)


def _build_workload(setting: Sweep, trained: Trained) -> Workload:
    jobs = tuple(
        Job(number, Kind.RLHF, 0.0, 1, 1.0, 1.0, setting.evals, (0.0,) * setting.evals)
        for number in range(setting.members)
    )
    proxy = np.broadcast_to(np.arange(1.0, setting.evals + 1), trained.measured.shape)
    return Workload(jobs, trained.measured, proxy)


def _print_table(console: Console, outcomes: Sequence[Outcome], setting: Sweep) -> None:
    table = new_table(
        f"a sweep of {setting.members} members",
        "strategy",
        "GPU-hours",
        "eval score of the kept checkpoint",
        "mean eval score at the end",
    )
    for outcome in outcomes:
        figures = (outcome.gpu_hours, outcome.kept, outcome.at_the_end)
        table.add_row(outcome.strategy, *map(format_figure, figures))
    console.print(table)
