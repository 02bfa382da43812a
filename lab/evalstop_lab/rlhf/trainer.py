"""Training against the proxy while watching gold: policy gradient with a KL penalty, as numbers in and numbers out.

Each step writes `samples_per_prompt` texts for every prompt, rewards each with

    proxy(text) - kl_coefficient * (log policy(text) - log initial(text))

and climbs the policy gradient with the mean reward of the prompt's *other* texts as baseline, which leaves the gradient
unbiased. Nothing here reads a clock or touches a disk. The chance of step n is a function of (seed, n) alone, so the
state of a random generator is the pair of them, and a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from evalstop_lab.rlhf.gold import Gold, random_gold
from evalstop_lab.rlhf.policy import Policy, random_policy
from evalstop_lab.rlhf.reward_model import RewardModel, compare, fit_bradley_terry, standardized
from evalstop_lab.rlhf.task import Floats, Task, each_prompt

MEAN_DECAY = 0.9
SQUARE_DECAY = 0.999
EPSILON = 1e-8


@dataclass(frozen=True, eq=False)
class Moments:
    """Running means of the gradient and of its square, both of the parameters' shape, after `count` updates."""

    mean: Floats
    square: Floats
    count: int = 0

    @staticmethod
    def zero(size: int) -> Moments:
        """Return the moments before the first update."""
        return Moments(np.zeros(size), np.zeros(size))


def ascend(parameters: Floats, gradient: Floats, moments: Moments, learning_rate: float) -> tuple[Floats, Moments]:
    """Take one step up the gradient; return the new parameters and moments."""
    count = moments.count + 1
    mean = MEAN_DECAY * moments.mean + (1 - MEAN_DECAY) * gradient
    square = SQUARE_DECAY * moments.square + (1 - SQUARE_DECAY) * gradient**2
    direction = (mean / (1 - MEAN_DECAY**count)) / (np.sqrt(square / (1 - SQUARE_DECAY**count)) + EPSILON)
    return parameters + learning_rate * direction, Moments(mean, square, count)


INITIAL_SCALE = 1.6
STANDARDIZING_TEXTS = 4096


@dataclass(frozen=True)
class Config:
    """Everything that decides a run: the same config gives the same run to the last bit on the same machine.

    `comparisons` is how many labeled pairs the proxy is fitted to, `label_noise` the share of them labeled the wrong
    way round, `kl_coefficient` the price in proxy reward of one nat away from the initial policy.
    """

    seed: int
    steps: int
    eval_every: int
    learning_rate: float
    kl_coefficient: float
    comparisons: int
    label_noise: float
    samples_per_prompt: int = 128
    eval_samples_per_prompt: int = 64
    task: Task = field(default_factory=Task)


@dataclass(frozen=True)
class Eval:
    """What one eval logs: mean rewards of fresh texts with their standard errors; exact `kl` and `entropy` in nats."""

    step: int
    proxy: float
    proxy_stderr: float
    gold: float
    gold_stderr: float
    kl: float
    entropy: float


@dataclass(frozen=True, eq=False)
class State:
    """What training changes, and all that a checkpoint must hold beside the config."""

    step: int
    policy: Policy
    moments: Moments


@dataclass(frozen=True, eq=False)
class World:
    """What training never changes: the initial policy, the gold reward and the proxy fitted to it."""

    initial: Policy
    gold: Gold
    proxy: RewardModel


class Stream(IntEnum):
    """Uses of chance that must not disturb one another."""

    WORLD = 0
    TRAINING = 1
    EVALUATION = 2


class Trainer:
    """A run of RLHF: iterate over `evals()`, and read `state` in between to save it."""

    def __init__(self, config: Config, state: State | None = None) -> None:
        """Start at the initial policy, or where a saved state left off: its own eval, if one was due, is done."""
        self.config = config
        self.world = make_world(config)
        initial = self.world.initial
        self._resumed = state is not None
        self.state = state or State(0, initial, Moments.zero(initial.parameters.size))

    def evals(self, interrupted: Callable[[], bool] = lambda: False) -> Iterator[Eval]:
        """Train to the end or, asked before every step, until interrupted; yield an eval at 0 and each `eval_every`."""
        if self.state.step == 0 and not self._resumed:
            yield self.evaluate()
        while self.state.step < self.config.steps and not interrupted():
            self.train_step()
            if self.state.step % self.config.eval_every == 0:
                yield self.evaluate()

    def train_step(self) -> None:
        """Take one step of policy gradient."""
        config, initial, policy = self.config, self.world.initial, self.state.policy
        step = self.state.step + 1
        texts = policy.sample(each_prompt(config.task, config.samples_per_prompt), self._rng(Stream.TRAINING, step))
        penalty = config.kl_coefficient * (policy.log_likelihood(texts) - initial.log_likelihood(texts))
        rewards = self.world.proxy.score(texts) - penalty
        weights = advantages(rewards.reshape(config.task.prompts, -1)).ravel() / len(texts)
        gradient = policy.score_gradient(texts, weights)
        parameters, moments = ascend(policy.parameters, gradient, self.state.moments, config.learning_rate)
        self.state = State(step, Policy(config.task, parameters), moments)

    def evaluate(self) -> Eval:
        """Score fresh texts of the current policy; the same state always gives the same eval."""
        config, step, policy = self.config, self.state.step, self.state.policy
        prompts = each_prompt(config.task, config.eval_samples_per_prompt)
        texts = policy.sample(prompts, self._rng(Stream.EVALUATION, step))
        proxy, proxy_stderr = mean_over_prompts(self.world.proxy.score(texts).reshape(config.task.prompts, -1))
        gold, gold_stderr = mean_over_prompts(self.world.gold.score(texts).reshape(config.task.prompts, -1))
        return Eval(step, proxy, proxy_stderr, gold, gold_stderr, policy.kl(self.world.initial), policy.entropy())

    def _rng(self, stream: Stream, step: int) -> np.random.Generator:
        return np.random.default_rng((self.config.seed, stream, step))


def make_world(config: Config) -> World:
    """Draw the initial policy and gold from the seed, have pairs compared, and fit the proxy to them."""
    rng = np.random.default_rng((config.seed, Stream.WORLD))
    initial = random_policy(config.task, INITIAL_SCALE, rng)
    gold = random_gold(initial, rng)
    proxy = fit_bradley_terry(config.task, compare(initial, gold, config.comparisons, config.label_noise, rng))
    ordinary = initial.sample(each_prompt(config.task, STANDARDIZING_TEXTS // config.task.prompts), rng)
    return World(initial, gold, standardized(proxy, ordinary))


def advantages(rewards: Floats) -> Floats:
    """Return each reward less the mean of the others of its prompt; (prompts, samples) in and out."""
    samples = rewards.shape[1]
    return np.asarray((rewards - rewards.mean(axis=1, keepdims=True)) * (samples / (samples - 1)))


def mean_over_prompts(scores: Floats) -> tuple[float, float]:
    """Return the mean of (prompts, samples) scores and its standard error, prompts being fixed and samples drawn."""
    prompts, samples = scores.shape
    variance_of_means = scores.var(axis=1, ddof=1) / samples
    return float(scores.mean()), float(variance_of_means.sum() ** 0.5 / prompts)
