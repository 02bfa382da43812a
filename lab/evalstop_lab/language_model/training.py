"""Trains the policies of all runs at once, each against its own reward model with its own setting."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evalstop_lab.language_model.adam import Adam
from evalstop_lab.language_model.review_score import Fluency, score_texts
from evalstop_lab.language_model.reward_models import Comparisons, Pool, RewardModels
from evalstop_lab.language_model.sampling import END, Sampler, Texts
from evalstop_lab.language_model.transformer import Adapters, Transformer
from evalstop_lab.language_model.weights import Model

RANK = 16
EVAL_PROMPTS = 32
EVAL_ROUND = 8
"""An eval samples at most this many times as many texts at once as a step of the training."""

TOKENS_AT_ONCE = 32_768
"""The number of tokens that go through the network with gradients at a time: about 20 GB."""


@dataclass(frozen=True)
class Setting:
    """What differs between runs."""

    learning_rate: float
    kl_coefficient: float
    comparisons: Comparisons


@dataclass(frozen=True)
class Sizes:
    """What all runs share; texts and pairs are those of one run.

    An eval samples `eval_texts` for random prompts, `paired_of_prompt` for each prompt, and at least `true_texts` for
    random ones.
    """

    texts: int = 32
    texts_of_prompt: int = 8
    new_tokens: int = 40
    eval_texts: int = 64
    true_texts: int = 128
    reward_steps: int = 60
    reward_pairs: int = 16
    pool: int = 8192
    paired_of_prompt: int = 8

    @property
    def paired_texts(self) -> int:
        """The number of texts for all of the prompts kept for evals."""
        return EVAL_PROMPTS * self.paired_of_prompt


class Scorer:
    """Computes scores of reviews in processes on the CPU, while the GPU goes on."""

    def __init__(self, model: Model, processes: int) -> None:
        self.model, self.processes, self.usual = model, processes, Fluency(0.0, 1.0)
        self.pool = ProcessPoolExecutor(  # Ctrl-C reaches the whole process group; the trainer alone handles it
            processes, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
        )

    def begin(self, texts: Texts, initial_logprobs: Tensor) -> Callable[[], Any]:
        """Begin to score the texts; the function returned waits for the scores, [runs, texts]."""
        lengths = texts.counted.sum(2)
        means = ((initial_logprobs * texts.counted).sum(2) / lengths).flatten().tolist()
        rows = texts.new_tokens.flatten(0, 1).tolist()
        tokens = [row[:length] for row, length in zip(rows, lengths.flatten().tolist(), strict=True)]
        decoded = [self.decode(row) for row in tokens]
        size = -(-len(rows) // self.processes)
        parts = [slice(start, start + size) for start in range(0, len(rows), size)]
        futures = [
            self.pool.submit(score_texts, decoded[part], tokens[part], means[part], self.usual) for part in parts
        ]
        return lambda: np.concatenate([future.result() for future in futures]).reshape(lengths.shape)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, without the one that ends it."""
        return self.model.decode([token for token in tokens if token != END])


@dataclass(frozen=True)
class Eval:
    """An eval of all runs: the score of each text, that of its reward model, and its log-ratio, all [runs, texts]."""

    step: int
    proxy: Any
    kl: Any
    scores: Any
    examples: list[str]


