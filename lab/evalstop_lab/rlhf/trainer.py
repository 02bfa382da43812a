"""Trains a policy against the proxy and evaluates gold: policy gradient with a KL penalty, without I/O.

Each step samples `samples_per_prompt` texts for every prompt, with the rewards

    proxy(text) - kl_coefficient * (log policy(text) - log initial(text))

and takes a policy gradient step. The baseline of a text is the mean reward of the prompt's *other* texts, so the
gradient is unbiased. The random generator of step n is seeded with (seed, n), so a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.rlhf.policy import Floats, Policy, Task, draw_policy, repeat_prompts
from evalstop_lab.rlhf.rewards import (
    Gold,
    RewardModel,
    draw_comparisons,
    draw_gold,
    fit_bradley_terry,
    standardize_scores,
)

MEAN_DECAY = 0.9
SQUARE_DECAY = 0.999
EPSILON = 1e-8


@dataclass(frozen=True, eq=False)
class Moments:
    """Adam's running means of the gradient and of its square, in the parameters' shape, after `count` updates."""

    mean: Floats
    square: Floats
    count: int = 0

    @staticmethod
    def zero(size: int) -> Moments:
        return Moments(np.zeros(size), np.zeros(size))


def apply_adam(parameters: Floats, gradient: Floats, moments: Moments, learning_rate: float) -> tuple[Floats, Moments]:
    """Take one step of Adam up the gradient; return the new parameters and moments."""
    count = moments.count + 1
    mean = MEAN_DECAY * moments.mean + (1 - MEAN_DECAY) * gradient
    square = SQUARE_DECAY * moments.square + (1 - SQUARE_DECAY) * gradient**2
    direction = (mean / (1 - MEAN_DECAY**count)) / (np.sqrt(square / (1 - SQUARE_DECAY**count)) + EPSILON)
    return parameters + learning_rate * direction, Moments(mean, square, count)


INITIAL_SCALE = 1.6
STANDARDIZING_TEXTS = 4096


@dataclass(frozen=True)
class Config:
    """All parameters of a run: on one machine, equal configs give bit for bit equal runs.

    `comparisons`: number of labeled pairs to which the proxy is fitted. `label_noise`: share of wrong labels.
    `kl_coefficient`: penalty in proxy reward per nat of KL to the initial policy.
    """

    kl_coefficient: float
    comparisons: int
    label_noise: float
    seed: int = 0
    steps: int = 20_000
    eval_every: int = 400
    learning_rate: float = 0.0002
    samples_per_prompt: int = 128
    eval_samples_per_prompt: int = 64
    task: Task = field(default_factory=Task)


@dataclass(frozen=True)
class Eval:
    """The result of one eval: mean rewards of new texts with standard errors; exact `kl` in nats."""

    step: int
    proxy: float
    proxy_stderr: float
    gold: float
    gold_stderr: float
    kl: float


@dataclass(frozen=True, eq=False)
class State:
    """The state of training, which a checkpoint contains in addition to the config."""

    step: int
    policy: Policy
    moments: Moments


@dataclass(frozen=True, eq=False)
class World:
    """What is constant in a run: the initial policy, the gold reward and the proxy fitted to it."""

    initial: Policy
    gold: Gold
    proxy: RewardModel


WORLD, TRAINING, EVALUATION = range(3)
"""Independent random streams."""


class Trainer:
    """A run of RLHF: iterate over `evals()`; `state` can be saved between evals."""

    def __init__(self, config: Config, state: State | None = None) -> None:
        """Start at the initial policy, or resume from a saved state, whose own eval is not repeated."""
        self.config = config
        self.world = make_world(config)
        initial = self.world.initial
        self._resumed = state is not None
        self.state = state or State(0, initial, Moments.zero(initial.parameters.size))

    def evals(self, interrupted: Callable[[], bool] = lambda: False) -> Iterator[Eval]:
        """Train to the end, or until `interrupted()`; yield an eval at step 0 and every `eval_every` steps."""
        if self.state.step == 0 and not self._resumed:
            yield self.evaluate()
        while self.state.step < self.config.steps and not interrupted():
            self.train_step()
            if self.state.step % self.config.eval_every == 0:
                yield self.evaluate()

    def train_step(self) -> None:
        """Take one policy gradient step."""
        config, initial, policy = self.config, self.world.initial, self.state.policy
        step = self.state.step + 1
        texts = policy.sample(repeat_prompts(config.task, config.samples_per_prompt), self._rng(TRAINING, step))
        penalty = config.kl_coefficient * (policy.log_likelihood(texts) - initial.log_likelihood(texts))
        rewards = self.world.proxy.score(texts) - penalty
        weights = compute_advantages(rewards.reshape(config.task.prompts, -1)).ravel() / len(texts)
        gradient = policy.score_gradient(texts, weights)
        parameters, moments = apply_adam(policy.parameters, gradient, self.state.moments, config.learning_rate)
        self.state = State(step, Policy(config.task, parameters), moments)

    def evaluate(self) -> Eval:
        """Score new texts of the current policy; equal states give equal evals."""
        config, step, policy = self.config, self.state.step, self.state.policy
        prompts = repeat_prompts(config.task, config.eval_samples_per_prompt)
        texts = policy.sample(prompts, self._rng(EVALUATION, step))
        proxy, proxy_stderr = average_over_prompts(self.world.proxy.score(texts).reshape(config.task.prompts, -1))
        gold, gold_stderr = average_over_prompts(self.world.gold.score(texts).reshape(config.task.prompts, -1))
        return Eval(step, proxy, proxy_stderr, gold, gold_stderr, policy.kl(self.world.initial))

    def _rng(self, stream: int, step: int) -> np.random.Generator:
        return np.random.default_rng((self.config.seed, stream, step))


def make_world(config: Config) -> World:
    """Draw the initial policy, gold and comparisons from the seed, and fit the proxy to the comparisons."""
    rng = np.random.default_rng((config.seed, WORLD))
    initial = draw_policy(config.task, INITIAL_SCALE, rng)
    gold = draw_gold(initial, rng)
    comparisons = draw_comparisons(initial, gold, config.comparisons, config.label_noise, rng)
    proxy = fit_bradley_terry(config.task, comparisons)
    texts = initial.sample(repeat_prompts(config.task, STANDARDIZING_TEXTS // config.task.prompts), rng)
    return World(initial, gold, standardize_scores(proxy, texts))


def compute_advantages(rewards: Floats) -> Floats:
    """Return each reward minus the mean of the prompt's other rewards; input and result are (prompts, samples)."""
    samples = rewards.shape[1]
    return np.asarray((rewards - rewards.mean(axis=1, keepdims=True)) * (samples / (samples - 1)))


def average_over_prompts(scores: Floats) -> tuple[float, float]:
    """Return the mean of (prompts, samples) scores and its standard error over samples; prompts are fixed."""
    prompts, samples = scores.shape
    variance_of_means = scores.var(axis=1, ddof=1) / samples
    return float(scores.mean()), float(variance_of_means.sum() ** 0.5 / prompts)


PRESETS: Mapping[str, Config] = {
    "overoptimizes": Config(kl_coefficient=0.0, comparisons=500, label_noise=0.25),
    "healthy": Config(kl_coefficient=0.15, comparisons=8_000, label_noise=0.0),
}


def hasten_run(config: Config, factor: int) -> Config:
    """Return the same run with `factor` times fewer, larger steps: nearly the same curve and as many evals.

    Raises UnusableArguments if `factor` does not divide the steps between two evals.
    """
    if factor < 1 or config.eval_every % factor:
        raise UnusableArguments(f"--hasten {factor}: it must divide {config.eval_every}, the steps between two evals.")
    return replace(
        config,
        steps=config.steps // factor,
        eval_every=config.eval_every // factor,
        learning_rate=config.learning_rate * factor,
    )
