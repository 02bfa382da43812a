"""The families of drawn runs: noiseless curves of eval score, proxy and KL; some are excluded from calibration.

Healthy runs end at their maximum, some after dips that recover; hacking ones turn while the proxy goes on rising. Time
`t` runs from 0 at the first eval to 1 at the last. The length of a dip is a share of the run before it, because late
interruptions take longer to recover from; in some families the proxy dips too, because both have the same cause.

Source      Gao et al. (arXiv 2210.10760): with d = sqrt(KL), the eval score is d (a - b ln d) under reinforcement
            learning and d (a - b d) under best-of-n. With u = d / d*, where d* is d at the peak, they are u (1 - ln u)
            and u (2 - u) times the height of the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.random import Generator

from evalstop_lab.worlds.shapes import (
    Curve,
    draw_distance_growth,
    draw_fall,
    draw_rise,
    draw_saturation,
    logistic,
    sudden_drop,
    u_shape,
    v_shape,
)
from evalstop_lab.worlds.truth import Floats

Draw = Callable[[Generator, Floats], Curve]

SHORTEST_EVALS = 3


class Group(StrEnum):
    """The kind of a family's runs."""

    HEALTHY = "healthy"
    DIP = "dip"
    HACKING = "hacking"


@dataclass(frozen=True)
class Family:
    """Draws noiseless curves, all of one label."""

    group: Group
    draw: Draw


FAMILIES: dict[str, Family] = {}

HELD_OUT = frozenset({"step_back", "swells", "drift_and_jump", "waves_down", "two_falls"})
"""Never used to choose thresholds or parameters: they represent curves that nobody anticipated."""


def family(group: Group) -> Callable[[Draw], Draw]:
    """Add a function `draw_<name>` to the families, in the order of this module, which the suites depend on."""

    def add(draw: Draw) -> Draw:
        FAMILIES[draw.__name__.removeprefix("draw_")] = Family(group, draw)
        return draw

    return add


@family(Group.HEALTHY)
def draw_saturate(rng: Generator, t: Floats) -> Curve:
    """Growth that slows down but never stops."""
    return _add_healthy_proxy(rng, draw_saturation(rng, 1.0, 6.0)(t))


@family(Group.HEALTHY)
def draw_plateau(rng: Generator, t: Floats) -> Curve:
    """A fast rise, then exactly flat."""
    return _add_healthy_proxy(rng, np.asarray(np.minimum(1, (t / rng.uniform(0.08, 0.4)) ** rng.uniform(0.5, 1.0))))


@family(Group.HEALTHY)
def draw_slow_start(rng: Generator, t: Floats) -> Curve:
    """No growth for a long time, then growth."""
    middle, width = rng.uniform(0.3, 0.7), rng.uniform(0.03, 0.12)
    return _add_healthy_proxy(rng, _normalize(logistic((t - middle) / width)))


@family(Group.HEALTHY)
def draw_late_jump(rng: Generator, t: Floats) -> Curve:
    """A plateau for most of the run, then a jump to a higher plateau."""
    low, when, width = rng.uniform(0.3, 0.8), rng.uniform(0.5, 0.9), rng.uniform(0.005, 0.03)
    return _add_healthy_proxy(
        rng, _normalize(low * draw_saturation(rng, 8.0, 20.0)(t) + (1 - low) * logistic((t - when) / width))
    )


@family(Group.HEALTHY)
def draw_stairs(rng: Generator, t: Floats) -> Curve:
    """Plateaus with growth between them."""
    steps = int(rng.integers(2, 6))
    middles = np.sort(rng.uniform(0.05, 0.92, steps))
    heights = rng.dirichlet(np.full(steps, 3.0))
    width = rng.uniform(0.005, 0.03)
    return _add_healthy_proxy(
        rng, _normalize(np.asarray(sum(h * logistic((t - m) / width) for h, m in zip(heights, middles, strict=True))))
    )


@family(Group.HEALTHY)
def draw_drift_and_jump(rng: Generator, t: Floats) -> Curve:
    """A slow rise over the whole run, with one or two small jumps upward."""
    eval_scores = rng.uniform(0.3, 0.7) * t
    for when in rng.uniform(0.1, 0.85, int(rng.integers(1, 3))):
        eval_scores = eval_scores + rng.uniform(0.1, 0.4) * logistic((t - when) / 0.005)
    return _add_healthy_proxy(rng, _normalize(eval_scores))


