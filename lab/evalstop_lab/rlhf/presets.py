"""Two runs to watch: one that over-optimizes its proxy, one that stays healthy.

They share the task, the learning rate, the number of steps and the evals; they differ in the price of leaving the
initial policy and in how well the proxy knows gold. The KL penalty is what decides; few and noisy comparisons bring the
turn forward and make the fall steep.
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


def hastened(config: Config, factor: int) -> Config:
    """Return the same run in `factor` times fewer, larger steps: much the same curve, as many evals, sooner over.

    Raises CannotHasten when `factor` does not divide the steps between two evals.
    """
    if factor < 1 or config.eval_every % factor:
        raise CannotHasten(f"Here there are {config.eval_every} steps; {factor} does not divide them.")
    return replace(
        config,
        steps=config.steps // factor,
        eval_every=config.eval_every // factor,
        learning_rate=config.learning_rate * factor,
    )
