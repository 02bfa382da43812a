"""Detectors of river and ruptures, which StopBench compares with EvalStop's own.

Sources     river (Montiel et al. 2021), through the detector `river_drift`; ruptures (Truong, Oudre & Vayatis 2020).
Departs     ruptures segments whole series. Here it is fitted to the evals so far and asked whether the newest part is
            lower than the part before it. Gains and penalties are in units of the noise's variance (see `noise`), so
            that one threshold serves all runs. PELT is `KernelCPD`'s with a linear kernel: the segments of `Pelt` with
            the cost `l2`, found by C a thousand times as fast.
Evidence    A statistic. Window: the gain of a split in the middle of the last 20 evals, 0 unless the later half is
            lower. Pelt: the largest penalty, of a grid, at which a fall has been found so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from evalstop_detectors import Detector, Evidence, Kind, MetricRole, Observation, Thresholds
from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.river_drift import RiverDrift
from msgspec import Struct

_PENALTIES = tuple(2.0 * 1.25**power for power in range(40))  # 2 to 12,000
_SHORTEST = 5  # evals of a segment
_WIDTH = 20  # of a window

_Floats = np.ndarray[Any, np.dtype[np.float64]]


class SeriesState(Struct, frozen=True):
    """The evals so far, relative to the first, and the noise; `level` counts the penalties that a fall was worth."""

    noise: NoiseState = NoiseState()
    values: tuple[float, ...] = ()
    level: int = 0


class Ruptures(Detector[SeriesState], frozen=True):
    """Asks a search method of ruptures whether the eval score has fallen."""

    name: ClassVar[str] = "ruptures"
    kind: ClassVar[Kind] = Kind.STATISTIC
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(None, None)
    state_type: ClassVar[type[SeriesState]] = SeriesState

    method: Literal["Window", "Pelt"]

    def step(self, state: SeriesState, observation: Observation) -> tuple[SeriesState, Evidence]:
        value = 0.0
        if observation.finite:
            noise = advance(state.noise, observation.value, observation.stderr)
            estimated, values, level = estimate(noise), (*state.values, noise.recent[-1]), state.level
            if (unit := estimated.sd * estimated.inflation) > 0:
                scaled = np.array(values) / unit
                value, level = (_split(scaled), 0) if self.method == "Window" else _segment(scaled, level)
            state = SeriesState(noise, values, level)
        return state, Evidence(Kind.STATISTIC, value)


def _split(values: _Floats) -> float:
    from ruptures.detection import Window  # a second, with all of scipy

    last, half = values[-_WIDTH:], _WIDTH // 2
    if len(last) < _WIDTH or last[half:].mean() >= last[:half].mean():
        return 0.0
    # The last value only fills the place after the window, where ruptures looks for no border.
    return float(Window(_WIDTH, model="l2", jump=half).fit(np.append(last, last[-1])).score[0])


def _segment(values: _Floats, level: int) -> tuple[float, int]:
    from ruptures.detection import KernelCPD

    if len(values) >= 2 * _SHORTEST:
        fitted = KernelCPD(kernel="linear", min_size=_SHORTEST).fit(values)
        while level < len(_PENALTIES) and _falls(values, [0, *fitted.predict(pen=_PENALTIES[level])]):
            level += 1
    return _PENALTIES[level - 1] if level else 0.0, level


def _falls(values: _Floats, borders: list[int]) -> bool:
    before, middle, end = borders[-3:] if len(borders) > 2 else (0, 0, 0)
    return end > 0 and bool(values[middle:end].mean() < values[before:middle].mean())


LIBRARIES: Mapping[str, tuple[Detector[Any], float]] = {
    "river ADWIN": (RiverDrift("ADWIN"), 2.0),
    "river PageHinkley": (RiverDrift("PageHinkley"), 2.0),
    "river KSWIN": (RiverDrift("KSWIN"), 2.0),
    "ruptures Window": (Ruptures("Window"), 659.0),
    "ruptures Pelt": (Ruptures("Pelt"), 1163.0),
}
"""Detectors with the thresholds that at most 1 % of 1,000 healthy runs of calibration seeds reach."""
