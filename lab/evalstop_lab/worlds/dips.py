"""Healthy curves with dips that recover.

The length of a dip is a share of the run before it, because late interruptions take longer to recover from. In some
families the proxy dips too, because both have the same cause; in others it never or only sometimes does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from evalstop_lab.worlds.curves import Curve, draw_saturation, sudden_drop, u_shape, v_shape
from evalstop_lab.worlds.healthy import add_proxy_and_kl, draw_late_jump, draw_plateau, draw_saturate, draw_stairs
from evalstop_lab.worlds.truth import Floats

SHORTEST_EVALS = 3


def draw_curriculum(rng: np.random.Generator, n: int) -> Curve:
    """The task gets harder one to three times: both scores drop at once and recover."""
    base, t = _draw_base(rng, n), np.linspace(0, 1, n)
    loss = np.zeros(n)
    for start in _draw_starts(rng, int(rng.integers(1, 4))):
        end = _draw_end(rng, n, start, 0.05, 0.2)
        loss = np.maximum(loss, rng.uniform(0.1, 0.5) * sudden_drop(t, start, end))
    return _apply_loss(base, loss, common=rng.uniform(0.5, 1.0))


def draw_v_dip(rng: np.random.Generator, n: int) -> Curve:
    base, t = _draw_base(rng, n), np.linspace(0, 1, n)
    loss = np.zeros(n)
    for start in _draw_starts(rng, int(rng.integers(1, 3))):
        end = _draw_end(rng, n, start, 0.05, 0.18)
        bottom = start + rng.uniform(0.3, 0.7) * (end - start)
        loss = np.maximum(loss, rng.uniform(0.1, 0.6) * v_shape(t, start, bottom, end))
    return _apply_loss(base, loss, common=_draw_common_share(rng))


def draw_u_dip(rng: np.random.Generator, n: int) -> Curve:
    base, t = _draw_base(rng, n), np.linspace(0, 1, n)
    (start,) = _draw_starts(rng, 1)
    loss = rng.uniform(0.1, 0.5) * u_shape(t, start, _draw_end(rng, n, start, 0.12, 0.3), rng.uniform(0.1, 0.3))
    return _apply_loss(base, loss, common=_draw_common_share(rng))


def draw_sawtooth(rng: np.random.Generator, n: int) -> Curve:
    """Periodic dips over half of the run or more: a slow fall and a fast rise, or a cosine wave."""
    base, t = _draw_base(rng, n), np.linspace(0, 1, n)
    start, end = rng.uniform(0.15, 0.4), rng.uniform(0.85, 0.95)
    cycles = int(rng.integers(3, 8))
    phase = np.clip((t - start) / (end - start), 0, 1) * cycles % 1.0
    if rng.random() < 0.5:
        turn = rng.uniform(0.5, 0.8)
        wave = np.interp(phase, [0.0, turn, 1.0], [0.0, 1.0, 0.0])
    else:
        wave = (1 - np.cos(2 * np.pi * phase)) / 2
    return _apply_loss(base, rng.uniform(0.08, 0.35) * wave, common=rng.uniform(0.3, 1.0))


def draw_restart(rng: np.random.Generator, n: int) -> Curve:
    """The run crashes and continues from an earlier checkpoint. KL and proxy return to that checkpoint too."""
    when = int(n * rng.uniform(0.25, 0.75))
    lag = max(2, int(when * rng.uniform(0.08, 0.3)))
    index = np.concatenate([np.arange(when), np.arange(when - lag, n - lag)])
    whole = add_proxy_and_kl(rng, draw_saturation(rng, 1.0, 5.0)(np.linspace(0, 1, n)))
    eval_scores = whole.eval_scores[index]
    return Curve(eval_scores / eval_scores.max(), whole.proxy[index], whole.kl[index])


def draw_step_back(rng: np.random.Generator, n: int) -> Curve:
    """A sudden drop, a flat part, then a linear recovery."""
    base, t = _draw_base(rng, n), np.linspace(0, 1, n)
    (start,) = _draw_starts(rng, 1)
    end = _draw_end(rng, n, start, 0.1, 0.25)
    flat = start + rng.uniform(0.2, 0.6) * (end - start)
    shape = np.interp(t, [start, start + 1e-9, flat, end], [0.0, 1.0, 1.0, 0.0], left=0.0, right=0.0)
    return _apply_loss(base, rng.uniform(0.1, 0.5) * shape, common=_draw_common_share(rng))


def draw_swells(rng: np.random.Generator, n: int) -> Curve:
    """Two to four bell-shaped dips of different depth and length, of which later ones are often deeper."""
    base, t = _draw_base(rng, n), np.linspace(0, 1, n)
    loss = np.zeros(n)
    for start in _draw_starts(rng, int(rng.integers(2, 5))):
        end = _draw_end(rng, n, start, 0.06, 0.2)
        inside = np.clip((t - start) / (end - start), 0, 1)
        loss = np.maximum(loss, rng.uniform(0.05, 0.45) * np.sin(np.pi * inside) ** 2)
    return _apply_loss(base, loss, common=_draw_common_share(rng))


def _draw_base(rng: np.random.Generator, n: int) -> Curve:
    """A healthy run without dips; half of them are still improving at the dip."""
    if rng.random() < 0.3:
        return add_proxy_and_kl(rng, draw_saturation(rng, 2.0, 8.0)(np.linspace(0, 1, n)))
    draw: Callable[[np.random.Generator, int], Curve] = (draw_saturate, draw_plateau, draw_stairs, draw_late_jump)[
        int(rng.integers(4))
    ]
    return draw(rng, n)


def _draw_starts(rng: np.random.Generator, count: int) -> list[float]:
    """The starts of the dips, in order, early enough that the last dip ends before the run."""
    edges = np.linspace(0.2, 0.75, count + 1)
    return [float(rng.uniform(low, high)) for low, high in pairwise(edges)]


def _draw_end(rng: np.random.Generator, n: int, start: float, shortest: float, longest: float) -> float:
    """The end of a dip: its length is between these shares of the run before it, and at least `SHORTEST_EVALS`."""
    return float(start + max(rng.uniform(shortest, longest) * start, SHORTEST_EVALS / (n - 1)))


def _draw_common_share(rng: np.random.Generator) -> float:
    """The share of the eval score's loss that the proxy has too: 0 in half of the runs, 0.3 to 1 in the others."""
    return float(rng.uniform(0.3, 1.0)) if rng.random() < 0.5 else 0.0


def _apply_loss(base: Curve, loss: Floats, common: float) -> Curve:
    """Reduce the eval score by the share `loss`, and the proxy by the share `common` of that."""
    return Curve(base.eval_scores * (1 - loss), base.proxy * (1 - common * loss), base.kl)


DIPS: dict[str, Callable[[np.random.Generator, int], Curve]] = {
    "curriculum": draw_curriculum,
    "v_dip": draw_v_dip,
    "u_dip": draw_u_dip,
    "sawtooth": draw_sawtooth,
    "restart": draw_restart,
    "step_back": draw_step_back,
    "swells": draw_swells,
}
