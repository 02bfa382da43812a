"""`evalstop-lab train-posterior`: train the network of the posterior detector on runs drawn from its prior.

Needs PyTorch: `pip install 'evalstop-lab[train]'`. The result is the file that the detector ships (16-bit
integers), and a JSON file with its training parameters and its results on other runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from evalstop_detectors.posterior.features import FEATURES
from evalstop_detectors.posterior.network import HIDDEN, OUTPUTS, WEIGHT_ONE, decode_network
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from evalstop_lab.arguments import positive_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.posterior.batches import Batch, draw_batches
from evalstop_lab.posterior.left_out import measure_false_stops
from evalstop_lab.posterior.picture import draw_picture
from evalstop_lab.posterior.prior import KINDS
from evalstop_lab.report import list_versions

BATCH = 128
DRAWN_AT_ONCE = 2048
RATE = 3e-3
WARMUP_STEPS = 100
WEIGHT_WILL_TURN, WEIGHT_TO_COME = 0.3, 0.15
QUANTILES = (0.1, 0.5, 0.9)
VALIDATION_SEED, VALIDATION_RUNS = 999, 2048
MOST_JUDGED_RUNS = 20_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train-posterior",
        help="train the network of the posterior detector",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--runs", type=positive_number, default=600_000, help="number of runs to draw (default: 600000, an hour)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the runs and the initial weights (default: 1)")
    parser.add_argument(
        "--without", nargs="+", choices=KINDS, default=[], metavar="KIND", help=f"leave out: {', '.join(KINDS)}"
    )
    parser.add_argument("--output", type=Path, default=Path("posterior.int16"), metavar="FILE", help="(%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="only draw 40 runs of the prior into this PNG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.picture is not None:
        draw_picture(args.picture, args.seed)
        return 0
    torch = import_torch(args.seed)
    network = torch.nn.ModuleDict({"gru": torch.nn.GRU(FEATURES, HIDDEN), "head": torch.nn.Linear(HIDDEN, OUTPUTS)})
    started = time.time()
    _train(torch, network, args.runs, args.seed, args.without)
    losses = _average_losses(
        torch, network, draw_batches(np.random.default_rng(VALIDATION_SEED), min(args.runs, VALIDATION_RUNS), BATCH)
    )
    gru, head = network["gru"], network["head"]
    data = encode_weights(gru.weight_ih_l0, gru.bias_ih_l0, gru.weight_hh_l0, gru.bias_hh_l0, head.weight, head.bias)
    args.output.write_bytes(data)
    shares = measure_false_stops(decode_network(data), args.without, min(args.runs // 10, MOST_JUDGED_RUNS))
    report = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "runs": args.runs,
        "seed": args.seed,
        "without": args.without,
        "seconds": round(time.time() - started),
        "validation": dict(zip(("turned", "will_turn", "to_come"), losses, strict=True)),
        "false_stops": {name: asdict(share) for name, share in shares.items()},
        "versions": list_versions() | {"torch": torch.__version__},
    }
    args.output.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    Console().print_json(json.dumps(report))
    return 0


def import_torch(seed: int) -> Any:
    """Import PyTorch with this seed; raises UnusableArguments if it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UnusableArguments("Training needs PyTorch: pip install 'evalstop-lab[train]'.") from error
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    torch.manual_seed(seed)
    return torch


def encode_weights(*arrays: Any) -> bytes:
    """Trained weights as 16-bit integers, as `evalstop_detectors.posterior` reads them."""
    return b"".join(
        np.clip(np.round(array.detach().numpy() * WEIGHT_ONE), -32768, 32767).astype("<i2").tobytes()
        for array in arrays
    )


def _train(torch: Any, network: Any, runs: int, seed: int, without: Sequence[str]) -> None:
    """Train with Adam, with linear warmup for `WARMUP_STEPS` and cosine decay to 0."""
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    rng = np.random.default_rng([seed, 7])
    step, steps = 0, math.ceil(runs / BATCH)
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("training", total=steps, loss="")
        while step < steps:
            for batch in draw_batches(rng, min(runs, DRAWN_AT_ONCE), BATCH, without):
                for group in optimizer.param_groups:
                    warm = min(1.0, step / WARMUP_STEPS)
                    group["lr"] = RATE * warm * (0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps))) + 1e-5
                optimizer.zero_grad()
                turned, will_turn, to_come = _compute_losses(torch, network, batch)
                (turned + WEIGHT_WILL_TURN * will_turn + WEIGHT_TO_COME * to_come).backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                step += 1
                progress.update(task, completed=step, loss=f"loss {float(turned.detach()):.3f}")


def _compute_losses(torch: Any, network: Any, batch: Batch) -> tuple[Any, Any, Any]:
    """Cross-entropy of `turned for good` and of `will turn`, and the pinball loss of the remaining gain; each a mean
    with weights of the run's length to the power 0.4."""
    weight = torch.from_numpy(batch.weight)
    hidden, _ = network["gru"](torch.from_numpy(batch.features))
    output = network["head"](hidden)
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    turned = cross_entropy(output[..., 0], torch.from_numpy(batch.turned_for_good), reduction="none")
    will_turn = cross_entropy(output[..., 1], torch.from_numpy(batch.will_turn), reduction="none")
    quantiles = torch.tensor(QUANTILES)
    missed = torch.from_numpy(batch.to_come)[..., None] - output[..., 2:]
    to_come = torch.maximum(quantiles * missed, (quantiles - 1) * missed).sum(-1)
    total = weight.sum()
    return (turned * weight).sum() / total, (will_turn * weight).sum() / total, (to_come * weight).sum() / total


def _average_losses(torch: Any, network: Any, batches: Sequence[Batch]) -> list[float]:
    with torch.no_grad():
        batch_losses = [[float(loss) for loss in _compute_losses(torch, network, batch)] for batch in batches]
    return [round(float(loss), 4) for loss in np.mean(batch_losses, axis=0)]
