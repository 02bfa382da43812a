"""Whether a run is past the peak of the eval score over its distance from the initial policy, by the laws of
over-optimization.

Source      Gao, Schulman & Hilton (arXiv 2210.10760): with d = sqrt(KL), the eval score is d (a - b ln d) under
            reinforcement learning and d (a - b d) under best-of-n, with peaks at exp(a/b - 1) and a/(2b). Recursive
            least squares and recursive residuals (Brown, Durbin & Evans 1975); Wallace 1959 for the t distribution.
Departs     An intercept is fitted too, because the eval score does not start at zero. Both forms are fitted, and
            weighted by their fit. An eval score far from its prediction is clipped to four sigmas before it is
            used. Evals are weighted by their standard errors, at most fourfold.
State       Sums of products of 1, d, d ln d, d^2 and the eval score, the noise of the eval score (see `noise`), an
            average of the recent residuals for each form, and at most 32 + 8 past distances. O(1).
Evidence    The posterior probability that the eval score falls at the current distance, and has fallen from the peak by
            more than a share of its rise (a tenth: the best plateau is the fit of a gentle peak). It is 0 with a note
            while the forms do not apply: too few evals, a constant KL, residuals larger than the noise or
            of one sign. The turn is placed where the distance passed the peak.
Not done    A plateau is fitted with a peak and passes for one: over-optimization is an assumption of the forms, not
            their result. Hence only grounds to suspect. KL is taken as exact, although it is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint import noise
from evalstop_detectors.checkpoint.noise import NoiseState
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import LARGEST, add_up
from evalstop_detectors.wording import format_count

_FARTHEST = 1e6  # of distances: a KL of 10^12 nats
_LATE = 0.15  # weight of the newest residual in the average of recent ones
_ONE_SIDED = 4.0  # standard deviations of that average
_OUTLYING = 4.0
_PATH = 32
_RECENT = 8
_FORMS = {2: "reinforcement learning", 3: "best-of-n"}  # by the index of their own term

Three = tuple[float, float, float]
Floats = tuple[float, ...]
_ENTRY = {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 3, (1, 1): 4, (1, 2): 5, (1, 3): 6, (2, 2): 7, (2, 3): 8, (3, 3): 9}


class Fit(Struct, frozen=True):
    """A fitted form: the index of its own term, the coefficients of 1, d and that term, their covariance up to the
    noise's variance, and the weighted squared misfit."""

    term: int
    theta: Three
    inverse: tuple[Three, Three, Three]
    misfit: float

    def leverage(self, vector: Sequence[float]) -> float:
        """The variance of a combination of the coefficients, in units of the noise's."""
        rows = (add_up(a * b for a, b in zip(row, vector, strict=True)) for row in self.inverse)
        return max(add_up(a * b for a, b in zip(vector, rows, strict=True)), 0.0)

    def direction(self, d: float) -> Three:
        """The vector whose product with the coefficients is the slope at `d`."""
        return (0.0, 1.0, math.log(d) + 1 if self.term == 2 else 2 * d)

    def vector(self, d: float) -> Three:
        """The vector whose product with the coefficients is the eval score at `d`."""
        return (1.0, d, d * d if self.term == 3 else d * math.log(d) if d > 0 else 0.0)

    def combined(self, vector: Sequence[float]) -> float:
        return add_up(a * b for a, b in zip(self.theta, vector, strict=True))

    def peak(self, variance: float) -> tuple[float, float] | None:
        """The distance of the peak and its standard error (delta method); None if the form has no peak."""
        _, a, minus_b = self.theta
        if minus_b >= 0 or minus_b * minus_b == 0:  # of the smallest numbers the square is zero
            return None
        ratio = -a / minus_b
        if self.term == 2:
            if abs(ratio) > 50:
                return None
            peak = math.exp(ratio - 1)
            by_a, by_b = -peak / minus_b, peak * a / (minus_b * minus_b)
        else:
            peak = ratio / 2
            by_a, by_b = -0.5 / minus_b, 0.5 * a / (minus_b * minus_b)
        error = math.sqrt(variance * self.leverage((0.0, by_a, by_b)))
        return (peak, error) if 0 < peak < math.inf and error < math.inf else None


