"""Reward models: the network with changes of its own for each run, fitted to comparisons of reviews by their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evalstop_lab.language_model.adam import Adam
from evalstop_lab.language_model.sampling import Texts
from evalstop_lab.language_model.transformer import Adapters, Transformer

RANK, LEARNING_RATE = 8, 5e-4
CHECKED_TEXTS = 256


@dataclass(frozen=True)
class Comparisons:
    """The comparisons that a run's reward model is fitted to: their number and the share labeled wrongly."""

    seed: int
    number: int
    label_noise: float


@dataclass(frozen=True)
class Pool:
    """Texts of the initial model, as those of one run, with the number of each text's prompt and its score."""

    texts: Texts
    prompts: Any
    scores: Any

    def select(self, rows: Any) -> Texts:
        """The texts by their numbers, [runs, texts]."""
        index = torch.tensor(rows, device=self.texts.tokens.device)
        return Texts(self.texts.tokens[0][index], self.texts.counted[0][index], self.texts.logprobs[0][index])


class RewardModels:
    """The changes of each run, and a head for the last token's output; `heads` is [runs, width].

    Scores are shifted and scaled so that the initial model's texts have mean 0 and standard deviation 1.
    `correlations` are those with the scores of the initial model's texts.
    """

    def __init__(self, transformer: Transformer, runs: int, generator: torch.Generator) -> None:
        device = transformer.embedding.device
        self.transformer = transformer
        self.adapters = Adapters(transformer, runs, RANK, generator)
        self.heads = torch.zeros(runs, transformer.shape.width, device=device, requires_grad=True)
        self.shift, self.scale = torch.zeros(runs, 1, device=device), torch.ones(runs, 1, device=device)
        self.correlations: list[float] = []

    def score(self, texts: Texts) -> Tensor:
        """The scores of the texts, [runs, texts]."""
        hidden = self.transformer.compute_hidden(texts.tokens, self.adapters)
        last = texts.last[:, :, None, None].expand(-1, -1, 1, hidden.shape[3])
        raw = torch.einsum("rsd,rd->rs", hidden.gather(2, last)[:, :, 0].float(), self.heads)
        return (raw - self.shift) / self.scale

    def fit(self, pool: Pool, comparisons: Sequence[Comparisons], steps: int, pairs: int, parts: int) -> None:
        """Fit all heads and changes by the loss of Bradley and Terry, `pairs` comparisons of each run a step.

        The comparisons of a step go through the network in `parts`, which bounds the memory that it needs.
        """
        runs = len(comparisons)
        device = self.heads.device
        compared = [_compare_texts(pool, run) for run in comparisons]
        rngs = [np.random.default_rng([run.seed, 3]) for run in comparisons]
        adam = Adam([*self.adapters.parameters(), self.heads], torch.full((runs,), LEARNING_RATE, device=device))
        for _ in range(steps):
            chosen = [rows[rng.integers(0, len(rows), pairs)] for rows, rng in zip(compared, rngs, strict=True)]
            for part in np.array_split(np.stack(chosen), parts, axis=1):
                if part.size:
                    scores = self.score(pool.select(part.reshape(runs, -1))).view(runs, -1, 2)
                    loss = -functional.logsigmoid(scores[:, :, 0] - scores[:, :, 1]).sum() / pairs
                    loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
        self.heads = self.heads.detach()
        self._standardize(pool, parts)

    @torch.no_grad()
    def _standardize(self, pool: Pool, parts: int) -> None:
        rows = np.random.default_rng(0).permutation(len(pool.scores))[:CHECKED_TEXTS]
        same = np.broadcast_to(rows, (len(self.heads), len(rows)))
        raw = torch.cat([self.score(pool.select(part)) for part in np.array_split(same, parts, axis=1)], dim=1)
        self.correlations = [float(np.corrcoef(row, pool.scores[rows])[0, 1]) for row in raw.cpu().numpy()]
        self.shift, self.scale = raw.mean(1, keepdim=True), raw.std(1, keepdim=True)


def _compare_texts(pool: Pool, run: Comparisons) -> Any:
    """Draw pairs of texts of one prompt, the preferred first, some wrongly: [comparisons, 2]."""
    rng = np.random.default_rng([run.seed, 2])
    groups = [np.flatnonzero(pool.prompts == prompt) for prompt in np.unique(pool.prompts)]
    groups = [group for group in groups if len(group) > 1]
    pairs = np.array([rng.choice(groups[rng.integers(len(groups))], 2, replace=False) for _ in range(run.number)])
    other_is_better = pool.scores[pairs[:, 1]] > pool.scores[pairs[:, 0]]
    turned = other_is_better != (rng.random(len(pairs)) < run.label_noise)
    pairs[turned] = pairs[turned][:, ::-1]
    return pairs
