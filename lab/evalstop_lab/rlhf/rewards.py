"""The gold reward, which represents human preferences, and the proxy that is fitted to comparisons labeled by it.

Gold is fixed and never used for training. It is the sum of two parts:

- *content*: a random two-layer tanh network of the tokens and the prompt, with mean 0 and standard deviation 1 over
  the texts of the initial policy;
- *fluency*: 0 for most texts of the initial policy, and a penalty that grows linearly for texts that are less likely
  under the initial policy than nearly all of its own.

Fluency makes gold turn. The comparisons are between texts of the initial policy, nearly all of them fluent, so they
contain almost no information about fluency. A policy that is optimized against a reward fitted to them moves to texts
that are not fluent, and loses more there than it gains in content. With content alone, gold reaches a plateau or loses
some of its gain (at most 0.22, on ten seeds of the preset that over-optimizes); with fluency it loses most or all of
it. The reward does not depend on steps or on the KL: whether and where gold turns is a result of the optimization.

The proxy has one weight per (position, token) and depends neither on the prompt nor on combinations of tokens, so it
has less capacity than gold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evalstop_lab.rlhf.policy import Floats, Policy, Task, Texts, index_tokens, repeat_prompts

HIDDEN = 64
INPUT_GAIN = 2.0
FLUENCY_WEIGHT = 1.0
FLUENT_UP_TO = 1.5
CALIBRATION_TEXTS = 4096
PRIOR_PRECISION = 1.0
NEWTON_STEPS = 50
CONVERGED = 1e-9


@dataclass(frozen=True, eq=False)
class Gold:
    """The network's weights, and the moments over the initial policy's texts that determine its scale.

    `token_weights` is (length * vocabulary, hidden), `prompt_weights` (prompts, hidden), `output_weights` (hidden,).
    """

    initial: Policy
    token_weights: Floats
    prompt_weights: Floats
    output_weights: Floats
    content_mean: float = 0.0
    content_deviation: float = 1.0
    surprise_mean: float = 0.0
    surprise_deviation: float = 1.0

    def score(self, texts: Texts) -> Floats:
        """Return the gold reward of each text: (n,); about 0 +- 1 over texts of the initial policy."""
        return self.content(texts) - FLUENCY_WEIGHT * np.maximum(0.0, self.surprise(texts) - FLUENT_UP_TO)

    def content(self, texts: Texts) -> Floats:
        """Return the output of the network, in standard deviations over the initial policy's texts."""
        excitation = self.prompt_weights[texts.prompts]
        for column in index_tokens(self.initial.task, texts.tokens).T:
            excitation += self.token_weights[column]
        content = (np.tanh(excitation) * self.output_weights).sum(axis=1)
        return np.asarray((content - self.content_mean) / self.content_deviation)

    def surprise(self, texts: Texts) -> Floats:
        """Return the surprisal of each text under the initial policy, in standard deviations over its own texts."""
        return np.asarray((-self.initial.log_likelihood(texts) - self.surprise_mean) / self.surprise_deviation)


def draw_gold(initial: Policy, rng: np.random.Generator) -> Gold:
    """Draw a gold reward, and set its scale on a sample of the initial policy's texts."""
    task = initial.task
    inputs_per_text = task.length + 1
    raw = Gold(
        initial,
        token_weights=rng.normal(scale=INPUT_GAIN / inputs_per_text**0.5, size=(task.length * task.vocabulary, HIDDEN)),
        prompt_weights=rng.normal(scale=INPUT_GAIN / inputs_per_text**0.5, size=(task.prompts, HIDDEN)),
        output_weights=rng.normal(size=HIDDEN),
    )
    ordinary = initial.sample(repeat_prompts(task, CALIBRATION_TEXTS // task.prompts), rng)
    content, surprise = raw.content(ordinary), raw.surprise(ordinary)
    return replace(
        raw,
        content_mean=float(content.mean()),
        content_deviation=float(content.std()),
        surprise_mean=float(surprise.mean()),
        surprise_deviation=float(surprise.std()),
    )


@dataclass(frozen=True)
class Comparisons:
    """Pairs of texts for the same prompt: what the labeler preferred, and the other."""

    preferred: Texts
    rejected: Texts


@dataclass(frozen=True, eq=False)
class RewardModel:
    """Scores a text by the sum of the `weights` of its tokens; `weights` has the shape (length * vocabulary,)."""

    task: Task
    weights: Floats
    offset: float = 0.0

    def score(self, texts: Texts) -> Floats:
        """Return the proxy reward of each text: (n,)."""
        return np.asarray(self.weights[index_tokens(self.task, texts.tokens)].sum(axis=1) - self.offset)


def draw_comparisons(
    initial: Policy, gold: Gold, count: int, label_noise: float, rng: np.random.Generator
) -> Comparisons:
    """Draw `count` pairs of the initial policy's texts, labeled by gold; a share `label_noise` of labels is wrong."""
    prompts = rng.integers(initial.task.prompts, size=count)
    first, second = initial.sample(prompts, rng), initial.sample(prompts, rng)
    right = rng.random(count) >= label_noise
    first_preferred = ((gold.score(first) > gold.score(second)) == right)[:, None]
    return Comparisons(
        preferred=Texts(prompts, np.where(first_preferred, first.tokens, second.tokens)),
        rejected=Texts(prompts, np.where(first_preferred, second.tokens, first.tokens)),
    )


def fit_bradley_terry(task: Task, comparisons: Comparisons) -> RewardModel:
    """Fit P(first preferred to second) = sigmoid(score(first) - score(second)) by Newton's method.

    Returns the maximum of the posterior under a Gaussian prior on the weights.
    """
    size, pairs = task.length * task.vocabulary, np.arange(len(comparisons.preferred))[:, None]
    differences = np.zeros((len(pairs), size))
    differences[pairs, index_tokens(task, comparisons.preferred.tokens)] += 1
    differences[pairs, index_tokens(task, comparisons.rejected.tokens)] -= 1
    weights = np.zeros(size)
    for _ in range(NEWTON_STEPS):
        surprise = 1 / (1 + np.exp(differences @ weights))
        gradient = differences.T @ surprise - PRIOR_PRECISION * weights
        if np.abs(gradient).max() < CONVERGED:
            break
        hessian = (differences.T * (surprise * (1 - surprise))) @ differences + PRIOR_PRECISION * np.eye(size)
        weights = weights + np.linalg.solve(hessian, gradient)
    # The last bits depend on the number of BLAS threads, and runs must be reproducible.
    return RewardModel(task, np.round(weights, 9))


def standardize_scores(model: RewardModel, texts: Texts) -> RewardModel:
    """Shift and scale the model's scores to mean 0 and standard deviation 1 over these texts."""
    scores = model.score(texts)
    deviation = float(scores.std())
    return RewardModel(model.task, model.weights / deviation, (float(scores.mean()) + model.offset) / deviation)
