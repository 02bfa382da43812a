"""The eval score has fallen from its best and stays down: how large a share of the run, and of what it had gained.

Source      Our own. Kin to scan statistics over windows of geometric lengths (Arias-Castro, Donoho & Huo 2005), and to
            drawdown.
Kernel      For windows of w evals: the best mean of an earlier window minus the mean of the last one, in standard
            deviations of that mean, less sqrt(2 ln(n / w)) for the windows looked at. What exceeds `sigmas`, and more
            while the run has not clearly risen, is a fall that noise does not explain. As a share of the gain so far it
            says how deep the fall is; w / n says how long it has lasted. Their product, length x depth^.4, tells a turn
            from a dip that recovers: dips are sharp but short, or long but shallow. Significance alone does not tell
            them apart, a dip of the curriculum is an event of thirty standard deviations.
Half        The older half of the window must lie below the best too, by half as much at the least. Without that a short
            deep dip at the end of a long window would look like a long one.
Proxy       What pulls both scores down is no over-optimization: three times the proxy's own fall, in its standard
            deviations, is taken off. A proxy that goes on rising over the same windows makes up to three times of the
            number. Without a proxy neither happens.
Recovery    While the last blocks show a significant upward slope the number is 0.
Blocks      Up to 128 evals each is a block of its own. Then blocks are joined in pairs, and so on: a run is always
            seen as 64 to 128 blocks, and the number moves when a block is full. A stop needs a fall that has lasted for
            several hundredths of the run, so that nothing is lost but a delay of less than a 64th of the run.
State       At most 128 blocks of the eval score and proxy, the noise of both, and the best earlier window of each
            length. O(1).
Evidence    A statistic from 0 to 1.5 (to .5 without a proxy that rises); .1 is a tenth of the run with the whole gain
            lost, or a quarter of the run with a tenth of the gain. The turn is placed at the end of the best earlier
            window of the length that alarms most.
Not done    A long deep dip that recovers in the end is a turn to this detector until it recovers. There is no p-value:
            what sets the false stops is which dips occur, not noise; thresholds are calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Annotated, ClassVar, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.calibration import CALIBRATIONS
from evalstop_detectors.checkpoint.noise import LARGEST, Noise, NoiseState, advance, clipped, estimate
from evalstop_detectors.detectors.detector import Changes, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import add_up

BLOCKS = 128
LENGTHS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SLOPE_SPANS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
_SLOPE_SIGMAS = 2.0
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
LARGEST_SIGMAS = 1e9


# What stops these shares of healthy runs with the parameters as they are by default, and is taken with others, too.
_CALIBRATED: dict[float, float] = {
    level["rate"]: level["threshold"]
    for item in CALIBRATIONS
    if item["detector"] == "plateau_drop" and item["params"] == {"sigmas": 1.5, "use_proxy": True}
    for level in item["thresholds"]
}
_UNKNOWN = Noise(0.0, 1.0)
UNMOVED = Evidence(Kind.STATISTIC, 0.0, None, "the eval score has not moved yet")
NO_FALL = Evidence(Kind.STATISTIC, 0.0, None, "the eval score is not below its best by more than its noise")
_RISING = Evidence(Kind.STATISTIC, 0.0, None, "the eval score is below its best and rising")


class Best(Struct, frozen=True):
    """Of the earlier windows of one length: the best mean of the eval score and the block it ends with, and of the
    proxy."""

    score: float
    ends: int
    proxy: float


class PlateauDropState(Struct, frozen=True):
    """See the module's docstring. `size` is how many evals make a block, `open_*` are those of the unfinished one,
    `pending_*` the values of the proxy since the last eval, `top` the best mean of three evals."""

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
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no evals yet")


class PlateauDrop(Struct, frozen=True, forbid_unknown_fields=True):
    """Weighs how long and how deep the eval score has been below its best.

    `sigmas`: how many standard deviations of a fall are put down to noise, on top of what the number of windows looked
    at explains. `use_proxy`: whether the proxy is looked at.
    """

    name: ClassVar[str] = "plateau_drop"
    state_type: ClassVar[type[PlateauDropState]] = PlateauDropState

    sigmas: Annotated[float, Meta(ge=0, le=100)] = 1.5
    use_proxy: bool = True

    @property
    def roles(self) -> frozenset[MetricRole]:
        return frozenset({MetricRole.EVAL, MetricRole.PROXY}) if self.use_proxy else frozenset({MetricRole.EVAL})

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(suspect_at=_CALIBRATED.get(0.05), stop_at=_CALIBRATED.get(0.01))

    def start(self) -> PlateauDropState:
        return PlateauDropState()

    def step(self, state: PlateauDropState, observation: Observation) -> tuple[PlateauDropState, Evidence]:
        state, _ = self.fold(state, None, (observation,))
        return state, state.evidence

    def fold(
        self, state: PlateauDropState, evidence: Evidence | None, observations: Sequence[Observation]
    ) -> tuple[PlateauDropState, Changes]:
        changes: Changes = []
        origin, pending, total = state.proxy_origin, state.pending, state.pending_proxy
        for place, observation in enumerate(observations):
            value = observation.value
            if not math.isfinite(value):
                pass
            elif observation.role is MetricRole.PROXY:  # several values between two evals are averaged
                value = value if -LARGEST <= value <= LARGEST else clipped(value)
                origin = value if origin is None else origin
                moved = value - origin
                total += moved if -LARGEST <= moved <= LARGEST else clipped(moved)
                pending += 1
            else:
                if pending:
                    state = replace(state, proxy_origin=origin, pending=pending, pending_proxy=total)
                    pending, total = 0, 0.0
                state = self._with_eval(state, observation)
            if state.evidence is not evidence:
                evidence = state.evidence
                changes.append((place, evidence))
        if pending != state.pending:
            state = replace(state, proxy_origin=origin, pending=pending, pending_proxy=total)
        return state, changes

    def _with_eval(self, state: PlateauDropState, observation: Observation) -> PlateauDropState:
        top = state.top
        # What the last eval is held against is what was known before it, or a worse one could excuse itself.
        known = estimate(state.noise) if state.open_evals + 1 >= state.size else None
        noise = advance(state.noise, observation.value, observation.stderr)
        last_three = noise.recent[-3:]
        mean = add_up(last_three) / len(last_three)
        state = replace(
            state,
            noise=noise,
            open_evals=state.open_evals + 1,
            open_eval=state.open_eval + noise.recent[-1],
            start=mean if noise.seen <= 3 else state.start,
            top=mean if noise.seen <= 3 else max(top, mean),
        )
        if known is None:
            return _with_proxy_of_eval(state)
        return self._with_block(state, top, known, observation.step)

    def _with_block(self, state: PlateauDropState, top: float, noise: Noise, step: int) -> PlateauDropState:
        """Close the open block and weigh what is there, against `top` and `noise` as they were known before."""
        scores = (*state.scores, state.open_eval / state.size)
        best = _earlier(state, len(scores))
        falls = self.falls(scores, best, state, top, noise) if state.noise.seen >= SOONEST else []
        proxy_noise = estimate(state.proxy_noise) if falls else _UNKNOWN
        state = _with_proxy_of_eval(state)
        state = replace(
            state,
            scores=scores,
            proxy=(*state.proxy, state.open_proxy / state.size),
            steps=(*state.steps, step),
            best=best,
            open_evals=0,
            open_eval=0.0,
            open_proxy=0.0,
        )
        evidence = weigh(state, falls, max(top - state.start, LEAST_GAIN_SIGMAS * noise.sd), noise, proxy_noise)
        state = replace(state, evidence=evidence)
        return _folded(state) if len(scores) == BLOCKS else state

    def falls(
        self, scores: Sequence[float], bests: Sequence[Best], state: PlateauDropState, top: float, noise: Noise
    ) -> list[Fall]:
        """How far the last windows lie below the best earlier ones, where noise does not explain it."""
        if noise.sd == 0:
            return []
        # Until a run has clearly risen its best is the luckiest of many windows, and there is little to lose.
        risen = min((top - state.start) / (LEAST_GAIN_SIGMAS * noise.sd), 1.0)
        doubt = self.sigmas + SIGMAS_IF_NOT_RISEN * (1 - risen)
        one, size, falls = noise.sd * noise.inflation, state.size, []
        for length, best, looks in zip(LENGTHS, bests, LOOKS[len(scores)], strict=False):
            fall = best.score - add_up(scores[-length:]) / length
            if fall > 0:
                sd = one / math.sqrt(length * size)
                sigmas = min(fall / sd, LARGEST_SIGMAS) - looks
                if sigmas - doubt > 0:
                    falls.append(Fall(length, best, looks, sd, sigmas, doubt))
        return falls


class Fall(NamedTuple):
    """Of the last window of so many blocks below the best one: what explains it, and what does not."""

    length: int
    best: Best
    looks: float
    sd: float
    sigmas: float
    doubt: float


def weigh(state: PlateauDropState, falls: Sequence[Fall], gain: float, noise: Noise, proxy_noise: Noise) -> Evidence:
    """The evidence of these falls, once a block is closed."""
    if state.noise.seen < SOONEST:
        return Evidence(Kind.STATISTIC, 0.0, None, f"needs {SOONEST - state.noise.seen} more evals")
    if noise.sd == 0:
        return UNMOVED
    scores, size, evals = state.scores, state.size, len(state.scores) * state.size
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
        weight = length * size / (evals + _EVALS_BEFORE) * depth**_DEPTH_POWER
        weight *= 1 + (_FULL_RISE_FACTOR - 1) * rises
        if weight > value:
            value, depth_seen, length_seen, turn, rises_seen = weight, depth, length, best.ends, rises
    if turn is None:
        return NO_FALL
    if _slopes_up(state, noise):
        return _RISING
    proxy = "not seen" if not state.proxy_noise.seen else "rising" if rises_seen > 0 else "not falling alike"
    return Evidence(
        Kind.STATISTIC,
        value,
        state.steps[turn],
        f"the last {length_seen * size} of {evals} evals lie below the best by at least {depth_seen:.0%} of the gain;"
        f" proxy {proxy}",
    )


def _with_proxy_of_eval(state: PlateauDropState) -> PlateauDropState:
    """Without a new value of the proxy the last one still stands, and says nothing about its noise."""
    noise = advance(state.proxy_noise, state.pending_proxy / state.pending) if state.pending else state.proxy_noise
    # Counted from its first value the proxy is 0 there, and is taken to have been that before it was seen.
    last = noise.recent[-1] if noise.recent else 0.0
    return replace(state, proxy_noise=noise, pending=0, pending_proxy=0.0, open_proxy=state.open_proxy + last)


def _earlier(state: PlateauDropState, count: int) -> tuple[Best, ...]:
    """The best windows with those that have become earlier ones since the last has begun with the newest block."""
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
        # Of equals the later.
        if best.score <= of_eval:
            bests[index] = Best(of_eval, end - 1, max(best.proxy, of_proxy))
        elif best.proxy < of_proxy:
            bests[index] = Best(best.score, best.ends, of_proxy)
    return tuple(bests)


def _folded(state: PlateauDropState) -> PlateauDropState:
    """Join the blocks in pairs, and look for the best earlier windows again."""
    scores, proxy = _paired(state.scores), _paired(state.proxy)
    state = replace(state, size=2 * state.size, scores=scores, proxy=proxy, steps=state.steps[1::2], best=())
    for count in range(1, len(scores) + 1):
        state = replace(state, best=_earlier(state, count))
    return state


def _paired(values: Sequence[float]) -> tuple[float, ...]:
    return tuple((a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=True))


def _of_mean(noise: Noise, evals: int) -> float:
    """The standard deviation of the mean of so many evals."""
    return noise.sd * (noise.inflation if evals > 1 else 1.0) / math.sqrt(evals)


def _slopes_up(state: PlateauDropState, noise: Noise) -> bool:
    """Whether the last blocks have an upward slope at any of several spans."""
    bound = _SLOPE_SIGMAS * noise.inflation * noise.sd / math.sqrt(state.size)
    for span, weights in _SLOPE_WEIGHTS:
        if span > len(state.scores):
            break
        if add_up(map(mul, weights, state.scores[-span:])) >= bound:
            return True
    return False


def _unit_slope(span: int) -> tuple[float, ...]:
    """Weights whose product with values is their least-squares slope in standard deviations, for unit noise."""
    centered = [index - (span - 1) / 2 for index in range(span)]
    norm = math.sqrt(add_up(x * x for x in centered))
    return tuple(x / norm for x in centered)


LOOKS = tuple(
    tuple(math.sqrt(2 * math.log(count / length)) for length in LENGTHS if 2 * length <= count)
    for count in range(BLOCKS + 1)
)
_SLOPE_WEIGHTS = tuple((span, _unit_slope(span)) for span in _SLOPE_SPANS)
