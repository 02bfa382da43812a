"""The task: prompts, each answered by a short text of tokens from a small vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
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
