"""`evalstop-lab sweep`: eight token policies trained as one group, by each rule of groups and by none.

Each seed draws one world and eight settings of KL coefficient and learning rate. All rules see the same kind of noisy
evals, and none trains for more than the steps of eight whole runs. What a sweep ships is measured on new texts, so that
no rule gains by the noise of the eval that it chose by.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
from evalstop_detectors import Exploit, GroupMember, GroupRule, Hyperparameter, Score, Scores, choose_best, judge_group
from evalstop_detectors.checkpoint.smoothing import smooth_scores
from rich.console import Console

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.report import format_number, list_versions, new_table, to_json_values
from evalstop_lab.rlhf.policy import Policy, repeat_prompts
from evalstop_lab.rlhf.trainer import PRESETS, Config, State, Trainer, World, hasten_run, make_world
from evalstop_lab.sweep import add_jobs_option, sweep
from evalstop_lab.worlds.scoring import Figure, estimate_mean

SEEDS, MEMBERS, HASTEN, ROUNDS, ORDERS = 20, 8, 80, 10, 20
EVAL_SAMPLES = 8
"""Texts per prompt of an eval: few, so that its noise matters."""
MEASURED_TEXTS = 16_384
SETTINGS, MEASURING, ORDERING = 10, 11, 12
"""Random streams beside those of the trainer."""
ALONE, REFILLED, OPTUNA = "random search", "median, refilled", "Optuna's pruner"


@dataclass(frozen=True)
class Setup:
    """The config of a run but for what is drawn, the ranges of that, and the rules by name."""

    config: Config
    ranges: Mapping[str, tuple[float, float]]
    rules: Mapping[str, GroupRule | None]
    halving: Mapping[str, GroupRule]


def make_setup(preset: str, hasten: int) -> Setup:
    """Rules with their defaults, which compare the runs ten times."""
    config = replace(hasten_run(PRESETS[preset], hasten), eval_samples_per_prompt=EVAL_SAMPLES)
    rate, round_steps = config.learning_rate, config.steps // ROUNDS
    ranges = {"kl_coefficient": (0.003, 0.3), "learning_rate": (rate / 4, rate * 4)}
    explored = {name: Hyperparameter(low=low, high=high) for name, (low, high) in ranges.items()}
    median = GroupRule("median", from_step=2 * round_steps)
    population = GroupRule("pbt", ready_steps=round_steps, hyperparameters=explored)
    halving = GroupRule("halving", fewest=1, first_rung=round_steps)
    published, pruner = (msgspec.structs.replace(rule, sigmas=0.0) for rule in (population, halving))
    rules = {ALONE: None, "median": median, REFILLED: median, "pbt": population, "pbt, sigmas 0": published}
    # Without errors it decides as Optuna's SuccessiveHalvingPruner; a test compares the two.
    return Setup(config, ranges, rules, {"halving": halving, OPTUNA: pruner})


@dataclass(eq=False)
class Run:
    """A token policy in training; `lineages`: of each the scores of its evals, and the states at them."""

    number: int
    trainer: Trainer
    settings: dict[str, float | str]
    since: int = 0
    is_stopped: bool = False
    lineages: list[tuple[Scores, dict[int, State]]] = field(default_factory=lambda: [(Scores(), {})])

    @property
    def is_live(self) -> bool:
        return not self.is_stopped and self.trainer.state.step < self.trainer.config.steps

    def advance(self) -> int:
        """Train up to the next eval and score it; returns the number of steps."""
        for _ in range(self.trainer.config.eval_every):
            self.trainer.train_step()
        scored, state = self.trainer.evaluate(), self.trainer.state
        scores, states = self.lineages[-1]
        scores = scores.add_scores([Score(scored.step, scored.gold, scored.gold_stderr)])
        self.lineages[-1] = scores.add_checkpoints({scored.step: f"memory://{self.number}/{scored.step}"}), states
        # A new policy, without the tables that this one has computed.
        states[scored.step] = replace(state, policy=Policy(state.policy.task, state.policy.parameters))
        return self.trainer.config.eval_every

    def observe(self) -> GroupMember:
        return GroupMember(f"{self.number:03}", self.lineages[-1][0], self.since, self.is_live, self.settings)

    def copy(self, source: Run, exploit: Exploit) -> None:
        """Go on from the checkpoint of the source, in a lineage of its own."""
        state = source.lineages[-1][1][exploit.source_step]
        self.settings, self.since = exploit.hyperparameters, exploit.source_step
        self.trainer = start_trainer(self.trainer.config, self.settings, self.trainer.world, state)
        self.lineages.append((Scores(), {}))

    def find_best(self) -> tuple[float, State]:
        """The score of its best checkpoint, as EvalStop chooses it in each lineage, and its state."""
        chosen = [(choose_best(scores), states) for scores, states in self.lineages]
        found = [
            (best.score if best.smoothed is None else best.smoothed, states[best.step])
            for best, states in chosen
            if best
        ]
        return max(found, key=lambda item: item[0])

    def find_last(self) -> tuple[float, State]:
        """Its last smoothed score, and its state."""
        scores = next(scores for scores, _ in reversed(self.lineages) if len(scores.steps))
        return float(smooth_scores(scores.values).mean[-1]), self.trainer.state


def start_trainer(
    config: Config, settings: Mapping[str, float | str], world: World, state: State | None = None
) -> Trainer:
    coefficient, rate = float(settings["kl_coefficient"]), float(settings["learning_rate"])
    return Trainer(replace(config, kl_coefficient=coefficient, learning_rate=rate), state, world)


def train_group(setup: Setup, world: World, seed: int, rule: GroupRule | None, refills: bool) -> tuple[list[Run], int]:
    """Train eight runs side by side and carry out the calls of the rule at once; returns them and the steps trained.

    `refills`: a run that is stopped makes room for one with new settings, as long as there are steps.
    """
    rng = np.random.default_rng((seed, SETTINGS))

    def start_run(number: int) -> Run:
        settings = {name: float(np.exp(rng.uniform(*np.log(ends)))) for name, ends in setup.ranges.items()}
        config = replace(setup.config, seed=1_000 * seed + number)
        return Run(number, start_trainer(config, settings, world), dict(settings))

    runs = [start_run(number) for number in range(MEMBERS)]
    spent = 0
    while spent < MEMBERS * setup.config.steps and (live := [run for run in runs if run.is_live]):
        spent += sum(run.advance() for run in live)
        for call in judge_group(rule, [run.observe() for run in runs], seed) if rule else ():
            run = runs[int(call.member)]
            if call.source is not None:
                run.copy(runs[int(call.source.source_run)], call.source)
                continue
            run.is_stopped = True
            if refills:
                runs.append(start_run(len(runs)))
    return runs, spent


def measure(world: World, state: State, seed: int) -> float:
    """The gold reward on new texts."""
    prompts = repeat_prompts(state.policy.task, MEASURED_TEXTS // state.policy.task.prompts)
    texts = state.policy.sample(prompts, np.random.default_rng((seed, MEASURING)))
    return float(world.gold.score(texts).mean())


def run_seed(preset: str, hasten: int, seed: int) -> dict[str, dict[str, float]]:
    """The figures of each rule on one seed; a whole run counts as one GPU-hour."""
    setup = make_setup(preset, hasten)
    world = make_world(replace(setup.config, seed=seed))
    figures = {}
    for name, rule in setup.rules.items():
        runs, spent = train_group(setup, world, seed, rule, refills=name == REFILLED)
        _, last = max((run.find_last() for run in runs if not run.is_stopped), key=lambda item: item[0])
        _, best = max((run.find_best() for run in runs), key=lambda item: item[0])
        figures[name] = {"final": measure(world, last, seed), "best": measure(world, best, seed)}
        figures[name]["gpu_hours"] = spent / setup.config.steps
        if rule is None:
            finals = [measure(world, run.trainer.state, seed) for run in runs]
            curves = [run.lineages[0][0] for run in runs]
    for name, rule in setup.halving.items():
        figures[name] = replay_halving(rule, curves, finals, setup.config.steps, seed)
    return figures


def replay_halving(
    rule: GroupRule, curves: Sequence[Scores], finals: Sequence[float], steps: int, seed: int
) -> dict[str, float]:
    """What it stops of recorded curves that come one after the other, on average over random orders.

    `regretted`: the share of the best `1 / eta` of all whole runs that it stops.
    """
    rng = np.random.default_rng((seed, ORDERING))
    rungs = [rung for power in range(steps.bit_length()) if (rung := rule.first_rung * rule.eta**power) <= steps]
    good = set(np.argsort(finals)[-max(1, len(curves) // rule.eta) :].tolist())
    stops = regretted = saved = 0
    for _ in range(ORDERS):
        ended: list[GroupMember] = []
        for number in rng.permutation(len(curves)).tolist():
            seen = [GroupMember(str(number), curves[number].before(rung + 1)) for rung in rungs]
            places = (place for place, own in enumerate(seen) if judge_group(rule, [*ended, own], seed))
            if (place := next(places, None)) is not None:
                stops, regretted, saved = stops + 1, regretted + (number in good), saved + steps - rungs[place]
            scores = curves[number] if place is None else seen[place].scores
            ended.append(GroupMember(str(number), scores, is_live=False))
    hours = len(curves) - saved / steps / ORDERS
    return {"stopped": stops / ORDERS, "regretted": regretted / (ORDERS * len(good)), "gpu_hours": hours}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=sorted(PRESETS), default="overoptimizes", help="the world to train in")
    parser.add_argument("--seeds", type=positive_number, default=SEEDS, help="number of sweeps (default: %(default)s)")
    parser.add_argument("--first-seed", type=whole_number, default=0, help="the first seed (default: 0)")
    parser.add_argument("--hasten", type=positive_number, default=HASTEN, help="divide the steps of a run by this")
    add_jobs_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    config = make_setup(args.preset, args.hasten).config
    work = partial(run_seed, args.preset, args.hasten)
    figures = summarize(sweep(work, seeds, "training sweeps", args.jobs, chunk=1))
    if args.json:
        rows = {name: {key: asdict(item) for key, item in row.items()} for name, row in figures.items()}
        document = {"figures": rows, "config": asdict(config), "seeds": [seeds[0], seeds[-1]]}
        sys.stdout.write(json.dumps(to_json_values(document | {"versions": list_versions()})) + "\n")
        return 0
    keys = ("final", "final_gain", "best", "best_gain", "stopped", "regretted", "gpu_hours")
    table = new_table(args.preset, "rule", *(key.replace("_", " ") for key in keys), caption="intervals are 95 %")
    for name, row in figures.items():
        table.add_row(name, *(_format_figure(row.get(key)) for key in keys))
    (Console() if sys.stdout.isatty() else Console(width=180)).print(table)
    return 0


def summarize(by_seed: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, Figure]]:
    """The mean of each figure over the seeds with its interval; gains are over random search, or over Optuna's pruner,
    seed by seed."""
    figures: dict[str, dict[str, Figure]] = {}
    for name, first in by_seed[0].items():
        row = {key: estimate_mean([seed[name][key] for seed in by_seed]) for key in first}
        for key, other in (("final", ALONE), ("best", ALONE), ("regretted", OPTUNA)):
            if key in first and name != other:
                row[f"{key}_gain"] = estimate_mean([seed[name][key] - seed[other][key] for seed in by_seed])
        figures[name] = row
    return figures


def _format_figure(figure: Figure | None) -> str:
    if figure is None or math.isnan(figure.value):
        return "-"
    return f"{figure.value:.2f} [{format_number(figure.low, 2)}, {format_number(figure.high, 2)}]"
