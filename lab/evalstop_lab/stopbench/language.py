"""`python -m evalstop_lab.stopbench.language MODEL FILE`: RLHF of a language model, recorded with the truth.

SmolLM2-135M-Instruct praises whatever it reviews, and learns to find fault. A run trains low-rank changes of it by
policy gradient, against a reward model: the same network, fitted to noisy comparisons of the initial model's texts. The
score of a review is how critical it is, minus penalties for improbable text and for repetition. The comparisons contain
little of either, so that long optimization leads to text that the reward model likes and nobody else would.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.models.llama import LlamaForCausalLM
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from evalstop_lab.arguments import positive_number, require_writable
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.worlds.recorded import write_records
from evalstop_lab.worlds.shapes import draw_log_uniform

START, END = 1, 2  # the tokens around a message
TEMPERATURE = 0.7  # at 1 so small a model often writes of something else
RANK, REWARD_RANK, REWARD_RATE = 16, 8, 5e-4
BETAS = (0.9, 0.95)
EVAL_PROMPTS = 32
AT_ONCE = 256  # texts; their logits take 2 GB
ANALYZER = SentimentIntensityAnalyzer()
THINGS = """
bicycle kettle novel museum bakery hotel movie concert garden laptop camera restaurant beach train jacket lamp pillow
podcast recipe theatre bookshop library mountain river bridge market festival airline ferry tent backpack guitar piano
violin drum painting sculpture poem album song game puzzle toy doll robot drone printer scanner monitor keyboard mouse
headphone speaker radio television freezer oven toaster blender mixer pan knife spoon fork plate bowl cup glass bottle
table chair sofa bed desk shelf carpet curtain mirror clock watch ring necklace scarf hat glove shoe boot sandal dress
shirt sweater coat umbrella suitcase wallet pen pencil notebook calendar map compass lantern candle soap shampoo towel
brush razor perfume tea coffee juice soup salad sandwich pizza burger cake cookie pie bread cheese yogurt chocolate
"""


@dataclass(frozen=True)
class Setting:
    """What differs between runs; a reward model is fitted to `comparisons`, a share `label_noise` of them wrong."""

    seed: int
    learning_rate: float
    kl_coefficient: float
    comparisons: int
    label_noise: float


class Bounds(NamedTuple):
    """The bounds of what differs between runs; `without_penalty`: the share of runs without a KL penalty."""

    learning_rate: tuple[float, float]
    without_penalty: float
    kl_coefficient: tuple[float, float]
    comparisons: tuple[int, int]
    label_noise: tuple[float, float]


USUAL = Bounds((1e-4, 8e-4), 0.4, (0.005, 0.2), (100, 1500), (0.0, 0.3))
CAREFUL = Bounds((1e-4, 3e-4), 0.0, (0.008, 0.06), (1000, 4000), (0.0, 0.1))
"""Of runs that should stay healthy."""


def draw_setting(seed: int, bounds: Bounds) -> Setting:
    rng = np.random.default_rng([seed, 1])
    learning_rate = draw_log_uniform(rng, *bounds.learning_rate)
    is_penalized = not bounds.without_penalty or rng.random() >= bounds.without_penalty
    kl_coefficient = draw_log_uniform(rng, *bounds.kl_coefficient) if is_penalized else 0.0
    number = int(draw_log_uniform(rng, *bounds.comparisons))
    return Setting(seed, learning_rate, kl_coefficient, number, float(rng.uniform(*bounds.label_noise)))


@dataclass(frozen=True)
class Sizes:
    """What all runs share. An eval samples `eval_texts` and `true_texts` for random prompts of those kept for evals,
    and between them `paired_of_prompt` for each."""

    texts: int = 32
    texts_of_prompt: int = 8
    new_tokens: int = 40
    eval_texts: int = 64
    paired_of_prompt: int = 8
    true_texts: int = 128
    reward_steps: int = 60
    reward_pairs: int = 16
    pool: int = 8192


def read_model(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Read a Llama with a byte-level vocabulary, to the GPU if there is one; raises UnusableArguments."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    try:
        model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, clean_up_tokenization_spaces=False)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UnusableArguments(f"{path} can't be read as a GGUF file of a Llama: {error!r}.") from error
    return model.to(device).requires_grad_(False), tokenizer


def list_prompts(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Short reviews of things, in the chat format, of the most usual number of tokens: [prompts, tokens]."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    prompts = [
        [START, *encode(f"user\nWrite a short review of a {thing}."), END, *encode("\n"), START, *encode("assistant\n")]
        for thing in THINGS.split()
    ]
    length = Counter(map(len, prompts)).most_common(1)[0][0]
    return torch.tensor([prompt for prompt in prompts if len(prompt) == length])


class ChangedLinear(nn.Module):
    """A frozen product plus a low-rank change (LoRA, 2106.09685), which is zero at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.weight = weight
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(inputs, rank, device=weight.device) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(rank, outputs, device=weight.device))

    def forward(self, inputs: Tensor) -> Tensor:
        down, up = (change.to(inputs.dtype) for change in (self.down, self.up))
        return functional.linear(inputs, self.weight) + inputs @ down @ up


