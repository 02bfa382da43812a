"""Draws the jobs of a setting: all random properties of a job are drawn here, once, before anything runs.

Each quantity has its own random stream, so all schedulers and rules get the same jobs with the same evals, and worlds
that differ in one number are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evalstop_lab.simulator.engine import Cluster
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Kind, Workload


@dataclass(frozen=True)
class Offered:
    """Jobs of one kind: their share of all jobs, the median of their hours, and the shares of gang sizes."""

    share: float
    median_hours: float
    sizes: tuple[tuple[int, float], ...]


OFFERED: Mapping[Kind, Offered] = {
    Kind.RLHF: Offered(0.8, 6.0, ((2, 0.2), (4, 0.4), (8, 0.3), (16, 0.1))),
    Kind.DPO: Offered(0.1, 3.0, ((2, 0.4), (4, 0.4), (8, 0.2))),
    Kind.LORA: Offered(0.1, 1.5, ((1, 0.5), (2, 0.3), (4, 0.2))),
}


@dataclass(frozen=True)
class Setting:
    """A world from which the jobs of `OFFERED` are drawn; shares are between 0 and 1.

    `load`: the ratio of requested to available GPU-hours. `duration_sd`, `estimate_sd`: of the
    logarithm. `hacking_share`: of the RLHF jobs. `peaks`: the range of peaks of hacking jobs, as shares of their plans.
    `drop`: the fall of the eval score from its peak to the end of the plan, as a share of its gain. `healthy_rate`: the
    rate at which a healthy eval score saturates, per plan. `noise_sd`: of one eval, on the scale of the eval
    score, which rises from `start` by `gain`. `measured`: the range of jobs, by submission, whose times are reported,
    without the start, when the cluster is empty, and the end, when no more jobs arrive.
    """

    jobs: int = 1500
    cluster: Cluster = field(default_factory=Cluster)
    load: float = 0.86
    duration_sd: float = 0.8
    estimate_sd: float = 0.4
    hacking_share: float = 0.5
    peaks: tuple[float, float] = (0.5, 0.7)
    drop: float = 0.7
    healthy_rate: float = 3.5
    evals: int = 10
    noise_sd: float = 0.03
    gain: float = 0.6
    start: float = 0.2
    loss_noise: float = 0.05
    measured: tuple[float, float] = (0.2, 0.9)


PAPER = Setting()
"""The paper states 64 GPUs, 80 % RLHF jobs and k = 3.

On seeds 0 to 9 these were fitted to its table: `healthy_rate` (to false stops), `drop` (to recall and waste), `load`
(to times) and `loss_noise` (to loss plateau). The rest was chosen.
"""


@dataclass(frozen=True, eq=False)
class Hidden:
    """The truth, by job.

    `peaks`: the share of its steps, and of its hours, at which the eval score is highest; 1 for healthy jobs.
    `eval_scores`: noiseless, at each eval.
    """

    hacking: NDArray[np.bool_]
    peaks: Floats
    eval_scores: Floats


def stop_at_peaks(workload: Workload, hidden: Hidden) -> tuple[Integers, Floats]:
    """The oracle's stops, and the hours after which each job ends: exactly at the peak, between two evals."""
    evals = hidden.eval_scores.shape[1]
    after = np.where(hidden.hacking, np.ceil(hidden.peaks * evals), 0).astype(np.int64)
    return after, workload.hours * hidden.peaks


_STREAMS = ("gaps", "kinds", "sizes", "hours", "estimates", "", "hacking", "peaks", "noise", "proxy", "loss")
"""Each quantity has the random stream of its place; with another one all figures change."""


def draw_jobs(setting: Setting, seed: int) -> tuple[Workload, Hidden]:
    """The jobs of this seed, by submission, and the truth about them."""
    n = setting.jobs
    places = _choose([item.share for item in OFFERED.values()], _rng(seed, "kinds").random(n))
    kinds = [list(OFFERED)[place] for place in places.tolist()]
    medians = np.array([OFFERED[kind].median_hours for kind in kinds])
    hours = medians * np.exp(setting.duration_sd * _rng(seed, "hours").standard_normal(n))
    estimates = hours * np.exp(setting.estimate_sd * _rng(seed, "estimates").standard_normal(n))
    submitted = np.cumsum(_rng(seed, "gaps").exponential(_compute_gap_hours(setting), n))
    gpus = _draw_sizes(kinds, _rng(seed, "sizes").random(n))
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


def _compute_gap_hours(setting: Setting) -> float:
    """The mean time between two submissions at which the load is `setting.load`."""
    shares = sum(item.share for item in OFFERED.values())
    gpu_hours = sum(
        item.share / shares * item.median_hours * sum(size * part for size, part in item.sizes)
        for item in OFFERED.values()
    ) * np.exp(setting.duration_sd**2 / 2)
    return float(gpu_hours / (setting.cluster.gpus * setting.load))


def _draw_sizes(kinds: Sequence[Kind], uniform: Floats) -> Integers:
    gpus = np.zeros(len(kinds), dtype=np.int64)
    for kind, item in OFFERED.items():
        sizes, parts = zip(*item.sizes, strict=True)
        of_kind = np.array([other is kind for other in kinds], dtype=bool)
        gpus[of_kind] = np.array(sizes)[_choose(parts, uniform[of_kind])]
    return gpus


def _choose(shares: Sequence[float], uniform: Floats) -> Integers:
    """Indices of these shares, in proportion to them."""
    sums = np.cumsum(shares)
    return np.searchsorted(sums / sums[-1], uniform, side="right")


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
