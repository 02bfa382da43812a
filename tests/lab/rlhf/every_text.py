"""All texts of a small task."""

from __future__ import annotations

import itertools

import numpy as np
from evalstop_lab.rlhf.policy import Task, Texts


def list_every_text(task: Task) -> Texts:
    """All texts for every prompt, in order of prompts."""
    texts = np.array(list(itertools.product(range(task.vocabulary), repeat=task.length)))
    return Texts(np.repeat(np.arange(task.prompts), len(texts)), np.tile(texts, (task.prompts, 1)))
