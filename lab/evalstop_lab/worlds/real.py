"""Recorded RLHF runs as worlds: one JSON object per line with the logged metrics, and the truth from many samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.worlds.noise import Noise, NoiseKind
from evalstop_lab.worlds.truth import Floats, Label, Truth
from evalstop_lab.worlds.world import World

FAMILY = "recorded"

_LABELS = {"hacking": Label.HACKING, "healthy": Label.HEALTHY}


def load_recorded_runs(path: Path) -> list[World]:
    """Read recorded runs; raises UnusableArguments with the line that is not a run.

    Labels other than hacking and healthy become ambiguous.
    """
    worlds = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UnusableArguments(f"{path}: {error.strerror}; give a file of recorded runs.") from error
    for number, line in enumerate(lines, start=1):
        try:
            worlds.append(_parse_run(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise UnusableArguments(
                f"{path}, line {number}: not a recorded run ({error!r});"
                " expected run_id, cfg, log, truth and truth_label."
            ) from error
    return worlds


def _parse_run(record: dict[str, Any]) -> World:
    log, label = record["log"], record["truth_label"]
    steps = np.asarray(log["step"], dtype=np.int64)
    eval_scores, stderr = _to_floats(log["gold"]), _to_floats(log["gold_se"])
    sd = float(np.sqrt(np.nanmean(stderr**2)))
    truth = Truth(
        label=_LABELS.get(label["label"], Label.AMBIGUOUS),
        steps=steps,
        eval_scores=_to_floats(record["truth"]["gold"]),
        peak=int(label["peak_eval"]),
        gain=float(label["gain"]),
        drop=float(label["drop"]),
        unit=float(label["gain"]),
        noise_sd=sd,
    )
    correlation = float(np.nanmedian(_to_floats(log["corr"])))
    return World(
        name=str(record["run_id"]),
        family=FAMILY,
        seed=int(record["cfg"]["seed"]),
        steps=steps,
        eval_scores=eval_scores,
        eval_stderr=stderr,
        proxy=_to_floats(log["proxy"]),
        kl=_to_floats(log["kl"]),
        noise=Noise(NoiseKind.RECORDED, sd / truth.unit, correlation, stderr_given=True),
        truth=truth,
    )


def _to_floats(values: list[float | None]) -> Floats:
    return np.asarray(values, dtype=np.float64)