class GaoFitState(Struct, frozen=True):
    """See the module's docstring. `gram`, `cross` and `square` are the weighted sums, `fits` the forms fitted to
    them, empty while not determined; `late` holds one average for each form.

    `path` holds the first of every `stride` distances, by step, `recent` the newest ones. `value`, `turn_step` and
    `note` are the evidence at the last eval.
    """

    kl: float | None = None
    noise: NoiseState = NoiseState()
    pairs: int = 0
    gram: Floats = (0.0,) * 10
    cross: Floats = (0.0,) * 4
    square: float = 0.0
    fits: tuple[Fit, ...] = ()
    late: tuple[float, float] = (0.0, 0.0)
    sd: float = 0.0
    path: tuple[tuple[int, float], ...] = ()
    stride: int = 1
    recent: tuple[tuple[int, float], ...] = ()
    value: float = 0.0
    turn_step: int | None = None
    note: str = "waits for an eval and a KL before it"


class GaoFit(Detector[GaoFitState], frozen=True):
    """Fits the eval score over sqrt(KL).

    `least_evals`: the evidence is 0 before this many evals with a KL.
    `least_fall`: a fall from the peak counts if it is larger than this share of the rise to it.
    `misfit`: by what factor the variance of the residuals may exceed that of the noise, in the long run.

    The eval score is d (4 - d) with d = sqrt(KL), which peaks at d = 2:

    >>> detector, state = GaoFit(), GaoFit().start()
    >>> for step in range(80):
    ...     for role, value in ((MetricRole.KL, (step / 20) ** 2), (MetricRole.EVAL, step / 20 * (4 - step / 20))):
    ...         state, evidence = detector.step(state, Observation(role, step, value))
    ...     if evidence.reaches(detector.thresholds.suspect_at):
    ...         print(f"step {step}: {evidence.value:.2f}, turn at step {evidence.turn_step}")
    ...         break
    step 53: 1.00, turn at step 40
    """

    name: ClassVar[str] = "gao_fit"
    kind: ClassVar[Kind] = Kind.POSTERIOR
    roles: ClassVar[frozenset[MetricRole]] = frozenset({MetricRole.KL, MetricRole.EVAL})
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=0.99, stop_at=None)
    state_type: ClassVar[type[GaoFitState]] = GaoFitState

    least_evals: Annotated[int, Meta(ge=5, le=1_000_000)] = 10
    least_fall: Annotated[float, Meta(ge=0, le=1e6)] = 0.1
    misfit: Annotated[float, Meta(ge=1, le=1e6)] = 2.0

    def step(self, state: GaoFitState, observation: Observation) -> tuple[GaoFitState, Evidence]:
        if observation.finite:
            if observation.role is MetricRole.KL:
                state = replace(state, kl=min(max(observation.value, 0.0), _FARTHEST**2))
            elif state.kl is not None:
                state = self._judge_fit(self._learn_eval(state, observation, math.sqrt(state.kl)), observation.step)
        return state, Evidence(Kind.POSTERIOR, state.value, state.turn_step, state.note)

    def _learn_eval(self, state: GaoFitState, observation: Observation, d: float) -> GaoFitState:
        eval_score = noise.from_origin(state.noise, observation.value)
        eval_noise = noise.advance(state.noise, observation.value, observation.stderr)
        basis = (1.0, d, d * math.log(d) if d > 0 else 0.0, d * d)
        weight, late = _weigh_eval(eval_noise, observation.stderr), state.late
        if state.fits and state.pairs >= self.least_evals:
            eval_score, late = _drawn_in(state, basis, eval_score, weight)
        gram = tuple(total + weight * basis[i] * basis[j] for total, (i, j) in zip(state.gram, _ENTRY, strict=True))
        cross = tuple(total + weight * item * eval_score for total, item in zip(state.cross, basis, strict=True))
        square = state.square + weight * eval_score * eval_score
        path, stride = _thinned((*state.path, (observation.step, d)), state.stride, state.pairs)
        return GaoFitState(
            kl=state.kl,
            noise=eval_noise,
            pairs=state.pairs + 1,
            gram=gram,
            cross=cross,
            square=square,
            fits=_fits(gram, cross, square) if state.pairs >= 4 else (),
            late=late,
            path=path,
            stride=stride,
            recent=(*state.recent[1 - _RECENT :], (observation.step, d)),
            sd=state.sd,
        )

    def _judge_fit(self, state: GaoFitState, step: int) -> GaoFitState:
        if state.pairs < self.least_evals:
            missing = format_count(self.least_evals - state.pairs, "more eval")
            return _silent(state, f"needs {missing}, each with a KL before it")
        d, fits = state.recent[-1][1], state.fits
        if d <= 0 or not fits:
            return _silent(state, "the KL has not moved enough to fit the eval score over it")
        sound = noise.estimate(state.noise)
        if (sound.sd / 4) ** 2 <= 0:  # of the smallest numbers the square is zero
            return _silent(replace(state, sd=0.0), "the eval score has not moved")
        state = replace(state, sd=sound.sd)
        fault = self.find_fault(state, fits, sound)
        if fault is not None:
            return _silent(state, f"the forms do not fit and are not used: {fault}")
        dof = state.pairs - 3
        variance = [max(fit.misfit / dof, (sound.sd / 4) ** 2) * sound.inflation**2 for fit in fits]
        least = min(fit.misfit for fit in fits)
        weights = [math.exp(max((least - fit.misfit) / (2 * variance[0]), -700.0)) for fit in fits]
        falling = [self._past(fit, d, spread, dof) for fit, spread in zip(fits, variance, strict=True)]
        value = add_up(w * p for w, p in zip(weights, falling, strict=True)) / add_up(weights)
        better = weights.index(max(weights))
        peak = fits[better].peak(variance[better])
        return replace(
            state,
            value=min(max(value, 0.0), 1.0),
            turn_step=_find_turn(state, peak, step) if value > 0.5 else None,
            note=f"form of {_FORMS[fits[better].term]}: {_describe_fit(state, peak, d)}",
        )

    def _past(self, fit: Fit, d: float, variance: float, dof: int) -> float:
        """The posterior probability that the eval score falls at `d`, and has fallen by the least share from the
        peak."""
        slope = _below_zero(fit.combined(fit.direction(d)), math.sqrt(variance * fit.leverage(fit.direction(d))), dof)
        peak = fit.peak(variance)
        if peak is None:
            return slope
        now, then = fit.vector(d), fit.vector(min(peak[0], d))
        fall = tuple(a - b + self.least_fall * (b - c) for a, b, c in zip(now, then, (1.0, 0.0, 0.0), strict=True))
        fallen = _below_zero(fit.combined(fall), math.sqrt(variance * fit.leverage(fall)), dof)
        return min(slope, fallen)

    def find_fault(self, state: GaoFitState, fits: tuple[Fit, ...], sound: noise.Noise) -> str | None:
        """Why no form applies; None if one does."""
        distances = [d for _, d in state.recent]
        span = max(d for _, d in (*state.path, *state.recent))
        allowed = (self.misfit + 6 / math.sqrt(state.pairs)) * sound.inflation**2
        if min(fit.misfit for fit in fits) / (state.pairs - 3) > allowed * sound.sd**2:
            return "the residuals are larger than the noise"
        bound = _ONE_SIDED * sound.inflation * math.sqrt(_LATE / (2 - _LATE))
        if min(abs(late) for late in state.late) > bound:
            if max(distances) - min(distances) < 0.05 * span:
                return "the eval score moves while the KL stands still"
            return "the latest eval scores lie on one side of them"
        return None


