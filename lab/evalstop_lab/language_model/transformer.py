"""A frozen Llama whose layers take low-rank changes (LoRA, 2106.09685): one set of changes a run, all runs at once.

Tokens come as [runs, texts, length]; a layer multiplies all of them by the frozen weights in one product, and those of
each run by its own changes in one batched product. Sixty runs cost little more than one with as many texts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evalstop_lab.language_model.weights import Model

TEMPERATURE = 0.7
"""Logits are divided by it, in sampling and in training: at 1 so small a model often writes of something else."""

LOGIT_ROWS = 8192
"""The number of tokens whose logits are held at a time: 49,152 floats each."""


class Adapters:
    """Low-rank changes of the four products of each layer, for each run; zero at first.

    `down[name]` is [runs, inputs, rank] and `up[name]` [runs, rank, outputs].
    """

    def __init__(self, transformer: Transformer, runs: int, rank: int, generator: torch.Generator) -> None:
        self.down, self.up = {}, {}
        for name, weight in transformer.products.items():
            outputs, inputs = weight.shape
            start = torch.randn(runs, inputs, rank, device=weight.device, generator=generator) / inputs**0.5
            self.down[name] = start.to(weight.dtype).requires_grad_()
            self.up[name] = torch.zeros(runs, rank, outputs, device=weight.device, dtype=weight.dtype).requires_grad_()

    def parameters(self) -> list[Tensor]:
        return [*self.down.values(), *self.up.values()]


class Cache:
    """The keys and values of all texts' tokens so far, for sampling: [layers, texts, heads, length, head width]."""

    def __init__(self, transformer: Transformer, texts: int, length: int) -> None:
        shape, embedding = transformer.shape, transformer.embedding
        sizes = (shape.layers, texts, shape.key_heads, length, shape.head_width)
        self.keys = torch.zeros(sizes, device=embedding.device, dtype=embedding.dtype)
        self.values = torch.zeros_like(self.keys)


