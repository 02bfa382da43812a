"""The eval score has fallen from its best and stays down: for what share of the run, and by what share of its gain.

Source      Original. Related to scan statistics over windows of geometric lengths (Arias-Castro, Donoho & Huo 2005),
            and to drawdown.
Kernel      For windows of w evals: the best mean of an earlier window minus the mean of the last one, in standard
            deviations of that mean, less sqrt(2 ln(n / w)) for the number of windows. The excess over `sigmas`, which
            is raised while the run has not clearly risen, is a fall that noise does not explain. As a share of the
            gain so far it is the depth of the fall; w / n is its length. Their product, length x depth^0.4, separates
            a turn from a dip that recovers: dips are sharp but short, or long but shallow. Significance alone does
            not separate them: a dip of the curriculum is an event of thirty standard deviations.
Half        The older half of the window must lie below the best too, by at least half as much. Otherwise a short
            deep dip at the end of a long window would look like a long one.
Length      A dip that heals is short relative to the whole run. Where the planned length is known, w is divided by
            the planned number of evals instead of n, and the number is multiplied by `PLANNED_FACTOR`, so that one
            threshold stops as many healthy runs either way. A plan that is overrun counts as none. Where the
            measurement of the eval changes, the rest of the plan is that of a run that starts there.
Proxy       What lowers both scores is not over-optimization: three times the proxy's own fall, in its standard
            deviations, is subtracted. A proxy that keeps rising over the same windows raises the number up to
            threefold. Without a proxy neither happens.
Recovery    While any span of 3 to 32 last blocks has a significant upward slope the number is 0: also shortly after a
            sharp peak, for as long as the rise to it outweighs the fall since.
Blocks      Up to 128 evals each is a block of its own. Then blocks are joined in pairs, and so on: a run always
            consists of 64 to 128 blocks, and the number changes when a block is full. A stop needs a fall that has
            lasted for several hundredths of the run, so the only cost is a delay of less than a 64th of the run.
State       At most 128 blocks of the eval score and proxy, the noise of both, and the best earlier window of each
            length. O(1).
Evidence    A statistic from 0 to 2.25 (a third of that without a proxy that rises). Without a plan 0.1 is a tenth of
            the run with the whole gain lost, or a quarter of the run with a tenth of the gain. The turn is placed at
            the end of the best earlier window of the length that alarms most.
Not done    A long deep dip counts as a turn until it recovers. There is no p-value: false stops are caused by dips,
            not by noise; thresholds are calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.noise import Noise, NoiseState, advance, clipped, estimate
from evalstop_detectors.detectors.detector import EvalDetector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import add_up, slopes_up
from evalstop_detectors.wording import format_count, format_percent

BLOCKS = 128
LENGTHS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_GAIN_SIGMAS = 6.0
SIGMAS_IF_NOT_RISEN = 4.0
_PROXY_WEIGHT = 3.0
_PROXY_MARGIN = 2.0
_FULL_RISE_FACTOR = 3.0
_DEPTH_POWER = 0.4
_OLDER_HALF_FACTOR = 2.0
_EVALS_BEFORE = 8
_FULL_RISE_SIGMAS = 5.0
SOONEST = 6
PLANNED_FACTOR = 1.5
"""The ratio of the thresholds that stop 1 % of healthy runs without and with a known length, on 1,500 calibration runs:
1.5 with a proxy, 1.6 without; at 5 % 1.6 and 1.7."""
LARGEST_SIGMAS = 1e9


_UNKNOWN = Noise(0.0, 1.0)
UNMOVED = Evidence(Kind.STATISTIC, 0.0, None, "the eval score has not moved yet")
NO_FALL = Evidence(Kind.STATISTIC, 0.0, None, "the eval score is not below its best by more than its noise")
_RISING = Evidence(Kind.STATISTIC, 0.0, None, "the eval score is below its best, but a span of last evals slopes up")


class Best(Struct, frozen=True):
    """For the earlier windows of one length: the best mean of the eval score, its last block, and the proxy's mean."""

    score: float
    ends: int
    proxy: float


