"""The gold reward: its scale, and the penalty that makes it turn."""

from __future__ import annotations

import numpy as np
import pytest
from evalstop_lab.rlhf.gold import FLUENT_UP_TO, draw_gold
from evalstop_lab.rlhf.policy import Task, Texts, draw_policy, repeat_prompts


def test_gold_is_standardized_over_initial_texts() -> None:
    """Over new texts of the initial policy, content and surprise have mean 0 and standard deviation 1."""
    rng = np.random.default_rng(0)
    initial = draw_policy(Task(), 1.6, rng)
    gold = draw_gold(initial, rng)
    texts = initial.sample(repeat_prompts(Task(), 1000), rng)
    for part in (gold.content(texts), gold.surprise(texts)):
        assert part.mean() == pytest.approx(0.0, abs=0.1)
        assert part.std() == pytest.approx(1.0, abs=0.1)


def test_fluency_penalizes_only_surprising_texts() -> None:
    """Gold equals content for a text that is not surprising; the penalty grows with the surprise of a text."""
    rng = np.random.default_rng(1)
    initial = draw_policy(Task(), 1.6, rng)
    gold = draw_gold(initial, rng)
    other_texts = draw_policy(Task(), 0.5, rng).sample(repeat_prompts(Task(), 200), rng)
    own_texts = initial.sample(repeat_prompts(Task(), 200), rng)
    texts = Texts(
        np.concatenate([own_texts.prompts, other_texts.prompts]), np.concatenate([own_texts.tokens, other_texts.tokens])
    )
    surprise, penalty = gold.surprise(texts), gold.content(texts) - gold.score(texts)
    assert penalty[surprise <= FLUENT_UP_TO] == pytest.approx(0.0)
    order = np.argsort(surprise)
    assert (np.diff(penalty[order]) >= -1e-9).all()
    assert (surprise > FLUENT_UP_TO).sum() > 100


def test_few_initial_texts_are_penalized() -> None:
    """Less than 10 % of the initial policy's own texts are surprising enough for a penalty."""
    rng = np.random.default_rng(2)
    initial = draw_policy(Task(), 1.6, rng)
    surprise = draw_gold(initial, rng).surprise(initial.sample(repeat_prompts(Task(), 1000), rng))
    assert (surprise > FLUENT_UP_TO).mean() < 0.1


def test_gold_depends_on_the_prompt() -> None:
    """The same text has different rewards for different prompts."""
    rng = np.random.default_rng(3)
    initial = draw_policy(Task(), 1.6, rng)
    gold = draw_gold(initial, rng)
    tokens = initial.sample(repeat_prompts(Task(), 1), rng).tokens[:1]
    content = gold.content(Texts(np.arange(8), np.repeat(tokens, 8, axis=0)))
    assert content.std() > 0.01
