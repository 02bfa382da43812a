"""The likelihood ratio of a fall of the eval score's mean at any earlier eval, both means unknown.

Source      FOCuS: Romano, Eckley, Fearnhead & Rigaill 2023 (JMLR 24), for an unknown mean before the change. Which
            change points can still become the best is decided on the convex hull of the cumulative sums, which is
            the same functional pruning (Pishchagina, Romano, Fearnhead, Runge & Rigaill 2023).
Kernel      max over t of t (n - t) / n (mean of 1..t - mean of t+1..n)^2 / (2 sd^2), where the first mean is larger.
            For any two given means it is linear in (t, sum of 1..t): only the vertices of the upper hull can win.
Departs     The noise is estimated (see noise.py, as known before the current value, with the autocorrelation).
State       The upper hull and the noise. For random walks the hull has about ln n vertices; in a steady fall every eval
            is one. At most `candidates` are kept: the least prominent one is dropped, which can only lower the ratio.
Evidence    A statistic: the log of the ratio, half the square of standard deviations. The turn is placed at the last
            eval before the change.
Not done    It compares with all earlier evals: a run that rose far must fall far. To start anew at each rise would find
            falls sooner, and dips too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.detector import EvalDetector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count

_SOONEST = 4
_LARGEST_SIGMAS = 1e9

# A change point: the number of evals before it, their sum, and the step of the last of them.
Candidate = tuple[int, float, int]


class FocusState(Struct, frozen=True):
    """See the module's docstring. `count` and `total`: number and sum of the evals."""

    noise: NoiseState = NoiseState()
    count: int = 0
    total: float = 0.0
    upper: tuple[Candidate, ...] = ((0, 0.0, 0),)
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no evals yet")


class Focus(EvalDetector[FocusState], frozen=True):
    """Searches for a fall of the mean at every earlier eval.

    `candidates`: how many change points are kept.

    A run that is flat for 30 evals, up to noise of 1, and then falls:

    >>> detector, state = Focus(), Focus().start()
    >>> for step in range(80):
    ...     score = step % 2 - max(step - 30, 0) / 3
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.1f}, turn at step {evidence.turn_step}")
    ...         break
    step 51: 79.5, turn at step 37
    """

    name: ClassVar[str] = "focus"
    kind: ClassVar[Kind] = Kind.STATISTIC
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=12.0, stop_at=75.0)
    state_type: ClassVar[type[FocusState]] = FocusState

    candidates: Annotated[int, Meta(ge=4, le=128)] = 32

    def take_eval(self, state: FocusState, observation: Observation) -> FocusState:
        estimated = estimate(state.noise)
        sd = estimated.sd * estimated.inflation
        noise = advance(state.noise, observation.value, observation.stderr)
        count, total = state.count + 1, state.total + noise.recent[-1]
        # The current eval counts for the earlier change points, and is itself one only for later evals.
        fall, before = _best(state.upper, count, total)
        evidence = _evidence(noise.seen, sd, fall, before, count)
        return FocusState(noise, count, total, self._with(state.upper, (count, total, observation.step)), evidence)

    def _with(self, hull: tuple[Candidate, ...], new: Candidate) -> tuple[Candidate, ...]:
        """The hull with one more point, without points on or under the line from their neighbor to it."""
        size = len(hull)
        while size >= 2 and _height(hull[size - 2], hull[size - 1], new) <= 0:
            size -= 1
        grown = (*hull[:size], new)
        if len(grown) <= self.candidates:
            return grown
        heights = [_height(grown[i - 1], grown[i], grown[i + 1]) for i in range(1, len(grown) - 1)]
        least = 1 + heights.index(min(heights))
        return (*grown[:least], *grown[least + 1 :])


def _height(earlier: Candidate, middle: Candidate, later: Candidate) -> float:
    """How far the middle point lies above the line between its neighbors."""
    share = (middle[0] - earlier[0]) / (later[0] - earlier[0])
    return (middle[1] - earlier[1]) - (later[1] - earlier[1]) * share


def _best(hull: Sequence[Candidate], count: int, total: float) -> tuple[float, Candidate]:
    """The largest fall of the mean, in units of one eval's noise, and its change point; 0 if there is none."""
    best, where = 0.0, hull[0]
    for candidate in hull[1:]:
        before, sum_before, _ = candidate
        after = count - before
        change = (sum_before / before - (total - sum_before) / after) * math.sqrt(before * after / count)
        if change > best:
            best, where = change, candidate
    return best, where


def _evidence(seen: int, sd: float, fall: float, before: Candidate, count: int) -> Evidence:
    if seen < _SOONEST:
        return Evidence(Kind.STATISTIC, 0.0, None, f"needs {format_count(_SOONEST - seen, 'more eval')}")
    if sd == 0:
        return Evidence(Kind.STATISTIC, 0.0, None, "the eval score has not moved yet")
    sigmas = min(fall / sd, _LARGEST_SIGMAS)
    value = sigmas * sigmas / 2
    if value == 0:
        return Evidence(Kind.STATISTIC, 0.0, None, "the eval score has no lower mean than before")
    last = format_count(count - before[0], "eval")
    note = f"log likelihood ratio of a lower mean in the last {last} than in {before[0]} before"
    return Evidence(Kind.STATISTIC, value, before[2], note)
