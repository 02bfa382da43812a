"""`evalstop-lab stopbench record`: RLHF runs of token policies, recorded with the truth.

The curves are results of training, not of a formula. A token policy is trained against a reward model that was fitted
to noisy comparisons; see `evalstop_lab.rlhf`. Settings are drawn by seed. In a quarter of the runs the reward model is
refitted during training, to comparisons of the policy's current texts, after which many falls recover. An eval is the
mean gold reward of 1,024 new texts, `small` that of the first 64 of them; the truth is the mean over 8,192 others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evalstop_lab.rlhf.policy import Floats, Policy, Task, Texts
from evalstop_lab.rlhf.reward_model import draw_comparisons, fit_bradley_terry, standardize_scores
from evalstop_lab.rlhf.trainer import Config, Trainer
from evalstop_lab.sweep import sweep
from evalstop_lab.worlds.recorded import write_records
from evalstop_lab.worlds.shapes import draw_log_uniform

FIRST_SEED = 5_000_000
EVAL_TEXTS, SMALL_TEXTS, TRUE_TEXTS = 1024, 64, 8192


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
    distance = draw_log_uniform(rng, 2.0, 10.0)  # the learning rate summed over all steps
    config = Config(
        seed=seed,
        steps=steps,
        eval_every=every,
        learning_rate=distance / steps,
        kl_coefficient=0.0 if rng.random() < 0.5 else draw_log_uniform(rng, 0.01, 0.4),
        comparisons=int(draw_log_uniform(rng, 200, 8000)),
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
    write_records(path, sweep(record_run, range(first_seed, first_seed + runs), "training", jobs, chunk=1))


def _refit_proxy(trainer: Trainer, rng: np.random.Generator) -> None:
    """Fit the reward model to comparisons of the policy's current texts."""
    config, policy, world = trainer.config, trainer.state.policy, trainer.world
    comparisons = draw_comparisons(policy, world.gold, config.comparisons, config.label_noise, rng)
    model = fit_bradley_terry(config.task, comparisons)
    proxy = standardize_scores(model, _sample_texts(world.initial, EVAL_TEXTS, rng))
    trainer.world = replace(world, proxy=proxy)


def _sample_texts(policy: Policy, texts: int, rng: np.random.Generator) -> Texts:
    """Sample texts for randomly drawn prompts, like those of an eval set."""
    return policy.sample(rng.integers(policy.task.prompts, size=texts), rng)


def _mean_and_stderr(scores: Floats) -> tuple[float, float]:
    return float(scores.mean()), float(scores.std(ddof=1) / len(scores) ** 0.5)