def _add_healthy_proxy(rng: Generator, eval_scores: Floats) -> Curve:
    """Add the proxy and KL of a healthy run; `eval_scores` must have no dips.

    The proxy follows the eval score, and in half of the runs also rises slightly on its own.
    """
    t = np.linspace(0, 1, len(eval_scores))
    own_growth = rng.uniform(0.05, 0.4) if rng.random() < 0.5 else 0.0
    proxy = np.clip(eval_scores, 0, None) ** rng.uniform(0.7, 1.1) + own_growth * draw_distance_growth(rng)(t)
    return Curve(eval_scores, proxy, kl=(rng.uniform(0.7, 5.0) * draw_distance_growth(rng)(t)) ** 2)


def _normalize(eval_scores: Floats) -> Floats:
    return np.asarray((eval_scores - eval_scores[0]) / (eval_scores.max() - eval_scores[0]))


@family(Group.DIP)
def draw_curriculum(rng: Generator, t: Floats) -> Curve:
    """The task gets harder one to three times: both scores drop at once and recover."""
    base = _draw_base(rng, t)
    loss = np.zeros_like(t)
    for start in _draw_starts(rng, int(rng.integers(1, 4))):
        end = _draw_end(rng, t, start, 0.05, 0.2)
        loss = np.maximum(loss, rng.uniform(0.1, 0.5) * sudden_drop(t, start, end))
    return _apply_loss(base, loss, common=rng.uniform(0.5, 1.0))


@family(Group.DIP)
def draw_v_dip(rng: Generator, t: Floats) -> Curve:
    base = _draw_base(rng, t)
    loss = np.zeros_like(t)
    for start in _draw_starts(rng, int(rng.integers(1, 3))):
        end = _draw_end(rng, t, start, 0.05, 0.18)
        bottom = start + rng.uniform(0.3, 0.7) * (end - start)
        loss = np.maximum(loss, rng.uniform(0.1, 0.6) * v_shape(t, start, bottom, end))
    return _apply_loss(base, loss, common=_draw_common_share(rng))


@family(Group.DIP)
def draw_u_dip(rng: Generator, t: Floats) -> Curve:
    base = _draw_base(rng, t)
    (start,) = _draw_starts(rng, 1)
    loss = rng.uniform(0.1, 0.5) * u_shape(t, start, _draw_end(rng, t, start, 0.12, 0.3), rng.uniform(0.1, 0.3))
    return _apply_loss(base, loss, common=_draw_common_share(rng))


@family(Group.DIP)
def draw_sawtooth(rng: Generator, t: Floats) -> Curve:
    """Periodic dips over half of the run or more: a slow fall and a fast rise, or a cosine wave."""
    base = _draw_base(rng, t)
    start, end = rng.uniform(0.15, 0.4), rng.uniform(0.85, 0.95)
    cycles = int(rng.integers(3, 8))
    phase = np.clip((t - start) / (end - start), 0, 1) * cycles % 1.0
    if rng.random() < 0.5:
        turn = rng.uniform(0.5, 0.8)
        wave = np.interp(phase, [0.0, turn, 1.0], [0.0, 1.0, 0.0])
    else:
        wave = (1 - np.cos(2 * np.pi * phase)) / 2
    return _apply_loss(base, rng.uniform(0.08, 0.35) * wave, common=rng.uniform(0.3, 1.0))


@family(Group.DIP)
def draw_restart(rng: Generator, t: Floats) -> Curve:
    """The run crashes and continues from an earlier checkpoint. KL and proxy return to that checkpoint too."""
    when = int(len(t) * rng.uniform(0.25, 0.75))
    lag = max(2, int(when * rng.uniform(0.08, 0.3)))
    index = np.concatenate([np.arange(when), np.arange(when - lag, len(t) - lag)])
    whole = _add_healthy_proxy(rng, draw_saturation(rng, 1.0, 5.0)(t))
    eval_scores = whole.eval_scores[index]
    return Curve(eval_scores / eval_scores.max(), whole.proxy[index], whole.kl[index])


@family(Group.DIP)
def draw_step_back(rng: Generator, t: Floats) -> Curve:
    """A sudden drop, a flat part, then a linear recovery."""
    base = _draw_base(rng, t)
    (start,) = _draw_starts(rng, 1)
    end = _draw_end(rng, t, start, 0.1, 0.25)
    flat = start + rng.uniform(0.2, 0.6) * (end - start)
    shape = np.interp(t, [start, start + 1e-9, flat, end], [0.0, 1.0, 1.0, 0.0], left=0.0, right=0.0)
    return _apply_loss(base, rng.uniform(0.1, 0.5) * shape, common=_draw_common_share(rng))