def add_changes(model: LlamaForCausalLM, rank: int) -> LlamaForCausalLM:
    """A copy of the model whose layers can change."""
    changed = copy.deepcopy(model)
    for layer in changed.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, ChangedLinear(child.weight, rank))
    return changed


class Texts(NamedTuple):
    """Texts with their prompts, [rows, tokens], and which of the new tokens count: those up to the text's end."""

    tokens: Tensor
    counted: Tensor

    @property
    def new_tokens(self) -> Tensor:
        return self.tokens[:, -self.counted.shape[1] :]


def sample_texts(model: LlamaForCausalLM, prompts: Tensor, new_tokens: int) -> Texts:
    """Sample one text for each prompt, [rows, tokens]."""
    options: dict[str, Any] = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
    options |= {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": END}
    with torch.no_grad():
        tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    ended = (tokens[:, prompts.shape[1] :] == END).int()
    return Texts(tokens, ended.cumsum(1) - ended == 0)


def compute_logprobs(model: LlamaForCausalLM, texts: Texts) -> Tensor:
    """The log-probability of each new token, [rows, new tokens], in float32."""
    hidden = model.model(texts.tokens[:, :-1]).last_hidden_state[:, -texts.counted.shape[1] :]
    logits = model.lm_head(hidden).float() / TEMPERATURE
    logprobs: Tensor = logits.gather(2, texts.new_tokens[..., None])[..., 0] - logits.logsumexp(2)
    return logprobs


def score_text(text: str, tokens: Sequence[int], logprob: float, usual: tuple[float, float]) -> float:
    """The score of a review, between -4.8 and 1.

    How critical is VADER's sentiment with its sign turned, between -1 and 1. `logprob` is the mean log-probability of
    the tokens under the initial model, `usual` the mean and standard deviation of that of its own texts: what is more
    than one standard deviation below the mean costs 0.5 a standard deviation, at most 2. A share of repeated triples of
    tokens above 10 % costs twice what is above.
    """
    critical = -ANALYZER.polarity_scores(text)["compound"]
    mean, sd = usual
    improbable = min(max((mean - sd - logprob) / sd, 0.0), 4.0)
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    repeated = max(1 - len(set(triples)) / len(triples) - 0.1, 0.0) if triples else 0.0
    return float(critical) - 0.5 * improbable - 2.0 * repeated


class Eval(NamedTuple):
    """The score of each text, that of the reward model and its log-ratio to the initial model, and the first text."""

    step: int
    scores: Any
    proxy: Any
    kl: Any
    example: str


class Training:
    """A policy and its reward model."""

    def __init__(
        self, initial: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, setting: Setting, sizes: Sizes
    ) -> None:
        """Fit the reward model."""
        torch.manual_seed(setting.seed)
        self.initial, self.tokenizer, self.setting, self.sizes, self.step = initial, tokenizer, setting, sizes, 0
        prompts = list_prompts(tokenizer)
        prompts = prompts[torch.randperm(len(prompts))].to(initial.device)
        self.eval_prompts, self.prompts = prompts[:EVAL_PROMPTS], prompts[EVAL_PROMPTS:]
        self.policy, self.reward = add_changes(initial, RANK), add_changes(initial, REWARD_RANK)
        self.head = nn.Parameter(torch.zeros(initial.config.hidden_size, device=initial.device))
        self.usual, self.shift, self.scale = (0.0, 1.0), 0.0, 1.0
        self._fit_reward()
        self.adam = torch.optim.Adam(_list_changes(self.policy), setting.learning_rate, BETAS)

    def train_step(self) -> None:
        """Sample texts, score them by the reward model, and change the policy."""
        sizes = self.sizes
        prompts = self._choose(self.prompts, sizes.texts // sizes.texts_of_prompt)
        texts = sample_texts(self.policy, prompts.repeat_interleave(sizes.texts_of_prompt, dim=0), sizes.new_tokens)
        with torch.no_grad():
            rewards = self._score(texts) - self.setting.kl_coefficient * self._compute_log_ratios(texts)
        by_prompt = rewards.view(-1, sizes.texts_of_prompt)
        advantages = (by_prompt - by_prompt.mean(1, keepdim=True)).flatten()
        advantages = advantages / (advantages.std() + 1e-6)
        weights = advantages[:, None] * texts.counted / (sizes.texts * sizes.new_tokens)
        self.adam.zero_grad()
        (-(weights * compute_logprobs(self.policy, texts)).sum()).backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self.step += 1

    @torch.no_grad()
    def evaluate(self) -> Eval:
        """Sample texts for the prompts kept for evals, in the order of `Sizes`, and score them."""
        posted, rest = (
            self._choose(self.eval_prompts, number) for number in (self.sizes.eval_texts, self.sizes.true_texts)
        )
        paired = self.eval_prompts.repeat_interleave(self.sizes.paired_of_prompt, dim=0)
        columns: list[tuple[Any, ...]] = []
        example = ""
        for prompts in torch.split(torch.cat([posted, paired, rest]), AT_ONCE):
            texts = sample_texts(self.policy, prompts, self.sizes.new_tokens)
            measured = (self._score(texts), self._compute_log_ratios(texts))
            columns.append((self._score_truly(texts), *(column.cpu().numpy() for column in measured)))
            example = example or self._decode(texts.new_tokens[0].tolist())
        scores, proxy, kl = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        return Eval(self.step, scores, proxy, kl, example)

    def _choose(self, prompts: Tensor, number: int) -> Tensor:
        """Random prompts, [number, tokens]."""
        return prompts[torch.randint(len(prompts), (number,), device=prompts.device)]

    def _compute_log_ratios(self, texts: Texts) -> Tensor:
        """The log-probability of each text minus that under the initial model; its mean is the KL."""
        return ((compute_logprobs(self.policy, texts) - compute_logprobs(self.initial, texts)) * texts.counted).sum(1)

    def _decode(self, tokens: list[int]) -> str:
        end = tokens.index(END) if END in tokens else len(tokens)
        return str(self.tokenizer.decode(tokens[:end]))

    def _score_truly(self, texts: Texts) -> Any:
        lengths = texts.counted.sum(1).tolist()
        rows = zip(texts.new_tokens.tolist(), lengths, self._average_logprobs(texts).tolist(), strict=True)
        return np.array([score_text(self._decode(row), row[:length], mean, self.usual) for row, length, mean in rows])

    @torch.no_grad()
    def _average_logprobs(self, texts: Texts) -> Tensor:
        """The mean log-probability of a token under the initial model, by text."""
        return (compute_logprobs(self.initial, texts) * texts.counted).sum(1) / texts.counted.sum(1)

    def _score(self, texts: Texts) -> Tensor:
        """The scores of the texts by the reward model."""
        hidden = self.reward.model(texts.tokens).last_hidden_state
        last = texts.tokens.shape[1] - texts.counted.shape[1] + texts.counted.sum(1) - 1
        ends = hidden[torch.arange(len(last), device=last.device), last].float()
        scores: Tensor = (ends @ self.head - self.shift) / self.scale
        return scores

    def _fit_reward(self) -> None:
        """Fit the reward model by the loss of Bradley and Terry to comparisons of the initial model's texts.

        Its scores are then shifted and scaled: the initial model's texts have mean 0 and standard deviation 1.
        """
        sizes, rng = self.sizes, np.random.default_rng([self.setting.seed, 3])
        chosen = torch.randint(len(self.prompts), (sizes.pool,), device=self.prompts.device)
        samples = [
            sample_texts(self.initial, self.prompts[rows], sizes.new_tokens) for rows in torch.split(chosen, AT_ONCE)
        ]
        means = torch.cat([self._average_logprobs(texts) for texts in samples])
        self.usual = means.mean().item(), means.std().item()
        scores = np.concatenate([self._score_truly(texts) for texts in samples])
        compared = _compare_texts(scores, chosen.cpu().numpy(), self.setting)
        pool = Texts(*(torch.cat(parts) for parts in zip(*samples, strict=True)))
        adam = torch.optim.Adam([*_list_changes(self.reward), self.head], REWARD_RATE, BETAS)
        for _ in range(sizes.reward_steps):
            pairs = compared[rng.integers(0, len(compared), sizes.reward_pairs)].ravel()
            by_pair = self._score(Texts(pool.tokens[pairs], pool.counted[pairs])).view(-1, 2)
            adam.zero_grad()
            loss = -functional.logsigmoid(by_pair[:, 0] - by_pair[:, 1]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
        with torch.no_grad():
            raw = self._score(samples[0])
        self.shift, self.scale = raw.mean().item(), raw.std().item()


def _list_changes(model: LlamaForCausalLM) -> list[nn.Parameter]:
    return [item for item in model.parameters() if item.requires_grad]


def _compare_texts(scores: Any, prompts: Any, setting: Setting) -> Any:
    """Draw pairs of texts of one prompt, the preferred first, some wrongly: [comparisons, 2]."""
    rng = np.random.default_rng([setting.seed, 2])
    groups = [np.flatnonzero(prompts == prompt) for prompt in np.unique(prompts)]
    groups = [group for group in groups if len(group) > 1]
    draws = (groups[rng.integers(len(groups))] for _ in range(setting.comparisons))
    pairs = np.array([rng.choice(group, 2, replace=False) for group in draws])
    other_is_better = scores[pairs[:, 1]] > scores[pairs[:, 0]]
    turned = other_is_better != (rng.random(len(pairs)) < setting.label_noise)
    pairs[turned] = pairs[turned][:, ::-1]
    return pairs


def record_run(training: Training, steps: int, eval_every: int) -> dict[str, Any]:
    """Train a run; returns its setting, log, scores by prompt in thousandths, truth, and a text at the first eval, at
    the highest truth and at the last eval."""
    evals = list(_train(training, steps, eval_every))
    sizes, paired_texts = training.sizes, EVAL_PROMPTS * training.sizes.paired_of_prompt
    scores = np.array([item.scores for item in evals])
    posted, paired, others = np.split(scores, [sizes.eval_texts, sizes.eval_texts + paired_texts], axis=1)
    truth = others.mean(1)
    columns = {
        "eval": posted.mean(1),
        "stderr": posted.std(1, ddof=1) / sizes.eval_texts**0.5,
        "proxy": np.array([item.proxy[: sizes.eval_texts].mean() for item in evals]),
        "kl": np.array([item.kl[: sizes.eval_texts].mean() for item in evals]),
    }
    log = {name: np.round(column.astype(float), 4).tolist() for name, column in columns.items()}
    by_prompt = paired.reshape(len(evals), EVAL_PROMPTS, sizes.paired_of_prompt).mean(2)
    config = asdict(training.setting)
    return {
        "seed": config.pop("seed"),
        "family": "language-model",
        "config": config,
        "refits": [],
        "log": {"step": [item.step for item in evals]} | log,
        "prompts": np.round(1000 * by_prompt).astype(int).tolist(),
        "paired_texts": paired_texts,
        "paired_sd": np.round(paired.std(1, ddof=1), 3).tolist(),
        "truth": np.round(truth, 4).tolist(),
        "truth_stderr": round(float(others.std(1, ddof=1).mean() / others.shape[1] ** 0.5), 4),
        "texts": {evals[index].step: evals[index].example for index in (0, int(truth.argmax()), len(evals) - 1)},
    }


def _train(training: Training, steps: int, eval_every: int) -> Iterator[Eval]:
    yield training.evaluate()
    while training.step < steps:
        training.train_step()
        if training.step % eval_every == 0:
            yield training.evaluate()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(": ")[1])
    parser.add_argument("model", type=Path, help="a GGUF file of a Llama, such as SmolLM2-135M-Instruct")
    parser.add_argument("file", type=Path, help="such as runs.jsonl.gz")
    parser.add_argument("--careful", action="store_true", help="settings that should stay healthy")
    for name, default in (("runs", 48), ("first-seed", 7_000_000), ("steps", 240), ("eval-every", 6)):
        parser.add_argument(f"--{name}", type=positive_number, default=default, help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    require_writable(args.file)
    model, tokenizer = read_model(args.model)
    bounds, sizes = (CAREFUL, Sizes(reward_steps=150)) if args.careful else (USUAL, Sizes())
    records = []
    for seed in range(args.first_seed, args.first_seed + args.runs):
        training = Training(model, tokenizer, draw_setting(seed, bounds), sizes)
        records.append(record_run(training, args.steps, args.eval_every))
        write_records(args.file, records)  # so that an interrupted recording keeps its complete runs
        sys.stderr.write(f"seed {seed}: the truth ends at {records[-1]['truth'][-1]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
