"""Records runs of the language model in the format of `evalstop-lab stopbench record`."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from evalstop_lab.language_model.prompts import read_prompts
from evalstop_lab.language_model.reward_models import Comparisons
from evalstop_lab.language_model.training import EVAL_PROMPTS, Eval, Setting, Sizes, Training
from evalstop_lab.language_model.weights import read_model

DEFAULT_SIZES = Sizes()
CAREFUL_SIZES = Sizes(reward_steps=150)


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


def draw_setting(seed: int, bounds: Bounds = USUAL) -> Setting:
    rng = np.random.default_rng([seed, 1])

    def draw_log_uniform(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    learning_rate = draw_log_uniform(*bounds.learning_rate)
    is_penalized = not bounds.without_penalty or rng.random() >= bounds.without_penalty
    kl_coefficient = draw_log_uniform(*bounds.kl_coefficient) if is_penalized else 0.0
    number = int(draw_log_uniform(*bounds.comparisons))
    return Setting(learning_rate, kl_coefficient, Comparisons(seed, number, float(rng.uniform(*bounds.label_noise))))


def record_language_runs(
    model: Path,
    file: Path,
    settings: Mapping[int, Setting],
    steps: int,
    eval_every: int,
    processes: int,
    sizes: Sizes = DEFAULT_SIZES,
) -> None:
    """Train one run for each seed and its setting, all at once, and write them to a gzipped file of JSON lines.

    Uses the GPU if there is one. The results differ a little from one GPU to another. A training that is interrupted
    or fails leaves the runs as far as they came.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    seed = next(iter(settings))
    training = Training(
        read_model(model, device, dtype), read_prompts(model), list(settings.values()), sizes, seed, processes
    )
    _tell(f"reward models: correlation with the score {np.mean(training.rewards.correlations):.2f}")
    evals: list[Eval] = []
    try:
        while True:
            if training.step % eval_every == 0:
                evals.append(training.evaluate())
                _tell_eval(evals[-1], steps)
            if training.step == steps:
                break
            training.train_step()
    finally:
        if evals:  # else an earlier recording stays
            _write_runs(file, settings, evals, sizes)


def _write_runs(file: Path, settings: Mapping[int, Setting], evals: Sequence[Eval], sizes: Sizes) -> None:
    with file.open("wb") as target, gzip.GzipFile(fileobj=target, mode="wb", mtime=0) as packed:
        for index, (seed, setting) in enumerate(settings.items()):
            record = _to_record(seed, setting, index, evals, sizes)
            packed.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


def _tell_eval(eval_: Eval, steps: int) -> None:
    means = f"score {eval_.scores.mean():.3f}, proxy {eval_.proxy.mean():.2f}, KL {eval_.kl.mean():.1f}"
    _tell(f"step {eval_.step} of {steps}: {means}; {eval_.examples[0]!r}")


def _to_record(seed: int, setting: Setting, run: int, evals: Sequence[Eval], sizes: Sizes) -> dict[str, Any]:
    """The setting, the log, the scores by prompt in thousandths, the truth, and a text at the first eval, at the
    highest truth and at the last eval.
    """
    scores = np.array([eval_.scores[run] for eval_ in evals])
    posted, paired, others = np.split(scores, [sizes.eval_texts, sizes.eval_texts + sizes.paired_texts], axis=1)
    truth = others.mean(1)
    columns = {
        "eval": posted.mean(1),
        "stderr": posted.std(1, ddof=1) / sizes.eval_texts**0.5,
        "proxy": np.array([eval_.proxy[run, : sizes.eval_texts].mean() for eval_ in evals]),
        "kl": np.array([eval_.kl[run, : sizes.eval_texts].mean() for eval_ in evals]),
    }
    log = {name: np.round(column.astype(float), 4).tolist() for name, column in columns.items()}
    return {
        "seed": seed,
        "family": "language-model",
        "config": {
            "learning_rate": setting.learning_rate,
            "kl_coefficient": setting.kl_coefficient,
            "comparisons": setting.comparisons.number,
            "label_noise": setting.comparisons.label_noise,
        },
        "refits": [],
        "log": {"step": [eval_.step for eval_ in evals], **log},
        "prompts": np.round(1000 * paired.reshape(len(evals), EVAL_PROMPTS, sizes.paired_of_prompt).mean(2))
        .astype(int)
        .tolist(),
        "paired_texts": sizes.paired_texts,
        "paired_sd": np.round(paired.std(1, ddof=1), 3).tolist(),
        "truth": np.round(truth, 4).tolist(),
        "truth_stderr": round(float(others.std(1, ddof=1).mean() / others.shape[1] ** 0.5), 4),
        "texts": {evals[index].step: evals[index].examples[run] for index in (0, int(truth.argmax()), len(evals) - 1)},
    }


def _tell(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
