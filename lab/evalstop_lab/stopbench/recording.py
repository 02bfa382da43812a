"""`evalstop-lab stopbench record`: trains policies against reward models, and records their metrics and the truth.

The curves are results of training, not of a formula. A token policy is trained against a reward model that was fitted
to noisy comparisons; see `evalstop_lab.rlhf`. Settings are drawn by seed. In a quarter of the runs the reward model is
refitted during training, to comparisons of the policy's current texts, after which many falls recover. An eval is the
mean gold reward of 1,024 new texts, `small` that of the first 64 of them; the truth is the mean over 8,192 others.
"""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evalstop_lab.rlhf.policy import Policy
from evalstop_lab.rlhf.reward_model import draw_comparisons, fit_bradley_terry, standardize_scores
from evalstop_lab.rlhf.task import Floats, Integers, Task, Texts
from evalstop_lab.rlhf.trainer import Config, Trainer
from evalstop_lab.sweep import sweep
from evalstop_lab.worlds.noise import Noise, NoiseKind
from evalstop_lab.worlds.prompt_scores import PromptScores
from evalstop_lab.worlds.truth import Label, Truth, label_curve
from evalstop_lab.worlds.world import World

FIRST_SEED = 5_000_000
EVAL_TEXTS, SMALL_TEXTS, TRUE_TEXTS = 1024, 64, 8192
AMBIGUOUS_FALLS = (0.05, 0.1)
"""A run whose fall is between these shares of its gain is neither healthy nor hacking."""

STANDARD_ERRORS = 3
"""A fall of fewer standard errors of a difference between two smoothed true scores is not certain."""

SMOOTHED_OVER = 5
"""The number of evals over which true scores are averaged for the label: the maximum of noisy means is too high."""


@dataclass(frozen=True)
class Setting:
    """The parameters of a recorded run: the trainer's config, and the steps at which the reward model is refitted."""

    config: Config
    refits: tuple[int, ...]