class PlateauDropState(Struct, frozen=True):
    """See the module's docstring. `size` is the number of evals in a block, `open_*` are those of the unfinished one,
    `pending_*` the values of the proxy since the last eval, `top` the best mean of three evals. `progress` is that of
    the last eval, `planned_from` where the measurement began."""

    noise: NoiseState = NoiseState()
    proxy_noise: NoiseState = NoiseState()
    size: int = 1
    scores: tuple[float, ...] = ()
    proxy: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    best: tuple[Best, ...] = ()
    open_evals: int = 0
    open_eval: float = 0.0
    open_proxy: float = 0.0
    proxy_origin: float | None = None
    pending: int = 0
    pending_proxy: float = 0.0
    start: float = 0.0
    top: float = 0.0
    progress: float = 0.0
    planned_from: float = 0.0
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no evals yet")


class PlateauDrop(EvalDetector[PlateauDropState], frozen=True):
    """Weighs how long and how deep the eval score has been below its best.

    `sigmas`: how many standard deviations of a fall are attributed to noise, in addition to the correction for the
    number of windows. `use_proxy`: whether the proxy is used.

    A run that rises for 30 evals and then falls, with the threshold of 1 % of healthy runs:

    >>> detector, state = PlateauDrop(), PlateauDrop().start()
    >>> for step in range(80):
    ...     score = min(step, 60 - step)
    ...     state, evidence = detector.step(state, Observation(MetricRole.EVAL, step, score))
    ...     if evidence.reaches(0.194):
    ...         print(f"step {step}: {evidence.value:.3f}, turn at step {evidence.turn_step}")
    ...         break
    step 59: 0.199, turn at step 35
    """

    name: ClassVar[str] = "plateau_drop"
    kind: ClassVar[Kind] = Kind.STATISTIC
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=None, stop_at=None)  # calibrated ones come with the policy
    state_type: ClassVar[type[PlateauDropState]] = PlateauDropState

    sigmas: Annotated[float, Meta(ge=0, le=100)] = 1.5
    use_proxy: bool = True

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({MetricRole.EVAL, MetricRole.PROXY}) if self.use_proxy else frozenset({MetricRole.EVAL})

    def start_anew(self, state: PlateauDropState) -> PlateauDropState:
        """Drops the levels; keeps the rest of the plan."""
        return PlateauDropState(progress=state.progress, planned_from=state.progress)

    def take_values(self, state: PlateauDropState, proxies: Sequence[float], kls: Sequence[float]) -> PlateauDropState:
        """Add up the proxies since the last eval; their mean counts."""
        origin, pending, total = state.proxy_origin, state.pending, state.pending_proxy
        for value in map(clipped, filter(math.isfinite, proxies)):
            origin = value if origin is None else origin
            total += clipped(value - origin)
            pending += 1
        if pending == state.pending:
            return state
        return replace(state, proxy_origin=origin, pending=pending, pending_proxy=total)

    def take_eval(self, state: PlateauDropState, observation: Observation) -> PlateauDropState:
        progress = observation.progress
        done = min(max(state.progress, progress or 0.0), 1.0)  # NaN is never the larger one
        closes = state.open_evals + 1 >= state.size
        # An eval is compared with what was known before it, or a bad one could excuse itself; and an estimate is
        # cheaper before `advance`.
        estimated = estimate(state.noise) if closes else _UNKNOWN
        noise = advance(state.noise, observation.value, observation.stderr)
        last_three = noise.recent[-3:]
        mean = add_up(last_three) / len(last_three)
        start, top = (mean, mean) if noise.seen <= 3 else (state.start, max(state.top, mean))
        proxy_noise, open_proxy = _with_proxy_of_eval(state)
        after = replace(
            state,
            noise=noise,
            proxy_noise=proxy_noise,
            open_evals=state.open_evals + 1,
            open_eval=state.open_eval + noise.recent[-1],
            open_proxy=open_proxy,
            pending=0,
            pending_proxy=0.0,
            start=start,
            top=top,
            progress=done,
        )
        if not closes:
            return after
        scores = (*state.scores, after.open_eval / state.size)
        best = _earlier(state, len(scores))
        falls = self.falls(scores, best, state, state.top, estimated) if noise.seen >= SOONEST else []
        known_proxy = estimate(state.proxy_noise) if falls else _UNKNOWN
        proxies, steps = (*state.proxy, open_proxy / state.size), (*state.steps, observation.step)
        closed = replace(
            after, scores=scores, proxy=proxies, steps=steps, best=best, open_evals=0, open_eval=0.0, open_proxy=0.0
        )
        evidence = weigh(
            closed, falls, max(state.top - start, LEAST_GAIN_SIGMAS * estimated.sd), estimated, known_proxy, progress
        )
        if evidence is not closed.evidence:
            closed = replace(closed, evidence=evidence)
        return _folded(closed) if len(scores) == BLOCKS else closed

    def falls(
        self, scores: Sequence[float], bests: Sequence[Best], state: PlateauDropState, top: float, noise: Noise
    ) -> list[Fall]:
        """How far the last windows lie below the best earlier ones beyond what noise explains."""
        if noise.sd == 0:
            return []
        # Until a run has clearly risen, its best is the maximum of many noisy windows, and there is little to lose.
        risen = min((top - state.start) / (LEAST_GAIN_SIGMAS * noise.sd), 1.0)
        doubt = self.sigmas + SIGMAS_IF_NOT_RISEN * (1 - risen)
        block_sd, size, falls = noise.sd * noise.inflation, state.size, []
        for length, best, looks in zip(LENGTHS, bests, LOOKS[len(scores)], strict=False):
            fall = best.score - add_up(scores[-length:]) / length
            if fall > 0:
                sd = block_sd / math.sqrt(length * size)
                sigmas = min(fall / sd, LARGEST_SIGMAS) - looks
                if sigmas - doubt > 0:
                    falls.append(Fall(length, best, looks, sd, sigmas, doubt))
        return falls


