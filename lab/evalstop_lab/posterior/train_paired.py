"""`evalstop-lab train-paired`: train how the posterior detector uses paired evaluations.

Runs are drawn from the network's prior, request paired evaluations at random thresholds and distances, and get answers
of random precision. At every eval after an answer a layer of 32 units learns what to add to the network's log odds
that the run has turned. Needs PyTorch: `pip install 'evalstop-lab[train]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
from evalstop_detectors.posterior.features import FIRST_FEATURES, MANY, FeatureState, advance
from evalstop_detectors.posterior.network import FEATURE_ONE as WHOLE
from evalstop_detectors.posterior.network import HIDDEN, load_network, round_features
from evalstop_detectors.posterior.paired import PAIRED_FEATURES, UNITS, Answer, describe_answer
from numpy.typing import NDArray
from rich.console import Console

from evalstop_lab.arguments import positive_number
from evalstop_lab.posterior.train import encode_weights, import_torch, list_inputs
from evalstop_lab.sweep import sweep
from evalstop_lab.worlds.prior import DrawnRun, draw_run

TOGETHER, DRAWN_AT_ONCE = 64, 1024
BATCH, EPOCHS, RATE = 2048, 8, 3e-3
LONG, LONG_KEPT = 400, 0.3  # runs longer than this many evals yield most examples: this share of them is kept
PRECISION = (0.1, 1.2)  # standard error of an answer, in those of an eval
VALIDATION_SHARE = 8  # one part in so many
Numbers = NDArray[np.float64]


class Examples(NamedTuple):
    """Rows of features, the network's log odds, whether the run has turned, and how much each row counts."""

    features: NDArray[np.float32]
    log_odds: NDArray[np.float32]
    turned: NDArray[np.float32]
    weight: NDArray[np.float32]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train-paired",
        help="train how the posterior detector uses paired evaluations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="gru-1", help="the network to extend (default: gru-1)")
    parser.add_argument(
        "--runs", type=positive_number, default=40_960, help="number of runs to draw (default: 40960, 5 minutes)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the runs and the initial weights (default: 1)")
    parser.add_argument("--output", type=Path, default=Path("posterior.paired.int16"), metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    torch = import_torch(args.seed)
    parts = math.ceil(args.runs / DRAWN_AT_ONCE)
    drawn = sweep(
        draw_examples, [(args.model, args.seed, part) for part in range(parts)], "drawing", joblib.cpu_count(), chunk=1
    )
    validation_parts = max(1, parts // VALIDATION_SHARE)
    layer = _train(torch, join_examples(drawn[validation_parts:] or drawn))
    losses = [_compute_loss(torch, item, join_examples(drawn[:validation_parts])) for item in (None, layer)]
    data = encode_weights(layer[0].weight, layer[0].bias, layer[2].weight, layer[2].bias)
    args.output.write_bytes(data)
    validation = {"without": losses[0], "with": losses[1]}
    Console().print_json(json.dumps({"sha256": hashlib.sha256(data).hexdigest(), "validation": validation}))
    return 0


def join_examples(parts: Sequence[Examples]) -> Examples:
    return Examples(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def draw_examples(recipe: tuple[str, int, int]) -> Examples:
    """Draw runs, by model, seed and part, and the examples that they give."""
    model, seed, part = recipe
    rng = np.random.default_rng([seed, part, 77])
    runs: list[DrawnRun] = []
    while len(runs) < DRAWN_AT_ONCE:
        drawn = draw_run(rng)
        if len(drawn.scores) <= LONG or rng.random() < LONG_KEPT:
            runs.append(drawn)
    runs.sort(key=lambda item: len(item.scores))
    groups = [runs[begin : begin + TOGETHER] for begin in range(0, len(runs), TOGETHER)]
    with np.errstate(over="ignore"):
        return join_examples([_follow_runs(model, rng, group) for group in groups])


def _follow_runs(model: str, rng: np.random.Generator, runs: Sequence[DrawnRun]) -> Examples:
    """Let runs request evaluations as the detector does, each at its own threshold, and record its input after each
    answer."""
    count, longest = len(runs), max(len(item.scores) for item in runs)
    lengths = np.array([len(item.scores) for item in runs])
    truth = np.array([np.append(r.truth, np.full(longest - len(r.truth), r.truth[-1])) for r in runs]).T
    network, state, hidden = load_network(model), FeatureState(), np.zeros((HIDDEN, count))
    threshold, apart, most = rng.uniform(-2.5, 2.5, count), rng.uniform(1.2, 2.2, count), rng.integers(1, 6, count)
    stderr = np.exp(rng.uniform(math.log(PRECISION[0]), math.log(PRECISION[1]), count)) * np.array(
        [_estimate_noise(item) for item in runs]
    )
    requests, requested_since, none = np.zeros(count), np.zeros(count), np.zeros(count)
    answer, answered = Answer(none, none + 1.0, none, none, none, none), np.zeros(count, bool)
    examples: list[tuple[Numbers, ...]] = []
    for at, inputs in enumerate(list_inputs(runs)):
        state, features = advance(MANY, state, inputs)
        rows = np.stack([np.broadcast_to(item, (count,)) for item in features])
        seen = round_features(rows)
        hidden = network.step(hidden, seen)
        log_odds = np.asarray(network.read(hidden, seen)[0][0])
        since = np.broadcast_to(state.since, (count,))
        requested_since, answered = np.where(since > 0, requested_since, 0.0), answered & (since > 0)
        going_on = (at < lengths - 1) & (since > 0) & (at >= 2)
        asks = going_on & (log_odds > threshold) & (requests < most) & (since >= apart * requested_since)
        if asks.any():
            best = (at - since).astype(int)
            run_indices = np.arange(count)
            fall = truth[best, run_indices] - truth[at, run_indices] + stderr * rng.standard_normal(count)
            new = Answer(
                fall, stderr, state.best - state.level, since, np.where(answered, answer.fall, 0.0), answered * 1.0
            )
            answer = Answer(*(np.where(asks, a, b) for a, b in zip(_list_parts(new), _list_parts(answer), strict=True)))
            requests, requested_since, answered = (
                requests + asks,
                np.where(asks, since, requested_since),
                answered | asks,
            )
        indices = np.flatnonzero(going_on & answered)
        if len(indices):
            answer_features = np.stack(
                [np.broadcast_to(item, (count,)) for item in describe_answer(MANY, state, answer)]
            )
            turned = np.array([runs[index].turned and at > runs[index].peak for index in indices.tolist()])
            both = round_features(np.concatenate([rows[:FIRST_FEATURES], answer_features])[:, indices]).T / WHOLE
            examples.append((both, log_odds[indices], turned, lengths[indices] ** -0.6))
    if not examples:
        return Examples(np.zeros((0, FIRST_FEATURES + PAIRED_FEATURES), np.float32), *(np.zeros(0, np.float32),) * 3)
    return Examples(*(np.concatenate(part).astype(np.float32) for part in zip(*examples, strict=True)))


def _list_parts(answer: Answer) -> tuple[Any, ...]:
    return answer.fall, answer.stderr, answer.curve_fall, answer.since, answer.before, answer.has_before


def _estimate_noise(item: DrawnRun) -> float:
    """The usual error of an eval: of differences, so that a changed grader does not count."""
    return max(float(np.median(np.abs(np.diff(item.scores - item.truth)))) / 0.954, 1e-12)


def _build_layer(torch: Any) -> Any:
    inputs = FIRST_FEATURES + PAIRED_FEATURES
    layer = torch.nn.Sequential(torch.nn.Linear(inputs, UNITS), torch.nn.Tanh(), torch.nn.Linear(UNITS, 1))
    with torch.no_grad():
        layer[2].weight *= 0.1
        layer[2].bias *= 0.0
    return layer


def _train(torch: Any, examples: Examples) -> Any:
    """Train with AdamW and cosine decay to 0; each row has the weight of its run's length to the power -0.6."""
    layer = _build_layer(torch)
    optimizer = torch.optim.AdamW(layer.parameters(), RATE, weight_decay=1e-4)
    features, log_odds, turned, weight = (torch.from_numpy(item) for item in examples)
    count, done = len(turned), 0
    steps = EPOCHS * max(1, count // BATCH)
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    for _ in range(EPOCHS):
        order = torch.randperm(count)
        for begin in range(0, max(1, count - BATCH), BATCH):
            rows = order[begin : begin + BATCH]
            for group in optimizer.param_groups:
                group["lr"] = RATE * (0.5 + 0.5 * math.cos(math.pi * min(1.0, done / steps)))
            loss = cross_entropy(log_odds[rows] + layer(features[rows])[:, 0], turned[rows], weight=weight[rows])
            optimizer.zero_grad()
            (loss / weight[rows].mean()).backward()
            optimizer.step()
            done += 1
    return layer


def _compute_loss(torch: Any, layer: Any, examples: Examples) -> float:
    """The cross-entropy with this layer, or without any."""
    features, log_odds, turned, weight = (torch.from_numpy(item) for item in examples)
    with torch.no_grad():
        added = layer(features)[:, 0] if layer is not None else 0.0
        cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
        return round(float(cross_entropy(log_odds + added, turned, weight=weight) / weight.mean()), 4)
