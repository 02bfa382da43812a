"""Samples texts of all runs at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evalstop_lab.language_model.transformer import Adapters, Cache, Transformer

END = 2
"""The token that ends a text."""


@dataclass(frozen=True)
class Texts:
    """Sampled texts: `tokens` are [runs, texts, length] with the prompt first, the others [runs, texts, new tokens].

    `counted` is true up to the token that ends the text; `logprobs` are those of the model that sampled.
    """

    tokens: Tensor
    counted: Tensor
    logprobs: Tensor

    @property
    def prompt_length(self) -> int:
        """The number of tokens of each prompt."""
        return self.tokens.shape[2] - self.counted.shape[2]

    @property
    def new_tokens(self) -> Tensor:
        """The tokens after the prompt."""
        return self.tokens[:, :, self.prompt_length :]

    @property
    def last(self) -> Tensor:
        """The position of each text's last token that counts."""
        return self.prompt_length + self.counted.sum(2) - 1


class Sampler:
    """Samples a fixed number of texts a run; on a GPU the step of one token is captured once and replayed."""

    def __init__(
        self, transformer: Transformer, adapters: Adapters | None, sizes: tuple[int, int, int], new_tokens: int
    ) -> None:
        """`sizes`: runs, texts of each, tokens of a prompt."""
        self.transformer, self.adapters, self.new_tokens = transformer, adapters, new_tokens
        runs, self.texts, prompt = sizes
        device = transformer.embedding.device
        self.cache = Cache(transformer, runs * self.texts, prompt + new_tokens)
        self.token = torch.zeros(runs, self.texts, dtype=torch.long, device=device)
        self.position = torch.full((1,), prompt, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> Texts:
        """Sample one text for each prompt, [runs, texts, tokens of a prompt]."""
        runs, texts, length = prompts.shape
        hidden = self.transformer.compute_hidden(prompts, self.adapters, self.cache)[:, :, -1]
        logits = hidden.reshape(runs * texts, -1) @ self.transformer.output.T
        tokens, logprobs, counted = [prompts], [], []
        running = torch.ones(runs, texts, dtype=torch.bool, device=prompts.device)
        for index in range(self.new_tokens):
            token, logprob = _draw(logits.float())
            self.token.copy_(token.view(runs, texts))
            tokens.append(self.token.clone()[:, :, None])
            logprobs.append(logprob.view(runs, texts))
            counted.append(running)
            running = running & (self.token != END)
            if index + 1 < self.new_tokens:
                self.position.fill_(length + index)
                logits = self._compute_next()
        return Texts(torch.cat(tokens, dim=2), torch.stack(counted, dim=2), torch.stack(logprobs, dim=2))

    def _compute_next(self) -> Tensor:
        if self.graph is None:
            return self.transformer.compute_next(self.token, self.position, self.cache, self.adapters)
        self.graph.replay()
        return self.logits

    @torch.no_grad()
    def _capture(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries set themselves up at their first calls, which can't be captured
                self.transformer.compute_next(self.token, self.position, self.cache, self.adapters)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.transformer.compute_next(self.token, self.position, self.cache, self.adapters)


def _draw(logits: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row, and its log-probability: the largest of p / e with exponential e is a draw from p."""
    logprobs = logits.log_softmax(1)
    token = (logprobs - torch.empty_like(logprobs).exponential_().log()).argmax(1)
    return token, logprobs.gather(1, token[:, None])[:, 0]