class Fall(NamedTuple):
    """The fall of the last window of this many blocks below the best one: the part explained by noise, and the rest."""

    length: int
    best: Best
    looks: float
    sd: float
    sigmas: float
    doubt: float


def weigh(
    state: PlateauDropState,
    falls: Sequence[Fall],
    gain: float,
    noise: Noise,
    proxy_noise: Noise,
    progress: float | None,
) -> Evidence:
    """The evidence of these falls, when a block is closed; `progress`: of the last eval."""
    if state.noise.seen < SOONEST:
        return Evidence(Kind.STATISTIC, 0.0, None, f"needs {format_count(SOONEST - state.noise.seen, 'more eval')}")
    if noise.sd == 0:
        return UNMOVED
    scores, size, evals = state.scores, state.size, len(state.scores) * state.size
    factor, divisor = _relate_to_run(evals, state.planned_from, progress)
    value, depth_seen, length_seen, turn, rises_seen = 0.0, 0.0, 0, None, 0.0
    for length, best, looks, sd, sigmas, doubt in falls:
        fall_of_proxy = 0.0
        if proxy_noise.sd > 0:
            fall_of_proxy = (best.proxy - add_up(state.proxy[-length:]) / length) / _of_mean(proxy_noise, length * size)
        common = max(0.0, min(fall_of_proxy, LARGEST_SIGMAS) - looks + _PROXY_MARGIN)
        excess = sigmas - _PROXY_WEIGHT * common - doubt
        if excess <= 0:
            continue
        half = length // 2
        older = best.score - add_up(scores[-length : half - length]) / half - _of_mean(noise, half * size)
        depth = min(1.0, excess * sd / gain, _OLDER_HALF_FACTOR * older / gain)
        if depth <= 0:
            continue
        rises = min(max((-fall_of_proxy - 1) / (_FULL_RISE_SIGMAS - 1), 0.0), 1.0)
        weight = factor * length * size / divisor * depth**_DEPTH_POWER
        weight *= 1 + (_FULL_RISE_FACTOR - 1) * rises
        if weight > value:
            value, depth_seen, length_seen, turn, rises_seen = weight, depth, length, best.ends, rises
    if turn is None:
        return NO_FALL
    if slopes_up(scores, noise.inflation * noise.sd / math.sqrt(size)):
        return _RISING
    proxy = "not seen" if not state.proxy_noise.seen else "rising" if rises_seen > 0 else "not falling alike"
    return Evidence(
        Kind.STATISTIC,
        value,
        state.steps[turn],
        f"the last {length_seen * size} of {evals} evals lie below the best by at least"
        f" {format_percent(depth_seen)} of the gain; proxy {proxy}",
    )