def _silent(state: GaoFitState, note: str) -> GaoFitState:
    return replace(state, value=0.0, turn_step=None, note=note)


def _weigh_eval(eval_noise: NoiseState, stderr: float | None) -> float:
    """The weight of an eval relative to a usual one."""
    if stderr is None or not 0 < stderr < math.inf or eval_noise.mean_square <= 0:
        return 1.0
    ratio = min(max(math.sqrt(eval_noise.mean_square) / min(stderr, LARGEST), 0.5), 2.0)
    return ratio * ratio


def _drawn_in(state: GaoFitState, basis: Floats, eval_score: float, weight: float) -> tuple[float, tuple[float, float]]:
    """The eval score, clipped to some sigmas from the better form's prediction, and the averages of recent
    residuals."""
    if state.sd <= 0:
        return eval_score, state.late
    errors, averages = [], []
    for fit, average in zip(state.fits, state.late, strict=True):
        vector = (1.0, basis[1], basis[fit.term])
        predicted = fit.combined(vector)
        expected = state.sd * math.sqrt(1 / weight + fit.leverage(vector))
        sigmas = (eval_score - predicted) / expected
        averages.append((1 - _LATE) * average + _LATE * min(max(sigmas, -_OUTLYING), _OUTLYING))
        errors.append((predicted, _OUTLYING * expected))
    center, reach = errors[0] if state.fits[0].misfit <= state.fits[1].misfit else errors[1]
    return min(max(eval_score, center - reach), center + reach), (averages[0], averages[1])


