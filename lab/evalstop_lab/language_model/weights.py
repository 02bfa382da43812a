"""Reads a Llama model and its vocabulary from a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize

from evalstop_lab.errors import UnusableArguments


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama model."""

    layers: int
    width: int
    heads: int
    key_heads: int
    rope_base: float
    norm_epsilon: float

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Model:
    """Weights by their names in the file, in bfloat16, and the bytes of each token."""

    shape: Shape
    weights: Mapping[str, torch.Tensor]
    vocabulary: tuple[bytes, ...]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.vocabulary[token] for token in tokens).decode("utf-8", errors="replace")


def read_model(path: Path, device: torch.device, dtype: torch.dtype) -> Model:
    """Read the model; raises UnusableArguments if the file does not hold a Llama with a byte-level vocabulary."""
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        kind = fields["general.architecture"], fields["tokenizer.ggml.model"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UnusableArguments(f"{path} can't be read as a GGUF file of a model: {error!r}.") from error
    if kind != ("llama", "gpt2"):
        raise UnusableArguments(f"{path} holds a {kind[0]} with a vocabulary of {kind[1]}; it must be llama and gpt2.")
    weights = {
        tensor.name.removesuffix(".weight"): torch.from_numpy(
            np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        ).to(device, dtype)
        for tensor in reader.tensors
    }
    shape = Shape(
        fields["llama.block_count"],
        fields["llama.embedding_length"],
        fields["llama.attention.head_count"],
        fields["llama.attention.head_count_kv"],
        fields["llama.rope.freq_base"],
        fields["llama.attention.layer_norm_rms_epsilon"],
    )
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    vocabulary = tuple(bytes(letters[letter] for letter in token) for token in fields["tokenizer.ggml.tokens"])
    return Model(shape, weights, vocabulary)


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself if printable, else one above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
