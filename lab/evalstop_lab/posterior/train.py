"""`evalstop-lab train-posterior`: train the network of the posterior detector on runs drawn from its prior.

Needs PyTorch: `pip install 'evalstop-lab[train]'`. The result is the file that the detector ships (16-bit
integers), and a JSON file with its training parameters and its results on other runs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evalstop_detectors.posterior.features import FEATURES, LIMIT, PLAN, FeatureState, Given, advance
from evalstop_detectors.posterior.network import (
    HIDDEN,
    OUTPUTS,
    PLAN_TERMS,
    WEIGHT_ONE,
)
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.report import list_versions
from evalstop_lab.worlds.prior import LONGEST, DrawnRun, draw_length, draw_run

RESOLUTION = 256.0  # features are rounded to multiples of 1/256
KEPT = ((120, 1.0), (400, 0.25), (LONGEST, 0.07))  # longer runs take longer: a share of those up to so many evals


class Batch(NamedTuple):
    """Arrays of (evals, runs), features of (evals, runs, FEATURES); `weight` is 0 after a run's last eval."""

    features: NDArray[np.float32]
    turned_for_good: NDArray[np.float32]
    will_turn: NDArray[np.float32]
    to_come: NDArray[np.float32]
    weight: NDArray[np.float32]


def draw_batches(rng: np.random.Generator, runs: int, size: int) -> list[Batch]:
    """Draw runs and group those of similar length, in random order."""
    drawn: list[DrawnRun] = []
    while len(drawn) < runs:
        evals = draw_length(rng)
        if rng.random() < next(share for most, share in KEPT if evals <= most):
            drawn.append(draw_run(rng, evals=evals))
    drawn.sort(key=lambda run: len(run.scores))
    groups = [drawn[begin : begin + size] for begin in range(0, runs, size)]
    return [to_batch(groups[index]) for index in rng.permutation(len(groups))]


def to_batch(runs: Sequence[DrawnRun]) -> Batch:
    """Compute features and targets of runs; the last eval of a run has weight 0, because stopping there saves
    nothing."""
    longest, count = max(len(run.scores) for run in runs), len(runs)
    turned, will, to_come, weight = (np.zeros((longest, count), np.float32) for _ in range(4))
    for index, run in enumerate(runs):
        n = len(run.scores)
        turned[run.peak + 1 : n, index] = run.turned
        will[:n, index] = run.turned
        best = np.maximum.accumulate(run.truth)
        later = np.maximum.accumulate(run.truth[::-1])[::-1]
        to_come[:n, index] = np.maximum(later - best, 0)
        weight[: n - 1, index] = n**-0.6
    features = np.zeros((longest, count, FEATURES), np.float32)
    for index, run in enumerate(runs):
        state = FeatureState()
        for at, inputs in enumerate(list_inputs(run)):
            state, features[at, index] = advance(state, inputs)
            to_come[at, index] /= state.best - state.low + state.first or 1
    features = np.floor(np.clip(features, -LIMIT, LIMIT) * RESOLUTION + 0.5) / RESOLUTION
    return Batch(features.astype(np.float32), turned, will, np.clip(to_come, 0, 4), weight)


def list_inputs(run: DrawnRun) -> Iterator[Given]:
    """The measurements of a run, by eval."""
    for score, *measured in zip(run.scores, run.stderrs, run.proxy, run.kl, run.progress, strict=True):
        yield Given(float(score), *(float(value) if np.isfinite(value) else None for value in measured))


BATCH = 128
DRAWN_AT_ONCE = 2048
RATE = 2e-3
KEPT_WEIGHT = 0.998  # at a step, of the mean of the weights, which is shipped; at first less
WARMUP_STEPS = 100
WEIGHT_WILL_TURN, WEIGHT_TO_COME = 0.3, 0.15
QUANTILES = (0.1, 0.5, 0.9)
VALIDATION_SEED, VALIDATION_RUNS = 999, 2048


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "--runs", type=positive_number, default=600_000, help="number of runs to draw (default: 600000, an hour)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the runs and the initial weights (default: 1)")
    parser.add_argument("--output", type=Path, default=Path("posterior.int16"), metavar="FILE", help="(%(default)s)")


def run(args: argparse.Namespace) -> int:
    torch = import_torch(args.seed)
    parts = {"gru": torch.nn.GRU(FEATURES, HIDDEN), "head": torch.nn.Linear(HIDDEN, OUTPUTS * (1 + PLAN_TERMS))}
    started = time.time()
    network = _train(torch, torch.nn.ModuleDict(parts), args.runs, args.seed)
    losses = _average_losses(
        torch, network, draw_batches(np.random.default_rng(VALIDATION_SEED), min(args.runs, VALIDATION_RUNS), BATCH)
    )
    gru, head = network["gru"], network["head"]
    data = encode_weights(gru.weight_ih_l0, gru.bias_ih_l0, gru.weight_hh_l0, gru.bias_hh_l0, head.weight, head.bias)
    args.output.write_bytes(data)
    report = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "runs": args.runs,
        "seed": args.seed,
        "seconds": round(time.time() - started),
        "validation": dict(zip(("turned", "will_turn", "to_come"), losses, strict=True)),
        "versions": list_versions() | {"torch": torch.__version__},
    }
    args.output.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    Console().print_json(json.dumps(report))
    return 0


