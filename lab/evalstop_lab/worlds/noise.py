"""The kinds of eval noise, each scaled to a given standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from evalstop_lab.worlds.truth import Floats

LEVELS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)


class NoiseKind(StrEnum):
    """The distribution of the differences between measured and noiseless scores."""

    GAUSSIAN = "gaussian"
    STUDENT_T3 = "student_t3"
    AR1 = "ar1"
    HETEROSCEDASTIC = "heteroscedastic"
    BINOMIAL = "binomial"
    OUTLIERS = "outliers"
    MISSING = "missing"


@dataclass(frozen=True, eq=False)
class NoisyScores:
    """Measured values, NaN where an eval is missing, and the standard error of each that a trainer would report."""

    values: Floats
    stderr: Floats


def add_noise(rng: np.random.Generator, kind: NoiseKind, clean: Floats, sd: float, common: Floats) -> NoisyScores:
    """Measure `clean` with noise of standard deviation `sd`; `common` is standard normal noise shared with the proxy.

    Binomial noise requires `clean` in (0, 1); `sd` is then its root mean square. Outliers are added to noise of `sd`.
    For AR(1) noise `sd` is the marginal standard deviation.
    """
    stderrs = np.full(len(clean), sd)
    if sd == 0:
        return NoisyScores(_with_gaps(rng, clean) if kind is NoiseKind.MISSING else clean.copy(), stderrs)
    match kind:
        case NoiseKind.STUDENT_T3:
            # A normal over the root of an independent chi-square preserves the correlation with the proxy.
            scale = np.sqrt(rng.chisquare(3, len(clean)))  # sd of the quotient is 1 for 3 degrees of freedom
            return NoisyScores(clean + sd * common / scale, stderrs)
        case NoiseKind.AR1:
            return NoisyScores(clean + sd * correlate(common, rng.uniform(0.3, 0.7)), stderrs)
        case NoiseKind.HETEROSCEDASTIC:
            stderrs = sd * _draw_spread(rng, len(clean))
            return NoisyScores(clean + stderrs * common, stderrs)
        case NoiseKind.BINOMIAL:
            return _count_hits(rng, clean, sd)
        case NoiseKind.OUTLIERS:
            far = (rng.random(len(clean)) < 0.03) * rng.uniform(4, 8, len(clean)) * rng.choice([-1.0, 1.0], len(clean))
            return NoisyScores(clean + sd * (common + far), stderrs)
        case NoiseKind.MISSING:
            return NoisyScores(_with_gaps(rng, clean + sd * common), stderrs)
        case _:
            return NoisyScores(clean + sd * common, stderrs)


def correlate(innovations: Floats, phi: float) -> Floats:
    """AR(1) noise from independent noise of the same variance; `phi`: the correlation of successive values."""
    series, scale = np.empty_like(innovations), np.sqrt(1 - phi**2)
    series[0] = innovations[0]
    for index in range(1, len(series)):
        series[index] = phi * series[index - 1] + scale * innovations[index]
    return series


def _draw_spread(rng: np.random.Generator, n: int) -> Floats:
    """Standard deviations that grow or shrink threefold over the run, with a mean square of 1."""
    direction = rng.choice([-1.0, 1.0])
    sds = np.exp(direction * np.linspace(-0.55, 0.55, n))
    return np.asarray(sds / np.sqrt(np.mean(sds**2)))


def _count_hits(rng: np.random.Generator, shares: Floats, sd: float) -> NoisyScores:
    # So many prompts that the shares have the root mean square error `sd`.
    n = max(1, round(float(np.mean(shares * (1 - shares))) / sd**2))
    hits = rng.binomial(n, shares)
    # With one hit and one miss added, a share of 0 or 1 has a standard error above 0.
    smoothed = (hits + 1) / (n + 2)
    return NoisyScores(hits / n, np.sqrt(smoothed * (1 - smoothed) / n))


def _with_gaps(rng: np.random.Generator, values: Floats) -> Floats:
    """Remove an eighth of the values at random, and a gap of up to a tenth; the first and the last value stay."""
    is_kept = rng.random(len(values)) >= 0.125
    length = int(rng.integers(1, max(2, len(values) // 10 + 1)))
    start = int(rng.integers(1, max(2, len(values) - length)))
    is_kept[start : start + length] = False
    is_kept[[0, -1]] = True
    return np.where(is_kept, values, np.nan)