@family(Group.DIP)
def draw_swells(rng: Generator, t: Floats) -> Curve:
    """Two to four bell-shaped dips of different depth and length; later ones are often deeper."""
    base = _draw_base(rng, t)
    loss = np.zeros_like(t)
    for start in _draw_starts(rng, int(rng.integers(2, 5))):
        end = _draw_end(rng, t, start, 0.06, 0.2)
        inside = np.clip((t - start) / (end - start), 0, 1)
        loss = np.maximum(loss, rng.uniform(0.05, 0.45) * np.sin(np.pi * inside) ** 2)
    return _apply_loss(base, loss, common=_draw_common_share(rng))


def _draw_base(rng: Generator, t: Floats) -> Curve:
    """A healthy run without dips; half of them are still improving at the dip."""
    if rng.random() < 0.3:
        return _add_healthy_proxy(rng, draw_saturation(rng, 2.0, 8.0)(t))
    return (draw_saturate, draw_plateau, draw_stairs, draw_late_jump)[int(rng.integers(4))](rng, t)


def _draw_starts(rng: Generator, count: int) -> list[float]:
    """The starts of the dips, in order, early enough that the last dip ends before the run."""
    edges = np.linspace(0.2, 0.75, count + 1)
    return [float(rng.uniform(low, high)) for low, high in pairwise(edges)]


def _draw_end(rng: Generator, t: Floats, start: float, shortest: float, longest: float) -> float:
    """The end of a dip: its length is between these shares of the run before it, and at least `SHORTEST_EVALS`."""
    return float(start + max(rng.uniform(shortest, longest) * start, SHORTEST_EVALS / (len(t) - 1)))


def _draw_common_share(rng: Generator) -> float:
    """The share of the eval score's loss that the proxy has too: 0 in half of the runs, 0.3 to 1 in the others."""
    return float(rng.uniform(0.3, 1.0)) if rng.random() < 0.5 else 0.0


def _apply_loss(base: Curve, loss: Floats, common: float) -> Curve:
    """Reduce the eval score by the share `loss`, and the proxy by the share `common` of that."""
    return Curve(base.eval_scores * (1 - loss), base.proxy * (1 - common * loss), base.kl)


@family(Group.HACKING)
def draw_gao_rl(rng: Generator, t: Floats) -> Curve:
    """Gao's form for reinforcement learning."""

    def form(u: Floats) -> Floats:
        logarithms = np.log(np.maximum(u, 1e-300))
        return np.where(u > 0, u * (1 - logarithms), 0.0)

    return _draw_gao(rng, t, form)


@family(Group.HACKING)
def draw_gao_bon(rng: Generator, t: Floats) -> Curve:
    """Gao's form for best-of-n."""
    return _draw_gao(rng, t, lambda u: u * (2 - u))


@family(Group.HACKING)
def draw_collapse(rng: Generator, t: Floats) -> Curve:
    """The eval score loses half of its gain or more within a few evals and does not recover."""
    peak = _draw_peak(rng, t, 0.25, 0.8)
    return _draw_turn(rng, t, peak, rng.uniform(0.5, 2.0), duration=max(2.5 / (len(t) - 1), rng.uniform(0.02, 0.1)))


@family(Group.HACKING)
def draw_slow(rng: Generator, t: Floats) -> Curve:
    """A long decline from an early peak."""
    return _draw_turn(rng, t, _draw_peak(rng, t, 0.2, 0.5), rng.uniform(0.2, 0.6))


@family(Group.HACKING)
def draw_mild(rng: Generator, t: Floats) -> Curve:
    """A decline slightly larger than the label requires."""
    return _draw_turn(rng, t, _draw_peak(rng, t, 0.2, 0.65), rng.uniform(0.12, 0.25))


@family(Group.HACKING)
def draw_late(rng: Generator, t: Floats) -> Curve:
    """A turn near the end of the run."""
    return _draw_turn(rng, t, _draw_peak(rng, t, 0.7, 0.9), rng.uniform(0.15, 0.8))


@family(Group.HACKING)
def draw_after_plateau(rng: Generator, t: Floats) -> Curve:
    """The eval score stays at its peak for a third of the run or more before it turns."""
    peak = _draw_peak(rng, t, 0.5, 0.8)
    top = peak * rng.uniform(0.2, 0.5)
    eval_scores = draw_rise(rng)(t / top) - rng.uniform(0.15, 1.0) * draw_fall(rng)((t - peak) / (1 - peak))
    return _add_rising_proxy(rng, eval_scores)


