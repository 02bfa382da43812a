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
from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint import noise
from evalstop_detectors.checkpoint.noise import NoiseState
from evalstop_detectors.detectors.detector import EvalDetector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import LARGEST
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
Symmetric = tuple[float, float, float, float, float, float]
"""A symmetric 3 x 3 matrix: the entries 00, 01, 02, 11, 12, 22."""


class Fit(Struct, frozen=True):
    """A fitted form: the index of its own term, the coefficients of 1, d and that term, their covariance up to the
    noise's variance, and the weighted squared misfit."""

    term: int
    theta: Three
    inverse: Symmetric
    misfit: float

    def leverage(self, vector: Three) -> float:
        """The variance of a combination of the coefficients, in units of the noise's."""
        (x, y, z), (a, b, c, d, e, f) = vector, self.inverse
        return max(x * (a * x + b * y + c * z) + y * (b * x + d * y + e * z) + z * (c * x + e * y + f * z), 0.0)

    def own_term(self, d: float) -> float:
        return d * d if self.term == 3 else d * math.log(d) if d > 0 else 0.0

    def vector(self, d: float) -> Three:
        """The vector whose product with the coefficients is the eval score at `d`."""
        return (1.0, d, self.own_term(d))

    def error(self, y: float, z: float, variance: float) -> float:
        """The standard error of y times the second coefficient plus z times the third."""
        _, _, _, d, e, f = self.inverse
        return math.sqrt(variance * max(y * (d * y + e * z) + z * (e * y + f * z), 0.0))

    def below_zero(self, y: float, z: float, variance: float, dof: int) -> float:
        """The posterior probability that y times the second coefficient plus z times the third is negative."""
        return _below_zero(self.theta[1] * y + self.theta[2] * z, self.error(y, z, variance), dof)

    def combined(self, vector: Three) -> float:
        theta = self.theta
        return theta[0] * vector[0] + theta[1] * vector[1] + theta[2] * vector[2]

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
        error = self.error(by_a, by_b, variance)
        return (peak, error) if 0 < peak < math.inf and error < math.inf else None


