"""Two presets: a run that over-optimizes its proxy, and a run that stays healthy.

They share the task, the learning rate, the number of steps and the evals; they differ in the KL penalty and in the
quality of the proxy. The KL penalty decides whether gold turns; with few and noisy comparisons the turn comes earlier
and the fall is steeper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from evalstop_lab.errors import CannotHasten
from evalstop_lab.rlhf.trainer import Config

STEPS = 20_000
EVAL_EVERY = 400
LEARNING_RATE = 0.0002

OVEROPTIMIZES = Config(
    seed=0,
    steps=STEPS,
    eval_every=EVAL_EVERY,
    learning_rate=LEARNING_RATE,
    kl_coefficient=0.0,
    comparisons=500,
    label_noise=0.25,
)
HEALTHY = Config(
    seed=0,
    steps=STEPS,
    eval_every=EVAL_EVERY,
    learning_rate=LEARNING_RATE,
    kl_coefficient=0.15,
    comparisons=8_000,
    label_noise=0.0,
)
PRESETS: Mapping[str, Config] = MappingProxyType({"overoptimizes": OVEROPTIMIZES, "healthy": HEALTHY})


def hasten_run(config: Config, factor: int) -> Config:
    """Return the same run with `factor` times fewer, larger steps: nearly the same curve and as many evals.

    Raises CannotHasten if `factor` does not divide the steps between two evals.
    """
    if factor < 1 or config.eval_every % factor:
        raise CannotHasten(f"{factor} does not divide {config.eval_every}.")
    return replace(
        config,
        steps=config.steps // factor,
        eval_every=config.eval_every // factor,
        learning_rate=config.learning_rate * factor,
    )