class Training:
    """The policies and reward models of all runs, at the same step."""

    def __init__(
        self, model: Model, prompts: Tensor, settings: Sequence[Setting], sizes: Sizes, seed: int, processes: int
    ) -> None:
        """`prompts` is [prompts, tokens]; 32 of them are kept for evals. `processes` compute scores."""
        self.sizes, self.runs, self.step = sizes, len(settings), 0
        self.device = next(iter(model.weights.values())).device
        torch.manual_seed(seed)
        generator = torch.Generator(self.device).manual_seed(seed)
        mixed = prompts[torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))].to(self.device)
        self.eval_prompts, self.prompts = mixed[:EVAL_PROMPTS], mixed[EVAL_PROMPTS:]
        self.transformer = Transformer(model, prompts.shape[1] + sizes.new_tokens)
        self.policies = Adapters(self.transformer, self.runs, RANK, generator)
        shape = (self.runs, sizes.texts, prompts.shape[1])
        self.sampler = Sampler(self.transformer, self.policies, shape, sizes.new_tokens)
        eval_texts = sizes.eval_texts + sizes.paired_texts + sizes.true_texts
        self.eval_rounds = -(-eval_texts // (EVAL_ROUND * sizes.texts))
        eval_shape = (self.runs, -(-eval_texts // self.eval_rounds), prompts.shape[1])
        self.eval_sampler = Sampler(self.transformer, self.policies, eval_shape, sizes.new_tokens)
        self.parts = -(-self.runs * sizes.texts * (prompts.shape[1] + sizes.new_tokens) // TOKENS_AT_ONCE)
        self.scorer = Scorer(model, processes)
        self.rewards = RewardModels(self.transformer, self.runs, generator)
        comparisons = [setting.comparisons for setting in settings]
        self.rewards.fit(self._sample_pool(), comparisons, sizes.reward_steps, sizes.reward_pairs, self.parts)
        self.kl_coefficients = torch.tensor([[setting.kl_coefficient] for setting in settings], device=self.device)
        learning_rates = torch.tensor([setting.learning_rate for setting in settings], device=self.device)
        self.adam = Adam(self.policies.parameters(), learning_rates)

    def train_step(self) -> None:
        """Sample texts, score them by the reward models, and change the policies."""
        prompts = self._choose(self.prompts, self.sizes.texts // self.sizes.texts_of_prompt)
        texts = self.sampler.sample(prompts.repeat_interleave(self.sizes.texts_of_prompt, dim=1))
        with torch.no_grad():
            log_ratios = self._compute_log_ratios(texts, self._compute_initial_logprobs(texts))
            rewards = self.rewards.score(texts) - self.kl_coefficients * log_ratios
        by_prompt = rewards.view(self.runs, -1, self.sizes.texts_of_prompt)
        advantages = (by_prompt - by_prompt.mean(2, keepdim=True)).view(rewards.shape)
        self._add_gradients(texts, advantages / (advantages.std(1, keepdim=True) + 1e-6))
        self.adam.step()
        self.step += 1

    @torch.no_grad()
    def evaluate(self) -> Eval:
        """Sample texts for the prompts kept for evals, and score them."""
        waits, proxies, log_ratios = [], [], []
        examples: list[str] = []
        for prompts in self._choose_eval_prompts().chunk(self.eval_rounds, 1):
            texts = self.eval_sampler.sample(prompts)
            initial = self._compute_initial_logprobs(texts)
            waits.append(self.scorer.begin(texts, initial))
            proxies.append(self.rewards.score(texts))
            log_ratios.append(self._compute_log_ratios(texts, initial))
            examples = examples or [self.scorer.decode(row) for row in texts.new_tokens[:, 0].tolist()]
        proxy, kl = (torch.cat(columns, dim=1).cpu().numpy() for columns in (proxies, log_ratios))
        return Eval(self.step, proxy, kl, np.concatenate([wait() for wait in waits], axis=1), examples)

    def _choose_eval_prompts(self) -> Tensor:
        """The prompts of an eval, [runs, texts, tokens], in the order of `Sizes`; the paired ones by prompt."""
        sizes = self.sizes
        paired = self.eval_prompts.repeat_interleave(sizes.paired_of_prompt, dim=0)
        others = self.eval_rounds * self.eval_sampler.texts - sizes.eval_texts - sizes.paired_texts
        posted, rest = (self._choose(self.eval_prompts, number) for number in (sizes.eval_texts, others))
        return torch.cat([posted, paired.expand(self.runs, -1, -1), rest], dim=1)

    def _choose(self, prompts: Tensor, number: int) -> Tensor:
        """Random prompts for each run, [runs, number, tokens]."""
        return prompts[torch.randint(len(prompts), (self.runs, number), device=self.device)]

    @torch.no_grad()
    def _compute_initial_logprobs(self, texts: Texts) -> Tensor:
        """The log-probabilities of the new tokens under the initial model, [runs, texts, new tokens]."""
        hidden = self.transformer.compute_hidden(texts.tokens[:, :, :-1], None)[:, :, texts.prompt_length - 1 :]
        return self.transformer.compute_logprobs(hidden, texts.new_tokens)

    def _compute_log_ratios(self, texts: Texts, initial: Tensor) -> Tensor:
        """The log-probability of each text minus that under the initial model, [runs, texts]; its mean is the KL."""
        return ((texts.logprobs - initial) * texts.counted).sum(2)

    def _add_gradients(self, texts: Texts, advantages: Tensor) -> None:
        """Add the gradients of policy gradient: the loss is the mean of -advantage * log-probability / length."""
        start = texts.prompt_length
        weights = advantages[:, :, None] * texts.counted / (self.sizes.texts * self.sizes.new_tokens)
        for tokens, weight in zip(texts.tokens.chunk(self.parts, 1), weights.chunk(self.parts, 1), strict=True):
            hidden = self.transformer.compute_hidden(tokens[:, :, :-1], self.policies)[:, :, start - 1 :]
            logprobs = self.transformer.compute_logprobs(hidden, tokens[:, :, start:])
            (-(weight * logprobs).sum()).backward()  # type: ignore[no-untyped-call]

    def _sample_pool(self) -> Pool:
        """Texts of the initial model, which the policies still are, and the scale of fluency by them."""
        samples, numbers = [], []
        for _ in range(-(-self.sizes.pool // (self.runs * self.sizes.texts))):
            number = torch.randint(len(self.prompts), (self.runs, self.sizes.texts), device=self.device)
            samples.append(self.sampler.sample(self.prompts[number]))
            numbers.append(number.flatten().cpu().numpy())
        joined = [
            torch.cat([getattr(texts, name).flatten(0, 1) for texts in samples])[None]
            for name in ("tokens", "counted", "logprobs")
        ]
        pool = Texts(*joined)
        initial = torch.cat([self._compute_initial_logprobs(texts).flatten(0, 1) for texts in samples])[None]
        means = (initial * pool.counted).sum(2) / pool.counted.sum(2)
        self.scorer.usual = Fluency(means.mean().item(), means.std().item())
        return Pool(pool, np.concatenate(numbers), self.scorer.begin(pool, initial)()[0])
