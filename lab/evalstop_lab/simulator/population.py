"""`evalstop-lab cluster population`: a tenant's sweep left alone, with its turned members stopped, or as a population.

Source      Population Based Training (Jaderberg et al., arXiv 1711.09846): after each eval the worst fifth take over
            the checkpoint of one of the best fifth, and its hyper-parameter times .8 or 1.2 (truncation selection).
Departs     A member is a place on Gao's frontier of the eval score (arXiv 2210.10760) and one hyper-parameter, the
            speed at which it moves along. `curvature` says how much lower the frontier is for speeds other than 1; at
            0, its default, all move along the same one, as Gao et al. found for a KL penalty: then a population can
            keep its members near the peak, and lift nobody above it.
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
from evalstop_lab.report import format_percent, new_table
from evalstop_lab.simulator import options, plots
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Kind, Workload
from evalstop_lab.simulator.paired import interval
from evalstop_lab.simulator.stopping import decide
from evalstop_lab.worlds.scoring import Figure

SEEDS = 40
FIFTH = 5
PERTURBED = (0.8, 1.2)


@dataclass(frozen=True)
class Sweep:
    """A sweep of members that are trained in step.

    `speed_sd` is of the logarithm; at speed 1 a member has its peak at `peak` of its plan. `noise_sd` is of one eval,
    as a share of the height of the frontier.
    """

    members: int = 20
    evals: int = 40
    speed_sd: float = 0.4
    peak: float = 0.6
    noise_sd: float = 0.05
    curvature: float = 0.0


@dataclass(frozen=True, eq=False)
class Trained:
    """By member and eval: the true eval score and what was measured of it."""

    eval_scores: Floats
    seen: Floats


@dataclass(frozen=True)
class Outcome:
    """Of one way to run a sweep: its GPU-hours, all plans being 1; the true eval score of the checkpoint that was
    measured best, and the mean true eval score of the members at their ends, 1 being the top of the frontier."""

    way: str
    gpu_hours: Figure
    kept: Figure
    at_the_end: Figure


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `population` to `evalstop-lab cluster`."""
    parser = subparsers.add_parser("population", help="a sweep left alone, stopped, or trained as a population")
    options.add(parser, seeds=SEEDS)
    parser.add_argument("--members", type=positive_number, default=Sweep.members, help="default: %(default)s")
    options.add_policies(parser)
    parser.add_argument(
        "--curvature", type=float, default=0.0, help="how much speed changes the height of the frontier (default: 0)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab cluster population`; return its exit code."""
    if args.cluster_jobs is not None:
        raise UnusableArguments("A sweep has members rather than jobs; give --members.")
    if args.members < FIFTH:
        raise UnusableArguments(f"A population has a best and a worst fifth; give at least {FIFTH} --members.")
    setting = Sweep(members=args.members, curvature=args.curvature)
    work = partial(_simulate, setting, options.policies_of(args))
    found = options.sweep_each(args, work, options.seeds(args), "sweeping")
    outcomes = [
        Outcome(way, *(interval(column) for column in np.array([of_seed[way] for of_seed in found]).T))
        for way in found[0]
    ]
    report = {"outcomes": [asdict(outcome) for outcome in outcomes], "sweep": asdict(setting), "seeds": args.seeds}
    return options.print_report(args, report, lambda console: _print(console, outcomes, setting), plots.population)


def train(setting: Sweep, seed: int, population: bool) -> Trained:
    """Train all members in step; the same seed starts the same members with the same noise either way."""
    start, noise, chance = (np.random.default_rng([seed, stream]) for stream in range(3))
    speeds = np.exp(setting.speed_sd * start.standard_normal(setting.members))
    errors = setting.noise_sd * noise.standard_normal((setting.evals, setting.members))
    places = np.zeros(setting.members)
    eval_scores = np.zeros((setting.evals, setting.members))
    for index in range(setting.evals):
        places = places + speeds / setting.peak / setting.evals
        eval_scores[index] = _height(setting, speeds) * places * (1 - np.log(places))
        if population:
            select(eval_scores[index] + errors[index], places, speeds, chance)
    return Trained(eval_scores.T, (eval_scores + errors).T)


def select(seen: Floats, places: Floats, speeds: Floats, chance: np.random.Generator) -> None:
    """The worst fifth take over place and speed of one of the best fifth each, and perturb the speed; in place."""
    order = np.argsort(seen)
    count = len(order) // FIFTH
    worst, models = order[:count], chance.choice(order[-count:], count)
    places[worst] = places[models]
    speeds[worst] = speeds[models] * chance.choice(PERTURBED, count)


def _height(setting: Sweep, speeds: Floats) -> Floats:
    return np.asarray(np.maximum(1 - setting.curvature * np.log(speeds) ** 2, 0.0))


def _simulate(setting: Sweep, policies: Sequence[Policy], seed: int) -> dict[str, tuple[float, ...]]:
    """By way: GPU-hours, the eval score kept, the eval score at the end."""
    alone, together = (train(setting, seed, population) for population in (False, True))
    whole = np.full(setting.members, setting.evals)
    found: dict[str, tuple[float, ...]] = {
        "left alone": _outcome(alone, whole),
        "population": _outcome(together, whole),
    }
    workload = _workload(setting, alone)
    for policy in policies:
        after = decide(policy, workload).after
        found[f"stopped by {policy.name}"] = _outcome(alone, np.where(after > 0, after, setting.evals))
    return found


def _outcome(trained: Trained, ends: Integers) -> tuple[float, float, float]:
    members, evals = trained.seen.shape
    run = np.arange(evals) < ends[:, None]
    best = np.unravel_index(np.where(run, trained.seen, -np.inf).argmax(), trained.seen.shape)
    at_the_end = trained.eval_scores[np.arange(members), ends - 1].mean()
    return float(ends.mean() / evals), float(trained.eval_scores[best]), float(at_the_end)


def _workload(setting: Sweep, trained: Trained) -> Workload:
    jobs = tuple(
        Job(number, 0, Kind.RLHF, 0.0, 1, 1.0, 1.0, setting.evals, (0.0,) * setting.evals)
        for number in range(setting.members)
    )
    proxy = np.broadcast_to(np.arange(1.0, setting.evals + 1), trained.seen.shape)
    return Workload(jobs, trained.seen, proxy, np.zeros(setting.members))


def _print(console: Console, outcomes: Sequence[Outcome], setting: Sweep) -> None:
    table = new_table(
        f"a sweep of {setting.members} members, curvature {setting.curvature:g}",
        "",
        "GPU-hours",
        "eval score of the kept checkpoint",
        "mean eval score at the members' ends",
    )
    for outcome in outcomes:
        figures = (outcome.gpu_hours, outcome.kept, outcome.at_the_end)
        table.add_row(
            outcome.way,
            *(
                f"{format_percent(item.value)} [{format_percent(item.low)}, {format_percent(item.high)}]"
                for item in figures
            ),
        )
    console.print(table)