def _fits(gram: Floats, cross: Floats, square: float) -> tuple[Fit, ...]:
    """The forms fitted to all evals so far; empty if the distances do not determine them."""
    fits = []
    for term in _FORMS:
        chosen = (0, 1, term)
        inverse = _inverted([[gram[_ENTRY[min(i, j), max(i, j)]] for j in chosen] for i in chosen])
        if inverse is None:
            return ()
        right = [cross[i] for i in chosen]
        theta = [add_up(a * b for a, b in zip(row, right, strict=True)) for row in inverse]
        misfit = max(square - add_up(a * b for a, b in zip(theta, right, strict=True)), 0.0)
        fits.append(Fit(term, (theta[0], theta[1], theta[2]), inverse, misfit))
    return tuple(fits)


def _inverted(matrix: list[list[float]]) -> tuple[Three, Three, Three] | None:
    """The inverse of a symmetric 3 x 3 matrix, by its Cholesky factor; None if it is close to singular."""
    if min(matrix[i][i] for i in range(3)) <= 0:
        return None
    scale = [1 / math.sqrt(matrix[i][i]) for i in range(3)]
    if max(scale) == math.inf:
        return None
    r10 = matrix[1][0] * scale[1] * scale[0]
    r20 = matrix[2][0] * scale[2] * scale[0]
    r21 = matrix[2][1] * scale[2] * scale[1]
    remainder = 1 - r10 * r10
    if remainder < 1e-9:
        return None
    l11 = math.sqrt(remainder)
    l21 = (r21 - r20 * r10) / l11
    remainder = 1 - r20 * r20 - l21 * l21
    if remainder < 1e-9:
        return None
    l22 = math.sqrt(remainder)
    # The inverse of the factor, row by row, and its product with itself.
    i10, i11 = -r10 / l11, 1 / l11
    i20, i21, i22 = (-r20 - l21 * i10) / l22, -l21 * i11 / l22, 1 / l22
    a, b, c = scale
    x00, x11, x22 = a * a * (1 + i10 * i10 + i20 * i20), b * b * (i11 * i11 + i21 * i21), c * c * i22 * i22
    x01, x02, x12 = a * b * (i10 * i11 + i20 * i21), a * c * i20 * i22, b * c * i21 * i22
    return ((x00, x01, x02), (x01, x11, x12), (x02, x12, x22))


def _below_zero(mean: float, error: float, dof: int) -> float:
    """The posterior probability that a number with this estimate is negative."""
    if error <= 0:
        return 0.0
    t = mean / error
    spread = math.sqrt(dof * math.log1p(t * t / dof)) if abs(t) < 1e150 else 1e3
    z = (8 * dof + 1) / (8 * dof + 3) * spread
    return 0.5 * math.erfc(math.copysign(z, t) / math.sqrt(2))


def _thinned(
    path: tuple[tuple[int, float], ...], stride: int, before: int
) -> tuple[tuple[tuple[int, float], ...], int]:
    """The path without its newest entry if that is not due, and with every other entry if it is too long."""
    if before % stride:
        return path[:-1], stride
    return (path[::2], 2 * stride) if len(path) > _PATH else (path, stride)


def _find_turn(state: GaoFitState, peak: tuple[float, float] | None, step: int) -> int | None:
    """The last known step before the distance passed the peak; the first one if no peak was passed."""
    path = [(at, d) for at, d in sorted({*state.path, *state.recent}) if at < step]
    if not path:
        return None
    if peak is None:
        return path[0][0]
    passed = next((index for index, (_, d) in enumerate(path) if d > peak[0]), len(path))
    return path[max(passed - 1, 0)][0]


def _describe_fit(state: GaoFitState, peak: tuple[float, float] | None, d: float) -> str:
    """Describes where the peak is, was, or is expected."""
    if peak is None:
        return f"no peak, sqrt(KL) is {d:.3g}"
    where = f"peak at sqrt(KL) = {peak[0]:.3g} ± {1.96 * peak[1]:.2g}"
    if d >= peak[0]:
        return f"{where}, now at {d:.3g}"
    (first, start), (last, end) = state.recent[0], state.recent[-1]
    if end <= start or last <= first:
        return f"{where}, now at {d:.3g}"
    ahead = (peak[0] - d) * (last - first) / (end - start)
    if ahead > 100 * (last - first):
        return f"{where}, now at {d:.3g} and far from it"
    return f"{where}, now at {d:.3g}; expected near step {last + round(ahead)}"
