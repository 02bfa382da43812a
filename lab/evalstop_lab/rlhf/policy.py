"""The policy: an autoregressive softmax over tokens, small enough to compute its KL exactly.

The logits of the token at position t are `bigrams[t, previous token] + prompted[t, prompt]`. Given the prompt, a text
is therefore a Markov chain over at most `vocabulary` states, and an expectation over all vocabulary ** length texts is
a forward sweep over `length` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """The number of prompts, the length of a text in tokens, and the size of the vocabulary."""

    prompts: int = 8
    length: int = 12
    vocabulary: int = 16

    @property
    def contexts(self) -> int:
        """What may precede a token: any token, or the start of the text."""
        return self.vocabulary + 1


@dataclass(frozen=True)
class Texts:
    """Answers to prompts: `prompts` is (n,), `tokens` is (n, length)."""

    prompts: Integers
    tokens: Integers

    def __len__(self) -> int:
        return len(self.prompts)


def repeat_prompts(task: Task, times: int) -> Integers:
    """Return every prompt `times` times, grouped by prompt: reshape(prompts, times) has one prompt per row."""
    return np.repeat(np.arange(task.prompts), times)


def index_tokens(task: Task, tokens: Integers) -> Integers:
    """Return the index of each (position, token) in a table of length * vocabulary rows."""
    return tokens + np.arange(task.length) * task.vocabulary


@dataclass(frozen=True, eq=False)
class Policy:
    """A distribution over texts for each prompt; `parameters` is a flat vector."""

    task: Task
    parameters: Floats

    @staticmethod
    def parameter_count(task: Task) -> int:
        """Return the size of `parameters`: a bigram table and a prompt table for each position."""
        return task.length * (task.contexts + task.prompts) * task.vocabulary

    @cached_property
    def log_table(self) -> Floats:
        """Log-probabilities of the next token: (length, previous token or start, prompt, vocabulary)."""
        task = self.task
        tables = self.parameters.reshape(task.length, task.contexts + task.prompts, task.vocabulary)
        bigrams, prompted = tables[:, : task.contexts], tables[:, task.contexts :]
        logits = bigrams[:, :, None] + prompted[:, None]
        logits = logits - logits.max(axis=-1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))

    @cached_property
    def table(self) -> Floats:
        """Probabilities of the next token, in the shape of `log_table`."""
        return np.asarray(np.exp(self.log_table))

    def sample(self, prompts: Integers, rng: np.random.Generator) -> Texts:
        """Sample one text for each of the (n,) prompts."""
        task = self.task
        # The last threshold would be 1 up to rounding; without it no draw can exceed the vocabulary.
        thresholds = self.table.cumsum(axis=-1)[..., :-1]
        draws = rng.random((task.length, len(prompts), 1))
        tokens = np.empty((len(prompts), task.length), dtype=np.int64)
        previous = np.full(len(prompts), task.vocabulary)
        for position in range(task.length):
            previous = (thresholds[position, previous, prompts] <= draws[position]).sum(axis=-1)
            tokens[:, position] = previous
        return Texts(prompts, tokens)

    def log_likelihood(self, texts: Texts) -> Floats:
        """Return the log-probability of each text given its prompt: (n,)."""
        choices = self._index_contexts(texts) * self.task.vocabulary + texts.tokens
        return np.asarray(self.log_table.ravel()[choices].sum(axis=1))

    def score_gradient(self, texts: Texts, weights: Floats) -> Floats:
        """Return the gradient of `sum(weights * log_likelihood(texts))` by the parameters, for (n,) weights."""
        task = self.task
        choices = self._index_contexts(texts) * task.vocabulary + texts.tokens
        spread = np.repeat(weights, task.length)
        chosen = np.bincount(choices.ravel(), weights=spread, minlength=self.table.size).reshape(self.table.shape)
        # d log softmax / d logits = (1 for the chosen token) - (the probabilities), in each context that occurs.
        by_logits = chosen - chosen.sum(axis=-1, keepdims=True) * self.table
        return np.concatenate([by_logits.sum(axis=2), by_logits.sum(axis=1)], axis=1).ravel()

    def kl(self, initial: Policy) -> float:
        """Return KL(self || initial) of whole texts in nats, exact, averaged over the prompts."""
        task, log_ratio = self.task, self.log_table - initial.log_table
        reached = np.zeros((task.contexts, task.prompts))
        reached[task.vocabulary] = 1.0
        expected = np.zeros(task.prompts)
        for position in range(task.length):
            joint = reached[..., None] * self.table[position]
            expected += (joint * log_ratio[position]).sum(axis=(0, 2))
            reached[: task.vocabulary] = joint.sum(axis=0).T
            reached[task.vocabulary] = 0.0
        return float(expected.mean())

    def _index_contexts(self, texts: Texts) -> Integers:
        """Return the index of the context (position, previous token, prompt) of every token: (n, length)."""
        task = self.task
        previous = np.empty_like(texts.tokens)
        previous[:, 0] = task.vocabulary
        previous[:, 1:] = texts.tokens[:, :-1]
        position = np.arange(task.length)
        return np.asarray((position * task.contexts + previous) * task.prompts + texts.prompts[:, None])


def draw_policy(task: Task, scale: float, rng: np.random.Generator) -> Policy:
    """Draw a policy with independent normal logits; a larger scale gives less random texts."""
    return Policy(task, rng.normal(scale=scale, size=Policy.parameter_count(task)))
