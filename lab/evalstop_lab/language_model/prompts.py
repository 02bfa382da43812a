"""The prompts: short reviews of things, in the model's chat format, all with the same number of tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from evalstop_lab.language_model.sampling import END

START = 1
THINGS = """
bicycle kettle novel museum bakery hotel movie concert garden laptop camera restaurant beach train jacket lamp pillow
podcast recipe theatre bookshop library mountain river bridge market festival airline ferry tent backpack guitar piano
violin drum painting sculpture poem album song game puzzle toy doll robot drone printer scanner monitor keyboard mouse
headphone speaker radio television freezer oven toaster blender mixer pan knife spoon fork plate bowl cup glass bottle
table chair sofa bed desk shelf carpet curtain mirror clock watch ring necklace scarf hat glove shoe boot sandal dress
shirt sweater coat umbrella suitcase wallet pen pencil notebook calendar map compass lantern candle soap shampoo towel
brush razor perfume tea coffee juice soup salad sandwich pizza burger cake cookie pie bread cheese yogurt chocolate
"""


def read_prompts(path: Path) -> Tensor:
    """The prompts of all things whose prompt has the most usual number of tokens: [prompts, tokens]."""
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    prompts = [
        [START, *encode(f"user\nWrite a short review of a {thing}."), END, *encode("\n"), START, *encode("assistant\n")]
        for thing in THINGS.split()
    ]
    length = Counter(map(len, prompts)).most_common(1)[0][0]
    return torch.tensor([prompt for prompt in prompts if len(prompt) == length])