def _relate_to_run(evals: int, planned_from: float, progress: float | None) -> tuple[float, float]:
    """The factor and the divisor of a window's length: by the planned evals of the run, if known, else by those so far.

    A plan that is overrun counts as none.
    """
    if progress is not None and planned_from < progress < 1:
        return PLANNED_FACTOR, evals * (1 - planned_from) / (progress - planned_from) + _EVALS_BEFORE
    return 1.0, evals + _EVALS_BEFORE


def _with_proxy_of_eval(state: PlateauDropState) -> tuple[NoiseState, float]:
    """The proxy's noise, and the sum of the unfinished block, with the mean of the proxies since the last eval.

    Without a new value of the proxy the last one still applies, but does not update its noise. Relative to its first
    value the proxy is 0 there, and is taken as 0 before it was seen.
    """
    noise = advance(state.proxy_noise, state.pending_proxy / state.pending) if state.pending else state.proxy_noise
    return noise, state.open_proxy + (noise.recent[-1] if noise.recent else 0.0)


def _earlier(state: PlateauDropState, count: int) -> tuple[Best, ...]:
    """The best windows, including those that became earlier ones now that the last starts at the newest block."""
    scores, proxy, bests = state.scores, state.proxy, list(state.best)
    for index, length in enumerate(LENGTHS):
        end = count - length
        begin = end - length
        if begin < 0:
            break
        of_eval, of_proxy = add_up(scores[begin:end]) / length, add_up(proxy[begin:end]) / length
        if index == len(bests):
            bests.append(Best(of_eval, end - 1, of_proxy))
            continue
        best = bests[index]
        # Of equals, the later.
        if best.score <= of_eval:
            bests[index] = Best(of_eval, end - 1, max(best.proxy, of_proxy))
        elif best.proxy < of_proxy:
            bests[index] = Best(best.score, best.ends, of_proxy)
    return tuple(bests)


def _folded(state: PlateauDropState) -> PlateauDropState:
    """Join the blocks in pairs, and find the best earlier windows again."""
    scores, proxy = _paired(state.scores), _paired(state.proxy)
    state = replace(state, size=2 * state.size, scores=scores, proxy=proxy, steps=state.steps[1::2], best=())
    for count in range(1, len(scores) + 1):
        state = replace(state, best=_earlier(state, count))
    return state


def _paired(values: Sequence[float]) -> tuple[float, ...]:
    return tuple((a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=True))


def _of_mean(noise: Noise, evals: int) -> float:
    """The standard deviation of the mean of this many evals."""
    return noise.sd * (noise.inflation if evals > 1 else 1.0) / math.sqrt(evals)


LOOKS = tuple(
    tuple(math.sqrt(2 * math.log(count / length)) for length in LENGTHS if 2 * length <= count)
    for count in range(BLOCKS + 1)
)
