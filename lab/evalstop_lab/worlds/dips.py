"""Healthy curves with dips that recover.

How long a dip lasts is a share of the run before it: what interrupts learning late takes longer to be made good. In
some families the proxy dips too, because both suffer from one cause; in others it always or sometimes keeps still.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from evalstop_lab.worlds.curves import Curve, saturating, sudden, u_shape, v_shape
from evalstop_lab.worlds.healthy import companions, late_jump, plateau, saturate, stairs
from evalstop_lab.worlds.truth import Floats

SHORTEST_EVALS = 3


def curriculum(rng: np.random.Generator, n: int) -> Curve:
    """One to three times the task gets harder: both scores fall at once and are learned back."""
    base, t = _base(rng, n), np.linspace(0, 1, n)
    loss = np.zeros(n)
    for start in _starts(rng, int(rng.integers(1, 4))):
        end = _end(rng, n, start, 0.05, 0.2)
        loss = np.maximum(loss, rng.uniform(0.1, 0.5) * sudden(t, start, end))
    return _dipped(base, loss, common=rng.uniform(0.5, 1.0))


def v_dip(rng: np.random.Generator, n: int) -> Curve:
    """One or two falls that turn at once."""
    base, t = _base(rng, n), np.linspace(0, 1, n)
    loss = np.zeros(n)
    for start in _starts(rng, int(rng.integers(1, 3))):
        end = _end(rng, n, start, 0.05, 0.18)
        bottom = start + rng.uniform(0.3, 0.7) * (end - start)
        loss = np.maximum(loss, rng.uniform(0.1, 0.6) * v_shape(t, start, bottom, end))
    return _dipped(base, loss, common=_sometimes(rng))


def u_dip(rng: np.random.Generator, n: int) -> Curve:
    """One fall that stays down for long."""
    base, t = _base(rng, n), np.linspace(0, 1, n)
    (start,) = _starts(rng, 1)
    loss = rng.uniform(0.1, 0.5) * u_shape(t, start, _end(rng, n, start, 0.12, 0.3), rng.uniform(0.1, 0.3))
    return _dipped(base, loss, common=_sometimes(rng))


def sawtooth(rng: np.random.Generator, n: int) -> Curve:
    """Falls and returns in turn for half the run or more: slow down and fast up, or as a wave."""
    base, t = _base(rng, n), np.linspace(0, 1, n)
    start, end = rng.uniform(0.15, 0.4), rng.uniform(0.85, 0.95)
    cycles = int(rng.integers(3, 8))
    phase = np.clip((t - start) / (end - start), 0, 1) * cycles % 1.0
    if rng.random() < 0.5:
        turn = rng.uniform(0.5, 0.8)
        wave = np.interp(phase, [0.0, turn, 1.0], [0.0, 1.0, 0.0])
    else:
        wave = (1 - np.cos(2 * np.pi * phase)) / 2
    return _dipped(base, rng.uniform(0.08, 0.35) * wave, common=rng.uniform(0.3, 1.0))


def restart(rng: np.random.Generator, n: int) -> Curve:
    """A crash: the run goes on from an earlier checkpoint and learns again. KL and proxy fall back too."""
    when = int(n * rng.uniform(0.25, 0.75))
    lag = max(2, int(when * rng.uniform(0.08, 0.3)))
    index = np.concatenate([np.arange(when), np.arange(when - lag, n - lag)])
    whole = companions(rng, saturating(rng, 1.0, 5.0)(np.linspace(0, 1, n)))
    eval_scores = whole.eval_scores[index]
    return Curve(eval_scores / eval_scores.max(), whole.proxy[index], whole.kl[index])


def step_back(rng: np.random.Generator, n: int) -> Curve:
    """A sudden fall, flat for a while, then back by a straight line."""
    base, t = _base(rng, n), np.linspace(0, 1, n)
    (start,) = _starts(rng, 1)
    end = _end(rng, n, start, 0.1, 0.25)
    flat = start + rng.uniform(0.2, 0.6) * (end - start)
    shape = np.interp(t, [start, start + 1e-9, flat, end], [0.0, 1.0, 1.0, 0.0], left=0.0, right=0.0)
    return _dipped(base, rng.uniform(0.1, 0.5) * shape, common=_sometimes(rng))


def swells(rng: np.random.Generator, n: int) -> Curve:
    """Two to four dips like bells, of different depth and length, the later ones often deeper."""
    base, t = _base(rng, n), np.linspace(0, 1, n)
    loss = np.zeros(n)
    for start in _starts(rng, int(rng.integers(2, 5))):
        end = _end(rng, n, start, 0.06, 0.2)
        inside = np.clip((t - start) / (end - start), 0, 1)
        loss = np.maximum(loss, rng.uniform(0.05, 0.45) * np.sin(np.pi * inside) ** 2)
    return _dipped(base, loss, common=_sometimes(rng))


def _base(rng: np.random.Generator, n: int) -> Curve:
    """A healthy run without dips; half of them are still learning when the dip comes."""
    if rng.random() < 0.3:
        return companions(rng, saturating(rng, 2.0, 8.0)(np.linspace(0, 1, n)))
    draw: Callable[[np.random.Generator, int], Curve] = (saturate, plateau, stairs, late_jump)[int(rng.integers(4))]
    return draw(rng, n)


def _starts(rng: np.random.Generator, count: int) -> list[float]:
    """Where dips begin: in order, and so that the last one is over before the run is."""
    edges = np.linspace(0.2, 0.75, count + 1)
    return [float(rng.uniform(low, high)) for low, high in pairwise(edges)]


def _end(rng: np.random.Generator, n: int, start: float, shortest: float, longest: float) -> float:
    """Where a dip ends that lasts between these shares of the run before it, and at least some evals."""
    return float(start + max(rng.uniform(shortest, longest) * start, SHORTEST_EVALS / (n - 1)))


def _sometimes(rng: np.random.Generator) -> float:
    """In half of the runs the proxy keeps still, in the others it loses part or all of what the eval score loses."""
    return float(rng.uniform(0.3, 1.0)) if rng.random() < 0.5 else 0.0


def _dipped(base: Curve, loss: Floats, common: float) -> Curve:
    """Take away the share `loss` of what the eval score has reached, and of the proxy the part of it that is common."""
    return Curve(base.eval_scores * (1 - loss), base.proxy * (1 - common * loss), base.kl)


DIPS: dict[str, Callable[[np.random.Generator, int], Curve]] = {
    "curriculum": curriculum,
    "v_dip": v_dip,
    "u_dip": u_dip,
    "sawtooth": sawtooth,
    "restart": restart,
    "step_back": step_back,
    "swells": swells,
}