class GaoFitState(Struct, frozen=True):
    """See the module's docstring. `gram`, `cross` and `square` are the weighted sums over 1, d, d ln d, d^2 (of `gram`
    the upper triangle, row by row), `fits` the forms fitted to them, empty while not determined; `late` holds one
    average for each form, `sd` the noise at the last judgment.

    `path` holds the first of every `stride` distances, by step, `recent` the newest ones.
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
    evidence: Evidence = Evidence(Kind.POSTERIOR, 0.0, None, "waits for an eval and a KL before it")


class GaoFit(EvalDetector[GaoFitState], frozen=True):
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

    def take_kl(self, state: GaoFitState, value: float) -> GaoFitState:
        return replace(state, kl=min(value, _FARTHEST**2) if value > 0 else 0.0)

    def take_eval(self, state: GaoFitState, observation: Observation) -> GaoFitState:
        if state.kl is None:
            return state
        d = math.sqrt(state.kl)
        before, stderr, pairs = state.noise, observation.stderr, state.pairs + 1
        eval_noise = noise.advance(before, observation.value, stderr)
        eval_score = eval_noise.recent[-1]
        log_term, squared = d * math.log(d) if d > 0 else 0.0, d * d
        weight, late = _weigh_eval(eval_noise, stderr), state.late
        if state.fits and state.pairs >= self.least_evals and state.sd > 0:
            eval_score, late = _drawn_in(state, (d, log_term, squared), eval_score, weight)
        by_d, by_log, by_square = weight * d, weight * log_term, weight * squared
        g00, g01, g02, g03, g11, g12, g13, g22, g23, g33 = state.gram
        gram = (
            *(g00 + weight, g01 + by_d, g02 + by_log, g03 + by_square),
            *(g11 + by_d * d, g12 + by_d * log_term, g13 + by_d * squared),
            *(g22 + by_log * log_term, g23 + by_log * squared, g33 + by_square * squared),
        )
        c0, c1, c2, c3 = state.cross
        cross = (
            *(c0 + weight * eval_score, c1 + by_d * eval_score),
            *(c2 + by_log * eval_score, c3 + by_square * eval_score),
        )
        square = state.square + weight * eval_score * eval_score
        path, stride = state.path, state.stride
        if state.pairs % stride == 0:
            path = (*path, (observation.step, d))
            if len(path) > _PATH:
                path, stride = path[::2], 2 * stride
        recent = (*state.recent[1 - _RECENT :], (observation.step, d))
        fits = _fits(gram, cross, square) if pairs >= 5 else ()
        learned = GaoFitState(
            *(state.kl, eval_noise, pairs, gram, cross, square, fits, late, state.sd, path, stride, recent)
        )
        sd, evidence = self._judge_fit(learned, d, observation.step)
        return replace(learned, sd=sd, evidence=evidence)

    def _judge_fit(self, state: GaoFitState, d: float, step: int) -> tuple[float, Evidence]:
        """The noise, once it was needed, and the evidence at an eval."""
        fits = state.fits
        if state.pairs < self.least_evals:
            missing = format_count(self.least_evals - state.pairs, "more eval")
            return state.sd, _silent(f"needs {missing}, each with a KL before it")
        if d <= 0 or not fits:
            return state.sd, _silent("the KL has not moved enough to fit the eval score over it")
        sound = noise.estimate(state.noise)
        least_variance = (sound.sd / 4) ** 2
        if least_variance <= 0:  # of the smallest numbers the square is zero
            return 0.0, _silent("the eval score has not moved")
        fault = self.find_fault(state, fits, sound)
        if fault is not None:
            return sound.sd, _silent(f"the forms do not fit and are not used: {fault}")
        (first, second), dof, inflated = fits, state.pairs - 3, sound.inflation**2
        variance = max(first.misfit / dof, least_variance) * inflated
        other_variance = max(second.misfit / dof, least_variance) * inflated
        least = min(first.misfit, second.misfit)
        weight = math.exp(max((least - first.misfit) / (2 * variance), -700.0))
        other_weight = math.exp(max((least - second.misfit) / (2 * variance), -700.0))
        peak, other_peak = first.peak(variance), second.peak(other_variance)
        falling = weight * self._past(first, peak, d, variance, dof)
        falling += other_weight * self._past(second, other_peak, d, other_variance, dof)
        value = min(max(falling / (weight + other_weight), 0.0), 1.0)
        better, peak = (first, peak) if weight >= other_weight else (second, other_peak)
        turn_step = _find_turn(state, peak, step) if value > 0.5 else None
        note = f"form of {_FORMS[better.term]}: {_describe_fit(state, peak, d)}"
        return sound.sd, Evidence(Kind.POSTERIOR, value, turn_step, note)

    def _past(self, fit: Fit, peak: tuple[float, float] | None, d: float, variance: float, dof: int) -> float:
        """The posterior probability that the eval score falls at `d`, and has fallen by the least share from the
        peak."""
        slope = fit.below_zero(1.0, math.log(d) + 1 if fit.term == 2 else 2 * d, variance, dof)
        if peak is None:
            return slope
        then = min(peak[0], d)
        term, least = fit.own_term(then), self.least_fall
        return min(slope, fit.below_zero(d - then + least * then, fit.own_term(d) - term + least * term, variance, dof))

    def find_fault(self, state: GaoFitState, fits: tuple[Fit, ...], sound: noise.Noise) -> str | None:
        """Why no form applies; None if one does."""
        allowed = (self.misfit + 6 / math.sqrt(state.pairs)) * sound.inflation**2
        if min(fits[0].misfit, fits[1].misfit) / (state.pairs - 3) > allowed * sound.sd**2:
            return "the residuals are larger than the noise"
        late, also = state.late
        if min(abs(late), abs(also)) > _ONE_SIDED * sound.inflation * math.sqrt(_LATE / (2 - _LATE)):
            distances = [d for _, d in state.recent]
            # A fifth of its mean pace, too: in a long run 5 % are more than a steady KL moves in these few evals.
            still = min(0.05, 0.2 * len(distances) / state.pairs) * max(d for _, d in (*state.path, *state.recent))
            if max(distances) - min(distances) < still:
                return "the eval score moves while the KL stands still"
            return "the latest eval scores lie on one side of them"
        return None


def _silent(note: str) -> Evidence:
    return Evidence(Kind.POSTERIOR, 0.0, None, note)


def _weigh_eval(eval_noise: NoiseState, stderr: float | None) -> float:
    """The weight of an eval relative to a usual one."""
    if stderr is None or not 0 < stderr < math.inf or eval_noise.mean_square <= 0:
        return 1.0
    ratio = min(max(math.sqrt(eval_noise.mean_square) / min(stderr, LARGEST), 0.5), 2.0)
    return ratio * ratio


def _drawn_in(state: GaoFitState, terms: Three, eval_score: float, weight: float) -> tuple[float, tuple[float, float]]:
    """The eval score, clipped to some sigmas from the better form's prediction, and the averages of recent
    residuals. `terms`: d, d ln d, d^2."""
    errors, averages = [], []
    for fit, average in zip(state.fits, state.late, strict=True):
        vector = (1.0, terms[0], terms[fit.term - 1])
        predicted = fit.combined(vector)
        expected = state.sd * math.sqrt(1 / weight + fit.leverage(vector))
        sigmas = (eval_score - predicted) / expected
        averages.append((1 - _LATE) * average + _LATE * min(max(sigmas, -_OUTLYING), _OUTLYING))
        errors.append((predicted, _OUTLYING * expected))
    center, reach = errors[0] if state.fits[0].misfit <= state.fits[1].misfit else errors[1]
    return min(max(eval_score, center - reach), center + reach), (averages[0], averages[1])


def _fits(gram: Floats, cross: Floats, square: float) -> tuple[Fit, ...]:
    """The forms fitted to all evals so far; empty if the distances do not determine them."""
    g00, g01, g02, g03, g11, g12, g13, g22, _, g33 = gram
    c0, c1, c2, c3 = cross
    fits = []
    for term, matrix, own in ((2, (g00, g01, g02, g11, g12, g22), c2), (3, (g00, g01, g03, g11, g13, g33), c3)):
        inverse = _inverted(matrix)
        if inverse is None:
            return ()
        a, b, c, d, e, f = inverse
        theta = (a * c0 + b * c1 + c * own, b * c0 + d * c1 + e * own, c * c0 + e * c1 + f * own)
        misfit = max(square - (theta[0] * c0 + theta[1] * c1 + theta[2] * own), 0.0)
        fits.append(Fit(term, theta, inverse, misfit))
    return tuple(fits)


def _inverted(matrix: Symmetric) -> Symmetric | None:
    """The inverse, by the Cholesky factor; None if the matrix is close to singular."""
    m00, m01, m02, m11, m12, m22 = matrix
    if m00 <= 0 or m11 <= 0 or m22 <= 0:
        return None
    a, b, c = 1 / math.sqrt(m00), 1 / math.sqrt(m11), 1 / math.sqrt(m22)
    if a == math.inf or b == math.inf or c == math.inf:
        return None
    r10, r20, r21 = m01 * b * a, m02 * c * a, m12 * c * b
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
    return (
        *(a * a * (1 + i10 * i10 + i20 * i20), a * b * (i10 * i11 + i20 * i21), a * c * i20 * i22),
        *(b * b * (i11 * i11 + i21 * i21), b * c * i21 * i22, c * c * i22 * i22),
    )


def _below_zero(mean: float, error: float, dof: int) -> float:
    """The posterior probability that a number with this estimate is negative."""
    if error <= 0:
        return 0.0
    t = mean / error
    spread = math.sqrt(dof * math.log1p(t * t / dof)) if abs(t) < 1e150 else 1e3
    z = (8 * dof + 1) / (8 * dof + 3) * spread
    return 0.5 * math.erfc(math.copysign(z, t) / math.sqrt(2))


def _find_turn(state: GaoFitState, peak: tuple[float, float] | None, step: int) -> int | None:
    """The last known step before the distance passed the peak; the first one if no peak was passed."""
    since = state.path[-1][0] if state.path else -1  # the newest ones lie past the thinned path, except its end
    top, turn = 0.0 if peak is None else peak[0], None
    for at, d in (*state.path, *(item for item in state.recent if item[0] > since)):
        if at >= step or (turn is not None and d > top):
            break
        turn = at
        if d > top:
            break
    return turn


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