def import_torch(seed: int) -> Any:
    """Import PyTorch with this seed; raises UnusableArguments if it is not installed."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise UnusableArguments("This needs PyTorch; run pip install 'evalstop-lab[train]'.") from error
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    torch.manual_seed(seed)
    return torch


def encode_weights(*arrays: Any) -> bytes:
    """Trained weights as 16-bit integers, as `evalstop_detectors.posterior` reads them."""
    return b"".join(
        np.clip(np.round(array.detach().numpy() * WEIGHT_ONE), -32768, 32767).astype("<i2").tobytes()
        for array in arrays
    )


def _train(torch: Any, network: Any, runs: int, seed: int) -> Any:
    """Train with Adam, with linear warmup for `WARMUP_STEPS` and cosine decay to 0; returns the averaged network."""
    with torch.no_grad():
        network["gru"].weight_ih_l0[:, PLAN] = 0.0
    averaged = torch.optim.swa_utils.AveragedModel(
        network, avg_fn=lambda mean, latest, steps: mean.lerp(latest, max(1 - KEPT_WEIGHT, 19 / (float(steps) + 20)))
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    rng = np.random.default_rng([seed, 7])
    steps = math.ceil(runs / BATCH)
    batches = itertools.chain.from_iterable(
        draw_batches(rng, min(runs, DRAWN_AT_ONCE), BATCH) for _ in itertools.count()
    )
    for step in track(range(steps), "training", console=Console(stderr=True), transient=True):
        for group in optimizer.param_groups:
            warm = min(1.0, step / WARMUP_STEPS)
            group["lr"] = RATE * warm * (0.5 + 0.5 * math.cos(math.pi * step / steps)) + 1e-5
        optimizer.zero_grad()
        turned, will_turn, to_come = _compute_losses(torch, network, next(batches))
        (turned + WEIGHT_WILL_TURN * will_turn + WEIGHT_TO_COME * to_come).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(network)
    return averaged.module


def _compute_losses(torch: Any, network: Any, batch: Batch) -> tuple[Any, Any, Any]:
    """Cross-entropy of `turned for good` and of `will turn`, and the pinball loss of the remaining gain; each a mean
    with weights of the run's length to the power 0.4, of the outputs without a plan, plus that of those with one."""
    features, weight = torch.from_numpy(batch.features), torch.from_numpy(batch.weight)
    told, share, remaining = features[..., PLAN].unbind(-1)
    remaining = remaining / 4
    terms = torch.stack([told, share, share**2, remaining, remaining * share, remaining**2], -1)
    without_plan = features.clone()
    without_plan[..., PLAN] = 0.0
    hidden, _ = network["gru"](without_plan)
    unplanned, of_plan = network["head"](hidden).split([OUTPUTS, PLAN_TERMS * OUTPUTS], -1)
    planned = (terms[..., None] * of_plan.unflatten(-1, (PLAN_TERMS, OUTPUTS))).sum(-2)
    both = [_compute_loss(torch, unplanned, batch, weight), _compute_loss(torch, planned, batch, weight * told)]
    turned, will_turn, to_come = (sum(losses) / weight.sum() for losses in zip(*both, strict=True))
    return turned, will_turn, to_come


def _compute_loss(torch: Any, output: Any, batch: Batch, weight: Any) -> tuple[Any, Any, Any]:
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    turned = cross_entropy(output[..., 0], torch.from_numpy(batch.turned_for_good), reduction="none")
    will_turn = cross_entropy(output[..., 1], torch.from_numpy(batch.will_turn), reduction="none")
    quantiles = torch.tensor(QUANTILES)
    missed = torch.from_numpy(batch.to_come)[..., None] - output[..., 2:]
    to_come = torch.maximum(quantiles * missed, (quantiles - 1) * missed).sum(-1)
    return (turned * weight).sum(), (will_turn * weight).sum(), (to_come * weight).sum()


def _average_losses(torch: Any, network: Any, batches: Sequence[Batch]) -> list[float]:
    with torch.no_grad():
        batch_losses = [[float(loss) for loss in _compute_losses(torch, network, batch)] for batch in batches]
    return [round(float(loss), 4) for loss in np.mean(batch_losses, axis=0)]
