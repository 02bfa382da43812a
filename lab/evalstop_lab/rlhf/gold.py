"""The gold reward, which represents human preferences. It is fixed and never used for training.

It is the sum of two parts:

- *content*: a random two-layer tanh network of the tokens and the prompt, with mean 0 and standard deviation 1 over
  the texts of the initial policy;
- *fluency*: 0 for most texts of the initial policy, and a penalty that grows linearly for texts that are less likely
  under the initial policy than nearly all of its own.

Fluency makes gold turn. The comparisons are between texts of the initial policy, nearly all of them fluent, so they
contain almost no information about fluency. A policy that is optimized against a reward fitted to them moves to texts
that are not fluent, and loses more there than it gains in content. With content alone, gold reaches a plateau or loses
some of its gain (at most 0.22, on ten seeds of the preset that over-optimizes); with fluency it loses most or all of
it. The reward does not depend on steps or on the KL: whether and where gold turns is a result of the optimization.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evalstop_lab.rlhf.policy import Floats, Policy, Texts, index_tokens, repeat_prompts

HIDDEN = 64
INPUT_GAIN = 2.0
FLUENCY_WEIGHT = 1.0
FLUENT_UP_TO = 1.5
CALIBRATION_TEXTS = 4096


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
