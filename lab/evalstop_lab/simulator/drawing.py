"""Draws the jobs of a setting: all random properties of a job are drawn here, once, before anything runs.

Each quantity has its own random stream, so all schedulers and rules get the same jobs with the same evals, and worlds
that differ in one number are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalstop_lab.simulator.jobs import Floats, Integers, Job, Kind, Workload
from evalstop_lab.simulator.setting import Setting
from evalstop_lab.simulator.stopping import Stops


@dataclass(frozen=True, eq=False)
class Hidden:
    """The truth, by job.

    `peaks`: the share of its steps, and of its hours, at which the eval score is highest; 1 for healthy jobs.
    `eval_scores`: noiseless, at each eval.
    """

    hacking: NDArray[np.bool_]
    peaks: Floats
    eval_scores: Floats


def stop_at_peaks(workload: Workload, hidden: Hidden) -> tuple[Stops, Floats]:
    """The stops of the oracle, and the hours after which each job ends: exactly at the peak, between two evals.

    `Stops.after` is the first eval after the peak.
    """
    evals = hidden.eval_scores.shape[1]
    after = np.where(hidden.hacking, np.ceil(hidden.peaks * evals), 0).astype(np.int64)
    return Stops(after), workload.hours * hidden.peaks


_STREAMS = ("gaps", "kinds", "sizes", "hours", "estimates", "", "hacking", "peaks", "noise", "proxy", "loss")
"""Each quantity has the random stream of its place; with another one all figures change."""


def draw_jobs(setting: Setting, seed: int) -> tuple[Workload, Hidden]:
    """The jobs of this seed, by submission, and the truth about them."""
    n = setting.jobs
    kinds = _draw_kinds(setting, seed)
    medians = np.array([setting.offered[kind].median_hours for kind in kinds])
    hours = medians * np.exp(setting.duration_sd * _rng(seed, "hours").standard_normal(n))
    estimates = hours * np.exp(setting.estimate_sd * _rng(seed, "estimates").standard_normal(n))
    submitted = np.cumsum(_rng(seed, "gaps").exponential(_compute_gap_hours(setting), n))
    gpus = _draw_sizes(setting, kinds, _rng(seed, "sizes").random(n))
    hidden = _draw_truth(setting, seed, np.array([kind is Kind.RLHF for kind in kinds], dtype=bool))
    t = np.arange(1, setting.evals + 1) / setting.evals
    shape = (n, setting.evals)
    eval_scores = hidden.eval_scores + setting.noise_sd * _rng(seed, "noise").standard_normal(shape)
    proxy = t + setting.noise_sd / setting.gain * _rng(seed, "proxy").standard_normal(shape)
    loss = np.exp(-2 * t) + setting.loss_noise * _rng(seed, "loss").standard_normal(shape)
    columns = zip(kinds, *(item.tolist() for item in (submitted, gpus, hours, estimates, loss)), strict=True)
    jobs = tuple(
        Job(number, kind, at, size, length, estimate, setting.evals, tuple(losses))
        for number, (kind, at, size, length, estimate, losses) in enumerate(columns)
    )
    return Workload(jobs, eval_scores, proxy), hidden


def _draw_kinds(setting: Setting, seed: int) -> tuple[Kind, ...]:
    shares = np.cumsum([item.share for item in setting.offered.values()])
    places = np.searchsorted(shares / shares[-1], _rng(seed, "kinds").random(setting.jobs), side="right")
    return tuple(list(setting.offered)[place] for place in places.tolist())


def _compute_gap_hours(setting: Setting) -> float:
    """The mean time between two submissions at which the load is `setting.load`."""
    shares = sum(item.share for item in setting.offered.values())
    gpu_hours = sum(
        item.share / shares * item.median_hours * sum(size * part for size, part in item.sizes)
        for item in setting.offered.values()
    ) * np.exp(setting.duration_sd**2 / 2)
    return float(gpu_hours / (setting.gpus * setting.load))


def _draw_sizes(setting: Setting, kinds: Sequence[Kind], uniform: Floats) -> Integers:
    gpus = np.zeros(len(kinds), dtype=np.int64)
    for kind, item in setting.offered.items():
        sizes, parts = zip(*item.sizes, strict=True)
        of_kind = np.array([other is kind for other in kinds], dtype=bool)
        shares = np.cumsum(parts)
        gpus[of_kind] = np.array(sizes)[np.searchsorted(shares / shares[-1], uniform[of_kind], side="right")]
    return gpus


def _draw_truth(setting: Setting, seed: int, rlhf: NDArray[np.bool_]) -> Hidden:
    n = len(rlhf)
    hacking = rlhf & (_rng(seed, "hacking").random(n) < setting.hacking_share)
    low, high = setting.peaks
    peaks = np.where(hacking, low + (high - low) * _rng(seed, "peaks").random(n), 1.0)
    t = np.broadcast_to(np.arange(1, setting.evals + 1) / setting.evals, (n, setting.evals))
    eval_scores = np.asarray((1 - np.exp(-setting.healthy_rate * t)) / (1 - np.exp(-setting.healthy_rate)))
    peak = peaks[hacking, None]
    fall = 1 - setting.drop * (t[hacking] - peak) / (1 - peak)
    eval_scores[hacking] = np.where(t[hacking] < peak, t[hacking] / peak, fall)
    eval_scores = setting.start + setting.gain * eval_scores
    return Hidden(hacking, peaks, eval_scores)


def _rng(seed: int, stream: str) -> np.random.Generator:
    return np.random.default_rng([seed, _STREAMS.index(stream)])
