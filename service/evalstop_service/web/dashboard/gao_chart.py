"""Gold over the distance from the initial policy, with the laws of over-optimization as the detector fits them. Pure.

The forms, what they are fitted to and what is left out are those of the detector `gao_fit`; the band is where the
fitted line lies with a probability of 95 % (Student's t by its variance, delta method: the line is linear in its
coefficients). It is no band for single evals, and none of whether the form is the true one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from evalstop_detectors import Observation
from evalstop_detectors.checkpoint import noise
from evalstop_detectors.detectors.gao_fit import Fit, GaoFit, GaoFitState

FORMS = {2: "reinforcement learning: d (a − b ln d)", 3: "best-of-n: d (a − b d)"}
PLACES = 80
"""Of the line, from no distance to the farthest seen."""


@dataclass(frozen=True)
class Pair:
    """An eval and the distance at which it was made, the square root of the KL before it."""

    step: int
    distance: float
    gold: float
    stderr: float | None


@dataclass(frozen=True)
class Line:
    """The better of both forms: its name, where it lies (`low` to `high`: 95 %), and its peak with a standard error."""

    form: str
    distances: list[float]
    gold: list[float]
    low: list[float]
    high: list[float]
    peak: tuple[float, float] | None


@dataclass(frozen=True)
class Picture:
    """The pairs, the line through them if there is one, and what the detector says of it."""

    pairs: list[Pair]
    line: Line | None
    note: str


def picture(observations: Iterable[Observation]) -> Picture:
    """What gold and KL, in their order and turned so that higher is better, show."""
    detector = GaoFit()
    state, pairs = detector.start(), []
    for item in observations:
        before = state.pairs
        state, _ = detector.step(state, item)
        if state.pairs > before:
            pairs.append(Pair(item.step, state.recent[-1][1], item.value, item.stderr))
    return Picture(pairs, _line(state) if state.pairs >= detector.least_evals else None, state.note)


def _line(state: GaoFitState) -> Line | None:
    if not state.fits or state.sd <= 0:
        return None
    farthest = max(d for _, d in (*state.path, *state.recent))
    best = min(state.fits, key=lambda fit: fit.misfit)
    dof = state.pairs - 3
    # As the detector has it: no less than noise alone would leave, and more where the noise is autocorrelated.
    variance = max(best.misfit / dof, (state.sd / 4) ** 2) * noise.estimate(state.noise).inflation ** 2
    distances = [farthest * place / (PLACES - 1) for place in range(PLACES)]
    origin = state.noise.origin  # the detector counts gold from the first one
    gold = [origin + best.combined(best.vector(d)) for d in distances]
    reach = [_quantile(dof) * math.sqrt(variance * best.leverage(best.vector(d))) for d in distances]
    if not all(map(math.isfinite, (*gold, *reach))):
        return None
    return Line(
        FORMS[best.term],
        distances,
        gold,
        [value - width for value, width in zip(gold, reach, strict=True)],
        [value + width for value, width in zip(gold, reach, strict=True)],
        _peak(best, variance, farthest),
    )


def _peak(fit: Fit, variance: float, farthest: float) -> tuple[float, float] | None:
    """The peak where it has been passed or is near; farther off the form is not to be believed."""
    peak = fit.peak(variance)
    return peak if peak is not None and peak[0] <= 2 * farthest else None


def _quantile(dof: int) -> float:
    """The 97.5 % quantile of Student's t, to a percent from five degrees of freedom on (Cornish-Fisher)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