class Transformer:
    """The frozen model."""

    def __init__(self, model: Model, longest: int) -> None:
        self.shape, weights = model.shape, model.weights
        self.embedding, self.final_norm = weights["token_embd"], weights["output_norm"]
        self.output = self.embedding / TEMPERATURE
        self.norms = {name: weight for name, weight in weights.items() if name.endswith("_norm")}
        self.products: dict[str, Tensor] = {}
        for layer in range(self.shape.layers):
            block = f"blk.{layer}"
            joined = [weights[f"{block}.attn_{name}"] for name in ("q", "k", "v")]
            self.products[f"{block}.attn_qkv"] = torch.cat(joined)
            self.products[f"{block}.attn_output"] = weights[f"{block}.attn_output"]
            self.products[f"{block}.ffn_in"] = torch.cat([weights[f"{block}.ffn_{name}"] for name in ("gate", "up")])
            self.products[f"{block}.ffn_down"] = weights[f"{block}.ffn_down"]
        width = self.shape.head_width
        rates = self.shape.rope_base ** (-torch.arange(0, width, 2, device=self.embedding.device) / width)
        angles = torch.arange(longest, device=self.embedding.device)[:, None] * rates
        self.cosines, self.sines = angles.cos(), angles.sin()

    def compute_hidden(self, tokens: Tensor, adapters: Adapters | None, cache: Cache | None = None) -> Tensor:
        """The last layer's outputs, [runs, texts, length, width]; each token sees those before it.

        Fills the cache's first positions if there is one.
        """
        runs, texts, length = tokens.shape
        hidden = functional.embedding(tokens.reshape(runs, -1), self.embedding)
        for layer in range(self.shape.layers):
            queries, keys, values = self._project(layer, hidden, adapters, self.cosines[:length], self.sines[:length])
            if cache is not None:
                cache.keys[layer, :, :, :length] = keys
                cache.values[layer, :, :, :length] = values
            attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            attended = attended.transpose(1, 2).reshape(runs, -1, self.shape.width)
            hidden = self._finish_layer(layer, hidden, attended, adapters)
        return self._normalize(hidden, self.final_norm).view(runs, texts, length, -1)

    def compute_next(self, tokens: Tensor, position: Tensor, cache: Cache, adapters: Adapters | None) -> Tensor:
        """Logits after one more token of each text, [runs * texts, vocabulary]; `position` is a tensor of one index."""
        runs = tokens.shape[0]
        hidden = functional.embedding(tokens, self.embedding)
        cosines, sines = self.cosines.index_select(0, position), self.sines.index_select(0, position)
        groups, length = self.shape.heads // self.shape.key_heads, cache.keys.shape[3]
        hide = torch.arange(length, device=tokens.device) > position
        for layer in range(self.shape.layers):
            queries, keys, values = self._project(layer, hidden, adapters, cosines, sines)
            cache.keys[layer].index_copy_(2, position, keys)
            cache.values[layer].index_copy_(2, position, values)
            grouped = queries.view(-1, self.shape.key_heads, groups, self.shape.head_width)
            scores = grouped @ cache.keys[layer].transpose(2, 3) * self.shape.head_width**-0.5
            weights = scores.float().masked_fill(hide, float("-inf")).softmax(-1).to(scores.dtype)
            attended = (weights @ cache.values[layer]).reshape(runs, -1, self.shape.width)
            hidden = self._finish_layer(layer, hidden, attended, adapters)
        return self._normalize(hidden, self.final_norm).view(-1, self.shape.width) @ self.output.T

    def compute_logprobs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The log-probability of each of `tokens` after the outputs `hidden`, in the shape of `tokens`, in float32."""
        rows, targets = hidden.reshape(-1, self.shape.width), tokens.reshape(-1)
        parts = [
            checkpoint(self._score_rows, part, target, use_reentrant=False)
            for part, target in zip(torch.split(rows, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True)
        ]
        return torch.cat(parts).view(tokens.shape)

    def _score_rows(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = (rows @ self.output.T).float()
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)

    def _project(
        self, layer: int, hidden: Tensor, adapters: Adapters | None, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's queries, keys and values, each [texts, heads, length, head width]."""
        shape, length = self.shape, len(cosines)
        joined = self._multiply(
            f"blk.{layer}.attn_qkv", self._normalize_layer(f"blk.{layer}.attn_norm", hidden), adapters
        )
        heads = joined.view(-1, length, shape.heads + 2 * shape.key_heads, shape.head_width).transpose(1, 2)
        queries, keys, values = torch.split(heads, [shape.heads, shape.key_heads, shape.key_heads], dim=1)
        return _rotate(queries, cosines, sines), _rotate(keys, cosines, sines), values

    def _finish_layer(self, layer: int, hidden: Tensor, attended: Tensor, adapters: Adapters | None) -> Tensor:
        hidden = hidden + self._multiply(f"blk.{layer}.attn_output", attended, adapters)
        normalized = self._normalize_layer(f"blk.{layer}.ffn_norm", hidden)
        gate, values = self._multiply(f"blk.{layer}.ffn_in", normalized, adapters).chunk(2, dim=-1)
        return hidden + self._multiply(f"blk.{layer}.ffn_down", functional.silu(gate) * values, adapters)

    def _multiply(self, name: str, inputs: Tensor, adapters: Adapters | None) -> Tensor:
        """The product of [runs, rows, inputs] with the frozen weights, plus that with each run's changes."""
        outputs = functional.linear(inputs, self.products[name])
        if adapters is None:
            return outputs
        return torch.baddbmm(outputs, torch.bmm(inputs, adapters.down[name]), adapters.up[name])

    def _normalize_layer(self, name: str, hidden: Tensor) -> Tensor:
        return self._normalize(hidden, self.norms[name])

    def _normalize(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (self.shape.width,), weight, self.shape.norm_epsilon)


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions (2104.09864) of neighbouring pairs, which is the order of weights in GGUF files."""
    even, odd = heads[..., 0::2].float(), heads[..., 1::2].float()
    turned = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1)
    return turned.flatten(-2).to(heads.dtype)