def draw_setting(seed: int) -> Setting:
    """Draw the setting of a run: 250 to 1,200 steps, 50 to 100 evals, a KL penalty in half of the runs."""
    rng = np.random.default_rng([seed, 1])
    evals, every = int(rng.integers(50, 101)), int(rng.integers(5, 13))
    steps = evals * every
    distance = float(np.exp(rng.uniform(np.log(2.0), np.log(10.0))))  # the learning rate summed over all steps
    config = Config(
        seed=seed,
        steps=steps,
        eval_every=every,
        learning_rate=distance / steps,
        kl_coefficient=0.0 if rng.random() < 0.5 else float(np.exp(rng.uniform(np.log(0.01), np.log(0.4)))),
        comparisons=int(np.exp(rng.uniform(np.log(200), np.log(8000)))),
        label_noise=float(rng.uniform(0.0, 0.3)),
        samples_per_prompt=int(rng.choice([4, 8, 16, 32, 64])),
        task=Task(int(rng.choice([4, 8, 16])), int(rng.integers(10, 15)), int(rng.integers(12, 21))),
    )
    refits = int(rng.integers(1, 4)) if rng.random() < 0.25 else 0
    return Setting(config, tuple(sorted(int(step) for step in rng.integers(steps // 5, steps, size=refits))))


def record_run(seed: int) -> dict[str, Any]:
    """Train one run to its end; returns its setting, its log and the truth as JSON values."""
    setting = draw_setting(seed)
    config, trainer = setting.config, Trainer(setting.config)
    log: dict[str, list[float]] = {
        name: [] for name in ("step", "eval", "stderr", "small", "small_stderr", "proxy", "kl")
    }
    truth = []
    while True:
        step, policy = trainer.state.step, trainer.state.policy
        if step % config.eval_every == 0:
            rng = np.random.default_rng([seed, 2, step])
            texts = _sample_texts(policy, EVAL_TEXTS, rng)
            scores = trainer.world.gold.score(texts)
            values = (
                *_mean_and_stderr(scores),
                *_mean_and_stderr(scores[:SMALL_TEXTS]),
                float(trainer.world.proxy.score(texts).mean()),
                policy.kl(trainer.world.initial),
            )
            log["step"].append(step)
            for name, value in zip(list(log)[1:], values, strict=True):
                log[name].append(round(value, 4))
            truth.append(round(float(trainer.world.gold.score(_sample_texts(policy, TRUE_TEXTS, rng)).mean()), 4))
        if step == config.steps:
            return {"seed": seed, **asdict(setting), "log": log, "truth": truth}
        if step in setting.refits:
            _refit_proxy(trainer, np.random.default_rng([seed, 3, step]))
        trainer.train_step()


def record_runs(path: Path, runs: int, jobs: int, first_seed: int) -> None:
    """Train runs of consecutive seeds on all cores and write them to a gzipped file of JSON lines."""
    records = sweep(record_run, range(first_seed, first_seed + runs), "training", jobs, chunk=1)
    with path.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
        for record in records:
            packed.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


def read_runs(path: Path, small: bool = False) -> list[World]:
    """The recorded runs as worlds; `small`: by their evals of 64 texts instead of 1,024."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [_to_world(json.loads(line), small) for line in lines]


def _refit_proxy(trainer: Trainer, rng: np.random.Generator) -> None:
    """Fit the reward model to comparisons of the policy's current texts."""
    config, policy, world = trainer.config, trainer.state.policy, trainer.world
    comparisons = draw_comparisons(policy, world.gold, config.comparisons, config.label_noise, rng)
    model = fit_bradley_terry(config.task, comparisons)
    proxy = standardize_scores(model, _sample_texts(world.initial, EVAL_TEXTS, rng))
    trainer.world = replace(world, proxy=proxy)


def _to_world(record: dict[str, Any], small: bool) -> World:
    log = record["log"]
    steps = np.asarray(log["step"], dtype=np.int64)
    stderr = np.asarray(log["small_stderr" if small else "stderr"], dtype=np.float64)
    sd = float(np.sqrt(np.mean(stderr**2)))
    truth = _label_run(steps, np.asarray(record["truth"], dtype=np.float64), record.get("truth_stderr", 0.0), sd)
    return World(
        name=f"{record.get('family', 'trained')}-{record['seed']}",
        family=record.get("family", "refitted" if record["refits"] else "trained"),
        seed=record["seed"],
        steps=steps,
        eval_scores=np.asarray(log["small" if small else "eval"], dtype=np.float64),
        eval_stderr=stderr,
        proxy=np.asarray(log["proxy"], dtype=np.float64),
        kl=np.asarray(log["kl"], dtype=np.float64),
        noise=Noise(NoiseKind.RECORDED, sd / truth.unit if truth.unit else math.inf, 0.0, stderr_given=True),
        truth=truth,
        planned_steps=float(steps[-1]),
        prompt_scores=_read_prompt_scores(record) if "prompts" in record else None,
    )


def _read_prompt_scores(record: dict[str, Any]) -> PromptScores:
    means, sds = (np.asarray(record[name], dtype=np.float64) for name in ("prompts", "paired_sd"))
    return PromptScores(means / 1000, sds, record["paired_texts"])


def _label_run(steps: Integers, scores: Floats, stderr: float, sd: float) -> Truth:
    """Label the run by its smoothed true scores.

    A fall between 5 and 10 % of the gain is ambiguous; so is a larger one below three standard errors.
    """
    half = SMOOTHED_OVER // 2
    padded = np.pad(scores, half, mode="edge")
    smoothed = np.convolve(padded, np.full(SMOOTHED_OVER, 1 / SMOOTHED_OVER), mode="valid")
    truth = label_curve(steps, smoothed, sd)
    low, high = AMBIGUOUS_FALLS
    uncertain = STANDARD_ERRORS * stderr * math.sqrt(2 / SMOOTHED_OVER)
    if low * truth.unit <= truth.drop <= max(high * truth.unit, uncertain):
        return replace(truth, label=Label.AMBIGUOUS)
    return truth


def _sample_texts(policy: Policy, texts: int, rng: np.random.Generator) -> Texts:
    """Sample texts for randomly drawn prompts, like those of an eval set."""
    return policy.sample(rng.integers(policy.task.prompts, size=texts), rng)


def _mean_and_stderr(scores: Floats) -> tuple[float, float]:
    return float(scores.mean()), float(scores.std(ddof=1) / len(scores) ** 0.5)
