"""Downward drifts of the eval score, as detected by any detector of `river.drift`.

Source      river (Montiel et al. 2021) itself: ADWIN (Bifet & Gavalda 2007), PageHinkley (Page 1954), KSWIN (Raab,
            Heusinger & Schleif 2020) and its other detectors for numbers. Its detectors for binary errors
            (DDM, EDDM, FHDDM, HDDM) take no scores and are refused.
Input       The eval score relative to its first value, in units of the noise (see noise.py), so that river's
            parameters, which have a unit, mean the same for every run: the unit is fixed after 8 evals, and again
            after each drift. Inputs are clipped at 1e6 units.
Direction   River reports that there was a drift, not its direction. The inputs since the last one are split where their
            means differ most significantly; a drift is downward when the later mean is lower.
Departs     After a drift a new detector of river is started, which ADWIN, PageHinkley and KSWIN do by themselves.
            After `memory` inputs without a drift, a new one is started from the later half of them: river then
            forgets older ones, which may delay an alarm. A missing seed is 1.
State       The inputs since the detector was started, at most `memory`, with their steps; the noise. The live object
            of river is kept beside the fields, never stored: without it the inputs are replayed, which gives the
            same object. O(memory).
Evidence    A count: drifts downward less drifts upward, never below 0. The turn is placed at the split of the first one
            that still counts.
Cost        That of river. A stored state requires a replay of its inputs before it continues: for KSWIN, which tests
            each input, this costs a thousand times the rest of a step.
Not done    River's detectors know no plateau: a dip that recovers is a drift like any other until it has recovered.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.machinery import PathFinder
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.wording import format_count

if TYPE_CHECKING:
    from river import base

_FIRST = 8
_LARGEST = 1e6
_SEED = 1

_FIRST_REPORT = {"ADWIN": ("clock", 32), "KSWIN": ("window_size", 100), "PageHinkley": ("min_instances", 30)}
"""Of river's detectors: the parameter that says at which input they may first report a drift, and its default."""

Param = bool | int | float | str


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

    `detector` and `params`: the name of a class in `river.drift` and the arguments of its constructor. `memory`: how
    many inputs are kept; integer parameters may be up to half of it.

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

    detector: str = "PageHinkley"
    params: dict[str, Param] = field(default_factory=dict)
    memory: Annotated[int, Meta(ge=16, le=4096)] = 1024

    def __post_init__(self) -> None:
        _check_parameters(self.detector, self.params, self.memory)

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
        if len(inputs) < self._silent_for:
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
        if len(inputs) >= self.memory:
            kept = self.memory // 2
            return RiverDriftState(noise, unit, inputs[-kept:], steps[-kept:], downward, turn)
        return self._carrying(RiverDriftState(noise, unit, inputs, steps, downward, turn), live)

    @property
    def _silent_for(self) -> int:
        """River reports no drift before this many inputs: until then its object is not needed, nor river itself."""
        name, default = _FIRST_REPORT.get(self.detector, ("", 0))
        value = self.params.get(name, default)
        return value if isinstance(value, int) else 0

    def _carrying(self, state: RiverDriftState, live: base.DriftDetector) -> RiverDriftState:
        """The state with river's object beside its fields, invisible to equality and to the codec."""
        state.__dict__["live"] = (self, live)
        return state

    def _live(self, state: RiverDriftState) -> base.DriftDetector:
        """River's object after the inputs of the state. It is removed from the state, since the next input changes it:
        to continue from the same state again, or from a stored one, the inputs are replayed."""
        owner, live = state.__dict__.pop("live", (None, None))
        return live if live is not None and owner == self else begun(self.detector, self.params, state.inputs)


@cache
def drift_detectors() -> dict[str, type[base.DriftDetector]]:
    """All detectors of `river.drift` by name. The import takes a second and 90 MB, with all of scipy."""
    from river import base, drift

    return {
        name: item
        for name, item in sorted(vars(drift).items())
        if isinstance(item, type) and issubclass(item, base.DriftDetector)
    }


@cache
def _find_constructor(detector: str) -> Any:
    """The class of river with this name, called with a seed if it takes one.

    PageHinkley, which every shipped policy observes, is loaded from its file: it needs a tenth of the package's import.
    """
    package = importlib.util.find_spec("river") if detector == "PageHinkley" else None
    folders = package.submodule_search_locations or () if package is not None else ()
    spec = PathFinder.find_spec("page_hinkley", [f"{folder}/drift" for folder in folders])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.PageHinkley
    constructor: Any = drift_detectors()[detector]
    return partial(constructor, seed=_SEED) if "seed" in inspect.signature(constructor).parameters else constructor


def begun(detector: str, params: Mapping[str, Param], inputs: Sequence[float]) -> base.DriftDetector:
    """A new river object that has processed these inputs."""
    live: base.DriftDetector = _find_constructor(detector)(**params)
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


def _check_parameters(detector: str, params: Mapping[str, Param], memory: int) -> None:
    """Refuse what river would refuse now or at some later input, with the valid values."""
    if not params and detector in _FIRST_REPORT and memory >= 2 * _FIRST_REPORT[detector][1]:
        return  # river's own parameters; policies with them are read without the import of river
    if detector not in drift_detectors():
        from river.drift import binary

        names = ", ".join(drift_detectors())
        if hasattr(binary, detector):
            raise ValueError(f"{detector} of river takes binary errors, not scores; use one of {names}")
        raise ValueError(f"river.drift has no {detector!r} for scores; it has {names}")
    accepted = inspect.signature(drift_detectors()[detector]).parameters
    usable = {
        name: item.default for name, item in accepted.items() if isinstance(item.default, Param) or name == "seed"
    }
    for name, value in (usable | dict(params)).items():
        if name not in usable:
            names = ", ".join(usable) or "none"
            raise ValueError(f"{detector} of river has no parameter {name!r} that can be set; it has {names}")
        _check_param(name, value, usable[name], memory)
    try:
        # As many inputs as its longest window holds: some invalid parameters cause errors only when it is full.
        longest = max([value for value in (usable | dict(params)).values() if type(value) is int], default=0)
        begun(detector, params, [float(index % 3) for index in range(min(longest, memory) + 2)])
    except Exception as error:
        raise ValueError(f"{detector} of river does not take {dict(params)}: {error}") from error


def _check_param(name: str, value: Param | None, default: Param | None, memory: int) -> None:
    if name == "seed":
        if value is not None and (type(value) is not int or not 0 <= value < 2**31):
            raise ValueError(f"seed is {value!r}, not a whole number from 0 to {2**31 - 1}")
    elif type(default) is int:
        if type(value) is not int or not min(default, 1) <= value <= memory // 2:
            raise ValueError(
                f"{name} is {value!r}, not a whole number from {min(default, 1)} to {memory // 2}, half of `memory`"
            )
    elif type(default) is float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, not a number")
    elif type(value) is not type(default):
        raise ValueError(f"{name} is {value!r}, not {'text' if isinstance(default, str) else 'true or false'}")
