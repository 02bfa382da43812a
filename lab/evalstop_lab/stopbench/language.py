"""`evalstop-lab stopbench record-language`: RLHF of a language model, many runs at a time, recorded with the truth.

SmolLM2-135M-Instruct praises whatever it reviews, and learns to find fault. Each run trains low-rank changes of it by
policy gradient, against a reward model of its own: the same network, fitted to noisy comparisons of the initial model's
texts. The score of a review is how critical it is, minus penalties for improbable text and for repetition. The
comparisons contain little of either, so a policy that is optimized for long moves to text that its reward model likes
and nobody else would. All runs go through the network at once: sixty cost little more than one with as many texts.
They need a GPU with some 1.1 GB a run.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.models.llama import LlamaForCausalLM
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.stopbench.recording import EVAL_PROMPTS, Eval, LanguageSetting, Sizes, to_record
from evalstop_lab.worlds.recorded import write_records
from evalstop_lab.worlds.shapes import draw_log_uniform

START, END = 1, 2  # the tokens around a message
TEMPERATURE = 0.7  # at 1 so small a model often writes of something else
RANK, REWARD_RANK, REWARD_RATE = 16, 8, 5e-4
CHECKED_TEXTS = 256
EVAL_ROUND = 8  # an eval samples at most this many times as many texts at once as a step of the training
ANALYZER = SentimentIntensityAnalyzer()
LOGIT_ROWS = 8192  # tokens whose logits are held at a time: 49,152 floats each
THINGS = """
bicycle kettle novel museum bakery hotel movie concert garden laptop camera restaurant beach train jacket lamp pillow
podcast recipe theatre bookshop library mountain river bridge market festival airline ferry tent backpack guitar piano
violin drum painting sculpture poem album song game puzzle toy doll robot drone printer scanner monitor keyboard mouse
headphone speaker radio television freezer oven toaster blender mixer pan knife spoon fork plate bowl cup glass bottle
table chair sofa bed desk shelf carpet curtain mirror clock watch ring necklace scarf hat glove shoe boot sandal dress
shirt sweater coat umbrella suitcase wallet pen pencil notebook calendar map compass lantern candle soap shampoo towel
brush razor perfume tea coffee juice soup salad sandwich pizza burger cake cookie pie bread cheese yogurt chocolate
"""


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


def draw_language_setting(seed: int, bounds: Bounds) -> LanguageSetting:
    rng = np.random.default_rng([seed, 1])
    learning_rate = draw_log_uniform(rng, *bounds.learning_rate)
    is_penalized = not bounds.without_penalty or rng.random() >= bounds.without_penalty
    kl_coefficient = draw_log_uniform(rng, *bounds.kl_coefficient) if is_penalized else 0.0
    number = int(draw_log_uniform(rng, *bounds.comparisons))
    return LanguageSetting(seed, learning_rate, kl_coefficient, number, float(rng.uniform(*bounds.label_noise)))


CAREFUL_SIZES = Sizes(reward_steps=150)


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
    """A frozen product plus a low-rank change of each run's own (LoRA, 2106.09685), which is zero at first.

    The rows of the input are those of the first run, then those of the second, and so on, as many of each.
    """

    def __init__(self, weight: Tensor, runs: int, rank: int) -> None:
        super().__init__()
        self.weight = weight
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(runs, inputs, rank, device=weight.device) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(runs, rank, outputs, device=weight.device))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(len(self.down), -1, inputs.shape[-1])
        down, up = (change.to(rows.dtype) for change in (self.down, self.up))
        outputs = torch.baddbmm(functional.linear(rows, self.weight), rows @ down, up)
        return outputs.view(*inputs.shape[:-1], -1)


def add_changes(model: LlamaForCausalLM, runs: int, rank: int) -> LlamaForCausalLM:
    """A copy of the model whose layers have changes of each run."""
    changed = copy.deepcopy(model)
    for layer in changed.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, ChangedLinear(child.weight, runs, rank))
    return changed


class Adam(torch.optim.Adam):
    """Adam with a learning rate for each run; the first axis of a parameter is the run."""

    def __init__(self, parameters: Iterable[nn.Parameter], rates: Tensor) -> None:
        super().__init__([item for item in parameters if item.requires_grad], lr=1.0, betas=(0.9, 0.95))
        self.rates = rates

    @torch.no_grad()
    def change(self) -> None:
        """Change the parameters by their gradients, and clear these."""
        parameters = self.param_groups[0]["params"]
        before = [parameter.clone() for parameter in parameters]
        self.step()
        for parameter, old in zip(parameters, before, strict=True):
            rates = self.rates.view(-1, *[1] * (old.dim() - 1))
            parameter.copy_(torch.lerp(old, parameter, rates.expand_as(old)))  # it moved as by a rate of 1
        self.zero_grad()


class Texts(NamedTuple):
    """Texts with their prompts, [rows, tokens], and which of the new tokens count: those up to the text's end."""

    tokens: Tensor
    counted: Tensor

    @property
    def new_tokens(self) -> Tensor:
        return self.tokens[:, -self.counted.shape[1] :]

    def select(self, rows: Any) -> Texts:
        return Texts(self.tokens[rows], self.counted[rows])


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
    rows, targets = (torch.split(item, LOGIT_ROWS) for item in (hidden.flatten(0, 1), texts.new_tokens.flatten()))

    def score(part: Tensor, target: Tensor) -> Tensor:
        logits = model.lm_head(part).float() / TEMPERATURE
        return torch.as_tensor(logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(1))

    parts = [checkpoint(score, *part, use_reentrant=False) for part in zip(rows, targets, strict=True)]
    return torch.cat(parts).view(texts.counted.shape)


