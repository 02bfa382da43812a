"""`python -m evalstop_lab.worlds.example_runs RECORDED OUT`: writes the example runs of `evalstop demo-data`.

The service ships them as one compressed file, because it cannot import the lab: drawn runs and recorded ones, with
rounded values. The same seed and the same recordings produce the same file.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evalstop_lab.worlds import Label, World, draw_world, load_recorded_runs, plan_worlds
from evalstop_lab.worlds.truth import Floats

SEED = 20_260
DRAWN_RUNS = 160
LENGTHS = (24, 32, 40, 60)
DIGITS = 4


def encode_runs(worlds: Sequence[World]) -> bytes:
    """Encode the runs as gzipped JSON, the format that the service reads; equal runs give equal bytes."""
    document = {"runs": [encode_run(world) for world in worlds]}
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)


def encode_run(world: World) -> dict[str, Any]:
    """One run: the measured values at each step, and whether it turned; null if missing or ambiguous."""
    turned = {Label.HACKING: True, Label.HEALTHY: False}.get(world.truth.label)
    return {
        "family": world.family,
        "seed": world.seed,
        "turned": turned,
        "peak_step": world.truth.peak_step if turned else None,
        "steps": world.steps.tolist(),
        "gold": _round_values(world.eval_scores),
        "stderr": None if world.eval_stderr is None else _round_values(world.eval_stderr),
        "proxy": _round_values(world.proxy),
        "kl": _round_values(world.kl),
    }


def draw_runs(count: int) -> list[World]:
    """Draw `count` runs of all families, with 24 to 60 evals; half of them turn."""
    return [
        draw_world(family, run_seed, length=LENGTHS[index % len(LENGTHS)])
        for index, (family, run_seed) in enumerate(plan_worlds(count, seed0=SEED))
    ]


def _round_values(values: Floats) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values]


if __name__ == "__main__":
    recorded, out = map(Path, sys.argv[1:])
    out.write_bytes(encode_runs([*draw_runs(DRAWN_RUNS), *load_recorded_runs(recorded)]))
