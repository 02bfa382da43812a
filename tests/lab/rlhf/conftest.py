"""Fixtures of the example trainer's tests: all texts of a small task, and numeric gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from evalstop_lab.rlhf.task import Floats, Task, Texts

Function = Callable[[Floats], float]


def list_every_text(task: Task) -> Texts:
    """All texts for every prompt, in order of prompts."""
    texts = np.array(list(itertools.product(range(task.vocabulary), repeat=task.length)))
    return Texts(np.repeat(np.arange(task.prompts), len(texts)), np.tile(texts, (task.prompts, 1)))


def compute_numeric_gradient(function: Function, point: Floats, width: float = 1e-6) -> Floats:
    """The gradient of `function` by central differences, one coordinate at a time."""
    steps = width * np.eye(len(point))
    return np.array([(function(point + step) - function(point - step)) / (2 * width) for step in steps])


@pytest.fixture
def every_text() -> Callable[[Task], Texts]:
    """Lists every text of a task."""
    return list_every_text


@pytest.fixture
def numeric_gradient() -> Callable[[Function, Floats], Floats]:
    """Differentiates by central differences."""
    return compute_numeric_gradient
