"""Curves of the eval score over a plan: 0 at the start; hacking jobs peak at 1 and fall, healthy jobs end near 1.

`t` has a row per job and a column per eval; `peak` is a column with the share of the plan at which the job turns.

Source      Gao et al. (arXiv 2210.10760): under reinforcement learning, if d grows linearly and u = t / peak, the eval
            score is u (1 - ln u).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evalstop_lab.simulator.jobs import Floats
from evalstop_lab.worlds import FAMILIES

Shape = Callable[[Floats, Floats, float], Floats]

DIPS = ("curriculum", "v_dip", "u_dip", "sawtooth")


def tent(t: Floats, peak: Floats, drop: float) -> Floats:
    """A linear rise, then a linear fall."""
    return np.where(t < peak, t / peak, 1 - drop * (t - peak) / (1 - peak))


def gao_rl(t: Floats, peak: Floats, drop: float) -> Floats:
    """Gao's form for reinforcement learning, which itself determines how far the eval score falls."""
    u = t / peak
    return np.asarray(u * (1 - np.log(u)))


def grow_healthy(t: Floats, rate: float) -> Floats:
    """Growth that slows down but never stops."""
    return np.asarray((1 - np.exp(-rate * t)) / (1 - np.exp(-rate)))


def draw_dips(evals: int, seed: tuple[int, ...]) -> Floats:
    """One healthy job with dips that recover, drawn from the families of the detection benchmark."""
    rng = np.random.default_rng(seed)
    family = DIPS[int(rng.integers(len(DIPS)))]
    return FAMILIES[family].draw(rng, evals).eval_scores


HACKING: dict[str, Shape] = {"tent": tent, "gao_rl": gao_rl}
