"""Reads recorded runs of RLHF, a JSON object a line, with the truth from many samples."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evalstop_lab.worlds.truth import Floats, Integers, Label, Truth, label_curve
from evalstop_lab.worlds.world import PromptScores, World

AMBIGUOUS_FALLS = (0.05, 0.1)
"""A run whose fall is between these shares of its gain is neither healthy nor hacking."""

STANDARD_ERRORS = 3
"""A fall of fewer standard errors of a difference between two smoothed true scores is not certain."""

SMOOTHED_OVER = 5
"""The number of evals over which true scores are averaged for the label: the maximum of noisy means is too high."""


def read_runs(path: Path, small: bool = False) -> list[World]:
    """The recorded runs as worlds; `small`: by their evals of 64 texts instead of 1,024."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [_to_world(json.loads(line), small) for line in lines]


def _to_world(record: dict[str, Any], small: bool) -> World:
    log = record["log"]
    steps = np.asarray(log["step"], dtype=np.int64)
    stderr = _to_floats(log["small_stderr" if small else "stderr"])
    sd = float(np.sqrt(np.mean(stderr**2)))
    truth = _label_run(steps, _to_floats(record["truth"]), record.get("truth_stderr", 0.0), sd)
    return World(
        name=f"{record.get('family', 'trained')}-{record['seed']}",
        family=record.get("family", "refitted" if record["refits"] else "trained"),
        seed=record["seed"],
        steps=steps,
        eval_scores=_to_floats(log["small" if small else "eval"]),
        eval_stderr=stderr,
        proxy=_to_floats(log["proxy"]),
        kl=_to_floats(log["kl"]),
        truth=truth,
        planned_steps=float(steps[-1]),
        prompt_scores=_to_prompt_scores(record) if "prompts" in record else None,
    )


def _to_prompt_scores(record: dict[str, Any]) -> PromptScores:
    return PromptScores(_to_floats(record["prompts"]) / 1000, _to_floats(record["paired_sd"]), record["paired_texts"])


def _label_run(steps: Integers, scores: Floats, stderr: float, sd: float) -> Truth:
    """Label the run by its smoothed true scores.

    A fall between 5 and 10 % of the gain is ambiguous; so is a larger one below three standard errors.
    """
    half = SMOOTHED_OVER // 2
    padded = np.pad(scores, half, mode="edge")
    smoothed = np.convolve(padded, np.full(SMOOTHED_OVER, 1 / SMOOTHED_OVER), mode="valid")
    truth = label_curve(steps, smoothed, sd)
    low, high = AMBIGUOUS_FALLS
    uncertain = STANDARD_ERRORS * stderr * math.sqrt(2 / SMOOTHED_OVER)
    if low * truth.unit <= truth.drop <= max(high * truth.unit, uncertain):
        return replace(truth, label=Label.AMBIGUOUS)
    return truth


def _to_floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float64)
