"""Downward drifts of the eval score, as detected by detectors of `river.drift`.

Source      river (Montiel et al. 2021) itself: ADWIN (Bifet & Gavalda 2007), PageHinkley (Page 1954), KSWIN (Raab,
            Heusinger & Schleif 2020), with river's own parameters.
Input       The eval score relative to its first value, in units of the noise (see noise.py), so that river's
            parameters, which have a unit, mean the same for every run: the unit is fixed after 8 evals, and again
            after each drift. Inputs are clipped at 1e6 units.
Direction   River reports that there was a drift, not its direction. The inputs since the last one are split where their
            means differ most significantly; a drift is downward when the later mean is lower.
Departs     After a drift a new detector of river is started, which ADWIN, PageHinkley and KSWIN do by themselves.
            After 256 inputs without a drift, a new one is started from the later half of them: river then forgets
            older ones, which may delay an alarm. The seed of KSWIN is 1.
State       The inputs since the detector was started, at most 256, with their steps; the noise. The live object of
            river is kept beside the fields, never stored: without it the inputs are replayed, which gives the same
            object. O(1).
Evidence    A count: drifts downward less drifts upward, never below 0. The turn is placed at the split of the first one
            that still counts.
Cost        That of river. A stored state requires a replay of its inputs before it continues: for KSWIN, which tests
            each input, this costs a thousand times the rest of a step.
Not done    River's detectors know no plateau: a dip that recovers is a drift like any other until it has recovered.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache, partial
from importlib.machinery import PathFinder
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msgspec import Struct

from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count

if TYPE_CHECKING:
    from river import base

_FIRST = 8
_LARGEST = 1e6
_MEMORY = 256

_FIRST_REPORT = {"ADWIN": 32, "KSWIN": 100, "PageHinkley": 30}
"""The input at which each of river's detectors may first report a drift: until then river itself is not needed."""


class RiverDriftState(Struct, frozen=True, dict=True):
    """See the module's docstring; while `unit` is 0 the inputs wait for it in units of the noise."""

    noise: NoiseState = NoiseState()
    unit: float = 0.0
    inputs: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    downward: int = 0
    turn_step: int | None = None


class RiverDrift(Detector[RiverDriftState], frozen=True):
    """Counts the downward drifts that a detector of river reports.

    `detector`: the name of its class.

    A level of 10, up to noise of 1, that falls to 0 after 30 evals:

    >>> detector, state = RiverDrift(), RiverDrift().start()
    >>> for step in range(80):
    ...     score = (10 if step < 30 else 0) + step % 2
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: {evidence.value:.1f}, turn at step {evidence.turn_step}")
    ...         break
    step 37: 1.0, turn at step 29
    """

    name: ClassVar[str] = "river_drift"
    kind: ClassVar[Kind] = Kind.COUNT
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=None, stop_at=1.0)
    state_type: ClassVar[type[RiverDriftState]] = RiverDriftState

    detector: Literal["ADWIN", "KSWIN", "PageHinkley"] = "PageHinkley"

    def step(self, state: RiverDriftState, observation: Observation) -> tuple[RiverDriftState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation)
        if state.noise.seen < _FIRST:
            return state, Evidence(
                Kind.COUNT, 0.0, None, f"needs {format_count(_FIRST - state.noise.seen, 'more eval')}"
            )
        if state.unit == 0:
            return state, Evidence(Kind.COUNT, 0.0, None, "the eval score has not moved yet")
        note = f"drifts of the eval score downward by river's {self.detector}, less those upward"
        return state, Evidence(Kind.COUNT, float(state.downward), state.turn_step, note)

    def _advance(self, state: RiverDriftState, observation: Observation) -> RiverDriftState:
        noise = advance(state.noise, observation.value, observation.stderr)
        value, steps = noise.recent[-1], (*state.steps, observation.step)
        if state.unit:
            return self._feed_detector(state, noise, (*state.inputs, _in_units(value, state.unit)), steps)
        waiting = (*state.inputs, value)[-_FIRST:]
        unit = estimate(noise).sd if noise.seen >= _FIRST else 0.0
        if unit == 0:
            return RiverDriftState(noise, 0.0, waiting, steps[-_FIRST:])
        inputs = tuple([_in_units(item, unit) for item in waiting])
        return RiverDriftState(noise, unit, inputs, steps[-_FIRST:])

    def _feed_detector(
        self, state: RiverDriftState, noise: NoiseState, inputs: tuple[float, ...], steps: tuple[int, ...]
    ) -> RiverDriftState:
        """The state after river has processed the last of the inputs."""
        if len(inputs) < _FIRST_REPORT[self.detector]:
            return RiverDriftState(noise, state.unit, inputs, steps, state.downward, state.turn_step)
        live = self._live(state)
        live.update(inputs[-1])
        unit, downward, turn = state.unit, state.downward, state.turn_step
        if live.drift_detected:
            change, split = largest_change(inputs)
            if change < 0:
                downward, turn = downward + 1, steps[split - 1] if turn is None else turn
            elif change > 0:
                downward = max(0, downward - 1)
                turn = turn if downward else None
            return RiverDriftState(noise, estimate(noise).sd, (), (), downward, turn)
        if len(inputs) >= _MEMORY:
            kept = _MEMORY // 2
            return RiverDriftState(noise, unit, inputs[-kept:], steps[-kept:], downward, turn)
        return self._carrying(RiverDriftState(noise, unit, inputs, steps, downward, turn), live)

    def _carrying(self, state: RiverDriftState, live: base.DriftDetector) -> RiverDriftState:
        """The state with river's object beside its fields, invisible to equality and to the codec."""
        state.__dict__["live"] = (self, live)
        return state

    def _live(self, state: RiverDriftState) -> base.DriftDetector:
        """River's object after the inputs of the state. It is removed from the state, since the next input changes it:
        to continue from the same state again, or from a stored one, the inputs are replayed."""
        owner, live = state.__dict__.pop("live", (None, None))
        return live if live is not None and owner == self else begun(self.detector, state.inputs)


@cache
def _find_constructor(detector: str) -> Any:
    """The class of river with this name, called with a seed if it takes one.

    PageHinkley, which every shipped policy observes, is loaded from its file: the import of the package takes a second
    and 90 MB, with all of scipy.
    """
    if detector == "PageHinkley":
        package = importlib.util.find_spec("river")
        folders = package.submodule_search_locations or () if package is not None else ()
        spec = PathFinder.find_spec("page_hinkley", [f"{folder}/drift" for folder in folders])
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module.PageHinkley
    from river import drift

    return partial(drift.KSWIN, seed=1) if detector == "KSWIN" else getattr(drift, detector)


def begun(detector: str, inputs: Sequence[float]) -> base.DriftDetector:
    """A new river object that has processed these inputs."""
    live: base.DriftDetector = _find_constructor(detector)()
    for item in inputs:
        live.update(item)
    return live


def largest_change(inputs: Sequence[float]) -> tuple[float, int]:
    """The most significant change of the mean, with its sign, and the number of inputs before it; 0 if none."""
    count, best, where = len(inputs), 0.0, 0
    sums = list(accumulate(inputs))
    for before in range(1, count):
        after = count - before
        change = (sums[-1] - sums[before - 1]) / after - sums[before - 1] / before
        change *= math.sqrt(before * after / count)
        if abs(change) > abs(best):
            best, where = change, before
    return best, where


def _in_units(value: float, unit: float) -> float:
    return min(max(value / unit, -_LARGEST), _LARGEST)