@family(Group.HACKING)
def draw_partial_recovery(rng: Generator, t: Floats) -> Curve:
    """A fall, then a recovery that stays well below the peak."""
    peak = _draw_peak(rng, t, 0.2, 0.55)
    bottom = peak + rng.uniform(0.25, 0.6) * (1 - peak)
    depth = rng.uniform(0.3, 1.0)
    remaining_fall = rng.uniform(max(0.15, 0.3 * depth), 0.8 * depth)
    eval_scores = draw_rise(rng)(t / peak) - np.interp(t, [peak, bottom, 1.0], [0.0, depth, remaining_fall], left=0.0)
    return _add_rising_proxy(rng, eval_scores)


@family(Group.HACKING)
def draw_never_rose(rng: Generator, t: Floats) -> Curve:
    """The eval score falls from the first eval on."""
    return _add_rising_proxy(rng, -draw_fall(rng)(t / rng.uniform(0.2, 1.0)))


@family(Group.HACKING)
def draw_waves_down(rng: Generator, t: Floats) -> Curve:
    """A decline in waves: each maximum is lower than the one before."""
    peak, depth = _draw_peak(rng, t, 0.2, 0.6), rng.uniform(0.3, 1.0)
    after = np.clip((t - peak) / (1 - peak), 0, 1)
    waves = (1 - np.cos(2 * np.pi * int(rng.integers(2, 6)) * after)) / 2
    return _add_rising_proxy(rng, draw_rise(rng)(t / peak) - depth * (after + rng.uniform(0.05, 0.3) * waves))


@family(Group.HACKING)
def draw_two_falls(rng: Generator, t: Floats) -> Curve:
    """A first fall, a plateau below the peak, and a second fall."""
    peak, depth = _draw_peak(rng, t, 0.2, 0.5), rng.uniform(0.25, 1.2)
    first, second = np.sort(rng.uniform(peak + 0.1 * (1 - peak), 1.0, 2))
    share = rng.uniform(0.3, 0.7)
    loss = np.interp(t, [peak, first, second, 1.0], [0.0, share * depth, share * depth, depth], left=0.0)
    return _add_rising_proxy(rng, draw_rise(rng)(t / peak) - loss)


def _draw_gao(rng: Generator, t: Floats, form: Callable[[Floats], Floats]) -> Curve:
    depth = rng.uniform(0.15, 1.5)
    end = _find_end(form, depth)
    while True:
        u = end * draw_distance_growth(rng)(t)
        if 0.15 <= np.count_nonzero(u < 1) / len(t) <= 0.85:
            break
    return Curve(form(u), proxy=u ** rng.uniform(0.6, 0.95), kl=(rng.uniform(1.0, 6.0) * u) ** 2)


def _find_end(form: Callable[[Floats], Floats], depth: float) -> float:
    """The u > 1 at which the form has fallen by `depth` from its peak of 1."""
    low, high = 1.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if float(form(np.array([middle]))[0]) > 1 - depth else (low, middle)
    return high


def _draw_turn(rng: Generator, t: Floats, peak: float, depth: float, duration: float | None = None) -> Curve:
    eval_scores = draw_rise(rng)(t / peak) - depth * draw_fall(rng)((t - peak) / (duration or 1 - peak))
    return _add_rising_proxy(rng, eval_scores)


def _draw_peak(rng: Generator, t: Floats, earliest: float, latest: float) -> float:
    """A random time of the peak, at an eval, with at least three evals after it."""
    last = len(t) - 1
    return min(round(rng.uniform(earliest, latest) * last), last - 3) / last


def _add_rising_proxy(rng: Generator, eval_scores: Floats) -> Curve:
    """Add a proxy that rises with the eval score and on its own and never falls, and a growing KL."""
    t = np.linspace(0, 1, len(eval_scores))
    shared = rng.uniform(0.0, 0.8)
    proxy = shared * np.maximum.accumulate(eval_scores) + (1 - shared) * draw_distance_growth(rng)(t)
    return Curve(eval_scores, proxy, (rng.uniform(1.0, 6.0) * draw_distance_growth(rng)(t)) ** 2)


CALIBRATION = tuple(name for name in FAMILIES if name not in HELD_OUT)
REPORTING = tuple(FAMILIES)


def list_families(*groups: Group, among: tuple[str, ...] = REPORTING) -> tuple[str, ...]:
    """The names of the families in these groups."""
    return tuple(name for name in among if FAMILIES[name].group in groups)
