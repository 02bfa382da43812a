"""The gold reward: what people really want of a text. It is fixed, and training never sees it.

It is the sum of two things:

- *content*: a random two-layer tanh network of the tokens and the prompt, with mean 0 and standard deviation 1 over
  the texts of the initial policy;
- *fluency*: nothing for a text as ordinary as the initial policy's own, and a growing dislike of texts that the
  initial policy finds more surprising than all but a few of its own.

Fluency is the property that makes gold turn. Comparisons are made between texts of the initial policy, nearly all of
them fluent, so they say next to nothing about it; a policy pushed hard against a reward fitted to them leaves the
fluent texts behind and loses there what it gained in content. With content alone, gold levels off or gives back some of
its gain (at most .22, on ten seeds of the preset that over-optimizes) where with fluency it loses most or all of
it. Nothing here knows of steps or of the KL: where gold turns, and whether it does, comes out of the optimization.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalstop_lab.rlhf.policy import Policy
from evalstop_lab.rlhf.task import Floats, Texts, each_prompt, position_token

HIDDEN = 64
INPUT_GAIN = 2.0
FLUENCY_WEIGHT = 1.0
FLUENT_UP_TO = 1.5
CALIBRATION_TEXTS = 4096


@dataclass(frozen=True, eq=False)
class Gold:
    """The network's weights, and the moments of the initial policy's texts that set its scale.

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
        """Return the gold reward of each text: (n,); 0 is about the initial policy's mean, 1 its standard deviation."""
        return self.content(texts) - FLUENCY_WEIGHT * np.maximum(0.0, self.surprise(texts) - FLUENT_UP_TO)

    def content(self, texts: Texts) -> Floats:
        """Return the part that the network sees, in standard deviations over the initial policy's texts."""
        excitation = self.prompt_weights[texts.prompts]
        for column in position_token(self.initial.task, texts.tokens).T:
            excitation += self.token_weights[column]
        content = (np.tanh(excitation) * self.output_weights).sum(axis=1)
        return np.asarray((content - self.content_mean) / self.content_deviation)

    def surprise(self, texts: Texts) -> Floats:
        """Return how surprising the initial policy finds each text, in standard deviations over its own texts."""
        return np.asarray((-self.initial.log_likelihood(texts) - self.surprise_mean) / self.surprise_deviation)


def random_gold(initial: Policy, rng: np.random.Generator) -> Gold:
    """Draw a gold reward for the language of the initial policy, and set its scale on a sample of that language."""
    task = initial.task
    inputs_per_text = task.length + 1
    raw = Gold(
        initial,
        token_weights=rng.normal(scale=INPUT_GAIN / inputs_per_text**0.5, size=(task.length * task.vocabulary, HIDDEN)),
        prompt_weights=rng.normal(scale=INPUT_GAIN / inputs_per_text**0.5, size=(task.prompts, HIDDEN)),
        output_weights=rng.normal(size=HIDDEN),
    )
    ordinary = initial.sample(each_prompt(task, CALIBRATION_TEXTS // task.prompts), rng)
    content, surprise = raw.content(ordinary), raw.surprise(ordinary)
    return Gold(
        initial,
        raw.token_weights,
        raw.prompt_weights,
        raw.output_weights,
        content_mean=float(content.mean()),
        content_deviation=float(content.std()),
        surprise_mean=float(surprise.mean()),
        surprise_deviation=float(surprise.std()),
    )
