"""Draws the jobs of a setting: everything by chance about a job is drawn here, once, and before anything runs.

Each quantity has its own stream of the seed. So all schedulers and rules meet the same jobs with the same evals, and
worlds that differ in one number are compared in pairs.
"""

from __future__ import annotations

from itertools import count

import numpy as np
from numpy.typing import NDArray

from evalstop_lab.simulator import curves
from evalstop_lab.simulator.hidden import Hidden
from evalstop_lab.simulator.jobs import Floats, Integers, Job, Kind, Workload
from evalstop_lab.simulator.setting import Setting

_STREAMS = ("gaps", "kinds", "sizes", "hours", "estimates", "tenants", "hacking", "peaks", "noise", "proxy", "loss")
_DIPS = len(_STREAMS)


def draw(setting: Setting, seed: int) -> tuple[Workload, Hidden]:
    """The jobs of this seed and the truth about them."""
    rngs = {name: np.random.default_rng([seed, stream]) for stream, name in zip(count(), _STREAMS)}
    n = setting.jobs
    offered = list(setting.offered.items())
    shares = np.array([item.share for _, item in offered])
    kinds = np.searchsorted(np.cumsum(shares / shares.sum()), rngs["kinds"].random(n), side="right")
    kinds = np.minimum(kinds, len(offered) - 1)
    gpus = _sizes(setting, kinds, rngs["sizes"].random(n))
    medians = np.array([item.median_hours for _, item in offered])[kinds]
    plan = medians * np.exp(setting.duration_sd * rngs["hours"].standard_normal(n))
    estimates = plan * np.exp(setting.estimate_sd * rngs["estimates"].standard_normal(n))
    submitted = np.cumsum(rngs["gaps"].exponential(mean_gap_hours(setting), n))
    tenants = rngs["tenants"].integers(setting.tenants, size=n)
    hidden = _truth(setting, seed, kinds == _place(setting, Kind.RLHF), rngs)
    t = np.arange(1, setting.evals + 1) / setting.evals
    shape = (n, setting.evals)
    gold = hidden.gold + setting.noise_sd * rngs["noise"].standard_normal(shape)
    proxy = t + setting.noise_sd / setting.gain * rngs["proxy"].standard_normal(shape)
    loss = np.exp(-2 * t) + setting.loss_noise * rngs["loss"].standard_normal(shape)
    hours = plan * (1 + setting.evals * setting.eval_share)
    jobs = tuple(
        Job(number, tenant, offered[kind][0], at, size, length, estimate, setting.evals, tuple(losses))
        for number, (tenant, kind, at, size, length, estimate, losses) in enumerate(
            zip(
                tenants.tolist(),
                kinds.tolist(),
                submitted.tolist(),
                gpus.tolist(),
                hours.tolist(),
                estimates.tolist(),
                loss.tolist(),
                strict=True,
            )
        )
    )
    return Workload(jobs, gold, proxy, plan * setting.eval_share), hidden


def mean_gap_hours(setting: Setting) -> float:
    """The mean time between two jobs at which they ask for `load` of the cluster."""
    shares = sum(item.share for item in setting.offered.values())
    gpu_hours = sum(
        item.share / shares * item.median_hours * sum(size * part for size, part in item.sizes)
        for item in setting.offered.values()
    ) * np.exp(setting.duration_sd**2 / 2)
    return float(gpu_hours / (setting.gpus * setting.load))


def _place(setting: Setting, kind: Kind) -> int:
    return list(setting.offered).index(kind) if kind in setting.offered else -1


def _sizes(setting: Setting, kinds: Integers, chance: Floats) -> Integers:
    gpus = np.zeros(len(kinds), dtype=np.int64)
    for place, item in enumerate(setting.offered.values()):
        sizes, parts = zip(*item.sizes, strict=True)
        of_kind = kinds == place
        found = np.searchsorted(np.cumsum(parts) / sum(parts), chance[of_kind], side="right")
        gpus[of_kind] = np.array(sizes)[np.minimum(found, len(sizes) - 1)]
    return gpus


def _truth(setting: Setting, seed: int, rlhf: NDArray[np.bool_], rngs: dict[str, np.random.Generator]) -> Hidden:
    n = len(rlhf)
    hacking = rlhf & (rngs["hacking"].random(n) < setting.hacking_share)
    low, high = setting.peaks
    peaks = np.where(hacking, low + (high - low) * rngs["peaks"].random(n), 1.0)
    t = np.broadcast_to(np.arange(1, setting.evals + 1) / setting.evals, (n, setting.evals))
    gold = curves.healthy(t, setting.healthy_rate)
    gold[hacking] = curves.HACKING[setting.curve](t[hacking], peaks[hacking, None], setting.drop)
    dip_rng = np.random.default_rng([seed, _DIPS])
    for job in np.flatnonzero(~hacking & (dip_rng.random(n) < setting.healthy_dip_prob)).tolist():
        gold[job] = curves.dipping(setting.evals, (seed, _DIPS, job))
    gold = setting.start + setting.gain * gold
    best = np.where(hacking, setting.start + setting.gain, gold.max(axis=1))
    return Hidden(hacking, peaks, gold, best, setting.gain)
