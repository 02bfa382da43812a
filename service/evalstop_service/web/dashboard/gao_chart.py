"""The eval over the distance from the initial policy, with the over-optimization law that `gao_fit` fits. Pure.

Forms, data and exclusions are those of the detector `gao_fit`. The band is a 95 % confidence band of the fitted line
(Student's t, delta method: the line is linear in its coefficients). It is not a prediction band for single evals, and
it assumes that the form is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from evalstop_detectors import Observation
from evalstop_detectors.checkpoint import noise
from evalstop_detectors.detectors.gao_fit import GaoFit, GaoFitState

FORMS = {2: "reinforcement learning: d (a − b ln d)", 3: "best-of-n: d (a − b d)"}
LINE_POINTS = 80
"""Points of the line, from distance 0 to the largest observed."""


@dataclass(frozen=True)
class Pair:
    """An eval score and its distance: the square root of the last KL before it."""

    step: int
    distance: float
    eval_score: float
    stderr: float | None


@dataclass(frozen=True)
class Line:
    """The form that fits better, its 95 % band (`low` to `high`), and its peak with a standard error.

    `trusted`: whether the detector uses it; its note says why it does not.
    """

    form: str
    trusted: bool
    distances: list[float]
    eval_scores: list[float]
    low: list[float]
    high: list[float]
    peak: tuple[float, float] | None


@dataclass(frozen=True)
class GaoChart:
    """The pairs, the fitted line if there is one, and the detector's note."""

    pairs: list[Pair]
    line: Line | None
    note: str


def build_chart(observations: Iterable[Observation], sign: float = 1.0) -> GaoChart:
    """The chart of evals and KL, given in step order and with higher evals being better; `sign` restores their own
    direction."""
    detector = GaoFit()
    state, pairs = detector.start(), []
    for item in observations:
        before = state.pairs
        state, _ = detector.step(state, item)
        if state.pairs > before:
            pairs.append(Pair(item.step, state.recent[-1][1], sign * item.value, item.stderr))
    line = _fit_line(detector, state, sign) if state.pairs >= detector.least_evals else None
    return GaoChart(pairs, line, state.note)


def _fit_line(detector: GaoFit, state: GaoFitState, sign: float) -> Line | None:
    if not state.fits or state.sd <= 0:
        return None
    farthest = max(d for _, d in (*state.path, *state.recent))
    best = min(state.fits, key=lambda fit: fit.misfit)
    dof = state.pairs - 3
    # As in the detector: at least the variance of the noise, and more if the noise is autocorrelated.
    sound = noise.estimate(state.noise)
    variance = max(best.misfit / dof, (state.sd / 4) ** 2) * sound.inflation**2
    distances = [farthest * index / (LINE_POINTS - 1) for index in range(LINE_POINTS)]
    origin = state.noise.origin  # the detector measures evals from the first one
    eval_scores = [sign * (origin + best.combined(best.vector(d))) for d in distances]
    widths = [_quantile(dof) * math.sqrt(variance * best.leverage(best.vector(d))) for d in distances]
    if not all(map(math.isfinite, (*eval_scores, *widths))):
        return None
    peak = best.peak(variance)
    return Line(
        FORMS[best.term],
        detector.find_fault(state, state.fits, sound) is None,
        distances,
        eval_scores,
        [value - width for value, width in zip(eval_scores, widths, strict=True)],
        [value + width for value, width in zip(eval_scores, widths, strict=True)],
        peak if peak is not None and peak[0] <= 2 * farthest else None,  # farther out, the form cannot be trusted
    )


def _quantile(dof: int) -> float:
    """The 97.5 % quantile of Student's t (Cornish-Fisher), within 1 % from five degrees of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
