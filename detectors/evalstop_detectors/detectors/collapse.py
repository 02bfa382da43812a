"""The eval score falls at once and stays down: a run that has broken.

Source      Original, from public reports of RL runs: a policy that collapses to a constant, to gibberish or to nothing
            falls within one or two evals, and hardly ever comes back. Learned posteriors see few such runs.
Kernel      A fall is sudden if, in one eval or two, the score goes from near its best to below the line: `share` of the
            rise so far and `sigmas` standard deviations of one eval below the best median of three. It stays down while
            each eval lies below the line and the last three lie on average at most a quarter of the fall above the
            first three.
State       The noise of the eval score, which holds its last values, the mean of the first three evals, the best median
            of three, and the fall in progress: its line and its evals. O(1).
Evidence    A statistic: the number of evals since the fall, divided by `k`. The turn is placed at the last eval before
            the fall.
Not done    A change of the measurement looks the same; declare it. A run that never rose has nothing to lose.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.noise import NoiseState, advance, estimate
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import add_up
from evalstop_detectors.wording import format_count

_START = 3
_LEAST_EVALS = 5
"""Evals before a fall; from fewer, neither rise nor noise is known."""

_RISEN_SIGMAS = 3.0
_NEAR = 0.4  # of the fall: what was lost before the last two evals is no part of a sudden one
_HEALED = 0.25

_QUIET = Evidence(Kind.STATISTIC, 0.0, None, "no sudden fall")


class Fall(Struct, frozen=True):
    """A fall in progress: the step before it, the `line` below which it stays, its depth, and its last evals.

    `first` is the sum of its first three evals. All values are relative to the run's first eval.
    """

    before_step: int
    line: float
    depth: float
    evals: int = 0
    first: float = 0.0


class CollapseState(Struct, frozen=True):
    """See the module's docstring. `step` and `before_step` are those of the last eval and of the one before it."""

    noise: NoiseState = NoiseState()
    start: float = 0.0
    top: float = 0.0
    steps: tuple[int, ...] = ()
    fall: Fall | None = None
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no evals yet")


class Collapse(Detector[CollapseState], frozen=True):
    """Counts the evals for which a sudden fall has lasted.

    `k`: how many evals make it a collapse. `share` (of the rise so far) and `sigmas`: the least depth.

    A run that rises for 20 evals and then scores nothing:

    >>> detector, state = Collapse(), Collapse().start()
    >>> for step in range(40):
    ...     score = step + 0.3 * (step % 3) if step < 20 else 0.0
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(detector.thresholds.stop_at):
    ...         print(f"step {step}: turned at step {evidence.turn_step}")
    ...         break
    step 25: turned at step 19
    """

    name: ClassVar[str] = "collapse"
    kind: ClassVar[Kind] = Kind.STATISTIC
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=0.5, stop_at=1.0)
    state_type: ClassVar[type[CollapseState]] = CollapseState

    k: Annotated[int, Meta(ge=3, le=50)] = 6
    sigmas: Annotated[float, Meta(ge=0.01, le=100)] = 6.0
    share: Annotated[float, Meta(ge=0.01, le=100)] = 0.5

    def step(self, state: CollapseState, observation: Observation) -> tuple[CollapseState, Evidence]:
        if observation.finite:
            state = self._advance(state, observation)
        return state, state.evidence

    def _advance(self, state: CollapseState, observation: Observation) -> CollapseState:
        # The noise is that of before this eval: the fall must not hide in a noise that it has increased.
        sd = estimate(state.noise).sd
        noise = advance(state.noise, observation.value, observation.stderr)
        last = noise.recent[-_START:]
        start = add_up(last) / len(last) if noise.seen <= _START else state.start
        steps = (*state.steps[-1:], observation.step)
        fall = state.fall or self._find_fall(state, sd, noise.recent[-_START:])
        if fall is not None:
            fall = _follow(fall, last)
        top = state.top
        if fall is None:
            middle = sorted(last)[len(last) // 2]
            top = middle if noise.seen <= _START else max(top, middle)
        return CollapseState(noise, start, top, steps, fall, self._weigh(fall))

    def _find_fall(self, state: CollapseState, sd: float, last: tuple[float, ...]) -> Fall | None:
        rise = state.top - state.start
        if state.noise.seen < _LEAST_EVALS or rise <= _RISEN_SIGMAS * sd:
            return None
        value, line = last[-1], state.top - max(self.share * rise, self.sigmas * sd)
        depth = state.top - value
        if value >= line:
            return None
        # In one eval, or with one in between.
        for back in (2, 3):
            if state.top - last[-back] <= _NEAR * depth:
                return Fall(state.steps[1 - back], line, depth)
        return None

    def _weigh(self, fall: Fall | None) -> Evidence:
        if fall is None:
            return _QUIET
        note = f"fell at once and stayed down for {format_count(fall.evals, 'eval')}"
        return Evidence(Kind.STATISTIC, fall.evals / self.k, fall.before_step, note)


def _follow(fall: Fall, last: tuple[float, ...]) -> Fall | None:
    """The fall after one more eval; None once it heals."""
    if last[-1] >= fall.line:
        return None
    evals = fall.evals + 1
    if evals <= _START:
        return replace(fall, evals=evals, first=fall.first + last[-1])
    healed = add_up(last) - fall.first
    return None if healed > _START * _HEALED * fall.depth else replace(fall, evals=evals)