class Fluency(NamedTuple):
    """The mean and standard deviation, over the initial model's texts, of the mean log-probability of a token."""

    mean: float
    sd: float


def score_text(text: str, tokens: Sequence[int], logprob: float, usual: Fluency) -> float:
    """The score of a review, between -4.8 and 1.

    How critical is VADER's sentiment with its sign turned, between -1 and 1. `logprob` is the mean log-probability of
    the tokens under the initial model: what is more than one standard deviation below the mean of its own texts costs
    0.5 a standard deviation, at most 2. A share of repeated triples of tokens above 10 % costs twice what is above.
    """
    critical = -ANALYZER.polarity_scores(text)["compound"]
    improbable = min(max((usual.mean - usual.sd - logprob) / usual.sd, 0.0), 4.0)
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    repeated = max(1 - len(set(triples)) / len(triples) - 0.1, 0.0) if triples else 0.0
    return float(critical) - 0.5 * improbable - 2.0 * repeated


class Training:
    """The policies and reward models of all runs, at the same step."""

    def __init__(self, path: Path, settings: Sequence[LanguageSetting], sizes: Sizes) -> None:
        """Fit the reward models; 32 prompts are kept for evals."""
        self.sizes, self.settings, self.runs, self.step = sizes, settings, len(settings), 0
        self.usual = Fluency(0.0, 1.0)
        torch.manual_seed(settings[0].seed)
        self.initial, self.tokenizer = read_model(path)
        self.device = self.initial.device
        prompts = list_prompts(self.tokenizer)
        prompts = prompts[torch.randperm(len(prompts))].to(self.device)
        self.eval_prompts, self.prompts = prompts[:EVAL_PROMPTS], prompts[EVAL_PROMPTS:]
        self.policies = add_changes(self.initial, self.runs, RANK)
        self.rewards = add_changes(self.initial, self.runs, REWARD_RANK)
        self.heads = nn.Parameter(torch.zeros(self.runs, self.initial.config.hidden_size, device=self.device))
        self.shift, self.scale = torch.zeros(self.runs, 1, device=self.device), torch.ones(1, device=self.device)
        self._fit_rewards(settings)
        self.kl_coefficients = torch.tensor([[setting.kl_coefficient] for setting in settings], device=self.device)
        rates = torch.tensor([setting.learning_rate for setting in settings], device=self.device)
        self.adam = Adam(self.policies.parameters(), rates)

    def train_step(self) -> None:
        """Sample texts, score them by the reward models, and change the policies."""
        sizes = self.sizes
        prompts = self._choose(self.prompts, sizes.texts // sizes.texts_of_prompt)
        prompts = prompts.repeat_interleave(sizes.texts_of_prompt, dim=1)
        texts = sample_texts(self.policies, prompts.flatten(0, 1), sizes.new_tokens)
        with torch.no_grad():
            rewards = self._score(texts) - self.kl_coefficients * self._compute_log_ratios(texts)
        by_prompt = rewards.view(self.runs, -1, sizes.texts_of_prompt)
        advantages = (by_prompt - by_prompt.mean(2, keepdim=True)).view(rewards.shape)
        advantages = (advantages / (advantages.std(1, keepdim=True) + 1e-6)).flatten()
        weights = advantages[:, None] * texts.counted / (sizes.texts * sizes.new_tokens)
        (-(weights * compute_logprobs(self.policies, texts)).sum()).backward()  # type: ignore[no-untyped-call]
        self.adam.change()
        self.step += 1

    @torch.no_grad()
    def evaluate(self) -> Eval:
        """Sample texts for the prompts kept for evals, in the order of `Sizes`, and score them."""
        sizes = self.sizes
        wanted = sizes.eval_texts + sizes.paired_texts + sizes.true_texts
        rounds = -(-wanted // (EVAL_ROUND * sizes.texts))
        others = rounds * -(-wanted // rounds) - sizes.eval_texts - sizes.paired_texts
        paired = self.eval_prompts.repeat_interleave(sizes.paired_of_prompt, dim=0).expand(self.runs, -1, -1)
        posted, rest = (self._choose(self.eval_prompts, number) for number in (sizes.eval_texts, others))
        columns: list[list[Any]] = [[], [], []]
        examples: list[str] = []
        for prompts in torch.cat([posted, paired, rest], dim=1).chunk(rounds, 1):
            texts = sample_texts(self.policies, prompts.flatten(0, 1), sizes.new_tokens)
            scored = self._score(texts).cpu().numpy(), self._compute_log_ratios(texts).cpu().numpy()
            for column, values in zip(columns, (*scored, self._score_truly(texts)), strict=True):
                column.append(values)
            examples = examples or [self._decode(row) for row in texts.new_tokens[:: prompts.shape[1]].tolist()]
        proxy, kl, scores = (np.concatenate(column, axis=1) for column in columns)
        return Eval(self.step, proxy, kl, scores, examples)

    def _choose(self, prompts: Tensor, number: int) -> Tensor:
        """Random prompts for each run, [runs, number, tokens]."""
        return prompts[torch.randint(len(prompts), (self.runs, number), device=self.device)]

    def _compute_log_ratios(self, texts: Texts) -> Tensor:
        """The log-probability of each text minus that under the initial model, [runs, texts]; its mean is the KL."""
        ratios = compute_logprobs(self.policies, texts) - compute_logprobs(self.initial, texts)
        return (ratios * texts.counted).sum(1).view(self.runs, -1)

    def _decode(self, tokens: list[int]) -> str:
        end = tokens.index(END) if END in tokens else len(tokens)
        return str(self.tokenizer.decode(tokens[:end]))

    @torch.no_grad()
    def _score_truly(self, texts: Texts) -> Any:
        """The scores of the reviews, [runs, texts]."""
        lengths = texts.counted.sum(1)
        means = ((compute_logprobs(self.initial, texts) * texts.counted).sum(1) / lengths).tolist()
        scores = [
            score_text(self._decode(row), row[:length], mean, self.usual)
            for row, length, mean in zip(texts.new_tokens.tolist(), lengths.tolist(), means, strict=True)
        ]
        return np.array(scores).reshape(self.runs, -1)

    def _score(self, texts: Texts) -> Tensor:
        """The scores of the texts by each run's reward model, [runs, texts]."""
        hidden = self.rewards.model(texts.tokens).last_hidden_state
        last = texts.tokens.shape[1] - texts.counted.shape[1] + texts.counted.sum(1) - 1
        ends = hidden[torch.arange(len(last), device=self.device), last].float().view(self.runs, -1, hidden.shape[2])
        return (torch.einsum("rsd,rd->rs", ends, self.heads) - self.shift) / self.scale

    def _fit_rewards(self, settings: Sequence[LanguageSetting]) -> None:
        """Fit each run's reward model by the loss of Bradley and Terry to comparisons of the initial model's texts.

        Its scores are then shifted and scaled: the initial model's texts have mean 0 and standard deviation 1.
        """
        sizes = self.sizes
        rounds = -(-sizes.pool // (self.runs * sizes.texts))
        chosen = torch.randint(len(self.prompts), (rounds, self.runs * sizes.texts), device=self.device)
        samples = [sample_texts(self.policies, self.prompts[row], sizes.new_tokens) for row in chosen]
        pool = Texts(*(torch.cat(parts) for parts in zip(*samples, strict=True)))
        with torch.no_grad():
            initial = torch.cat([compute_logprobs(self.initial, texts) for texts in samples])
        means = (initial * pool.counted).sum(1) / pool.counted.sum(1)
        self.usual = Fluency(means.mean().item(), means.std().item())
        scores = np.concatenate([self._score_truly(texts).ravel() for texts in samples])
        compared = [_compare_texts(scores, chosen.flatten().cpu().numpy(), setting) for setting in settings]
        rngs = [np.random.default_rng([setting.seed, 3]) for setting in settings]
        adam = Adam([*self.rewards.parameters(), self.heads], torch.full((self.runs,), REWARD_RATE, device=self.device))
        for _ in range(sizes.reward_steps):
            drawn = zip(compared, rngs, strict=True)
            pairs = np.stack([rows[rng.integers(0, len(rows), sizes.reward_pairs)] for rows, rng in drawn])
            by_pair = self._score(pool.select(pairs.ravel())).view(self.runs, -1, 2)
            loss = -functional.logsigmoid(by_pair[:, :, 0] - by_pair[:, :, 1]).sum() / sizes.reward_pairs
            loss.backward()  # type: ignore[no-untyped-call]
            adam.change()
        self.rewards.requires_grad_(False)
        self.heads.requires_grad_(False)
        checked = np.random.default_rng(0).permutation(len(scores))[:CHECKED_TEXTS]
        with torch.no_grad():
            raw = self._score(pool.select(np.tile(checked, self.runs)))
        self.shift, self.scale = raw.mean(1, keepdim=True), raw.std(1, keepdim=True)


def _compare_texts(scores: Any, prompts: Any, setting: LanguageSetting) -> Any:
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


def record_language_runs(file: Path, training: Training, steps: int, eval_every: int) -> None:
    """Train all runs and write them to a gzipped file of JSON lines, if interrupted as far as they came."""
    evals: list[Eval] = []
    try:
        while True:
            if training.step % eval_every == 0:
                evals.append(item := training.evaluate())
                means = f"score {item.scores.mean():.3f}, proxy {item.proxy.mean():.2f}, KL {item.kl.mean():.1f}"
                sys.stderr.write(f"step {item.step} of {steps}: {means}; {item.examples[0]!r}\n")
            if training.step == steps:
                break
            training.train_step()
    finally:
        if evals:  # else an earlier recording stays
            settings = enumerate(training.settings)
            write_records(file, (to_record(run, setting, evals, training.sizes) for run, setting in settings))
