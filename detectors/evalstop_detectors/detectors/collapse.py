"""The eval score falls at once and stays down: a run that has broken.

Source      Original, from public reports of RL runs: a policy that collapses to a constant, to gibberish or to nothing
            falls within one or two evals, and hardly ever comes back. Learned posteriors see few such runs.
Kernel      A fall is sudden if, in one eval or two, the score goes from near its best to below the line: `share` of the
            rise so far and `sigmas` standard deviations of one eval below the best median of three. It stays down while
            each eval lies below the line and the last three lie on average at most a quarter of the fall above the
            first three. If they lie higher, but still below the line, it counts anew from there: a loss that jumps to
            ten times what it was heals by far more than a quarter when it settles at twice.
Confirmed   A changed grader moves the eval alone. A run has broken if something else changed with it:
            (1) KL is three times as large as ever before within three evals; (2) the last `k` evals moved by at most a
            tenth of what the `k` before the fall did: a constant; (3) the last `k` evals lie on average at most 0.35
            of the rise above the start, or 0.25 below it if the proxy stayed still: a stricter grader takes a part of
            what a run has gained, hardly ever most of it; (4) the proxy jumped, down as the policy broke or
            up as it was exploited, by 0.3 of its range and four times its usual move; (5) a paired evaluation found at
            least half of the fall, three standard errors above it. One that finds less, two standard errors below it,
            clears the fall: the new level is the start.
Age         A run whose proxy fell too may heal by itself, the later the older it is. So (4) needs `k` evals, or a fifth
            of those before the fall if that is more; (1) needs two thirds of `k`, the others `k`. A run that a person
            will roll back to a checkpoint looks the same while it is broken; a stop keeps the checkpoint that they
            would choose.
No rise     A run whose first eval is its best, by twice the range of all later ones, is suspect from its sixth eval on:
            it broke before its second eval, or the first was lucky. One in 400 runs of mere noise looks so. If it still
            looks so after a third of its planned length, it has broken.
State       The noise of the eval score, which holds its last values, the mean of the first three evals, the best median
            of three, the range of all evals but the first, proxy and KL so far, and the fall in progress. O(1).
Evidence    A statistic: the number of evals since the fall, divided by those needed; at most 0.9 while nothing confirms
            the fall. The turn is placed at the last eval before it.
Not done    A grader that changes eval and proxy alike looks the same; declare it. A run that never rose, and whose
            length is not known, is not stopped: a lucky first eval looks the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalstop_detectors.checkpoint.noise import NoiseState, advance, clipped, estimate
from evalstop_detectors.detectors.detector import EvalDetector, Evidence, Kind, Thresholds
from evalstop_detectors.observation import MetricRole, Observation
from evalstop_detectors.summation import LARGEST, add_up
from evalstop_detectors.wording import format_count

_START = 3
_LEAST_EVALS = 5
"""Evals before a fall; from fewer, neither rise nor noise is known."""

_RISEN_SIGMAS = 5.0
_STAY_SIGMAS = 2.0  # above the line: one eval may be lucky
_LEFT, _DEEP = 0.35, 0.25  # of the rise, above and below the start
_NEAR = 0.4  # of the fall: what was lost before the last two evals is no part of a sudden one
_HEALED = 0.25
_UNCONFIRMED = 0.9
_KL_JUMP = 3.0
_QUIET_SHARE = 0.1
_PROXY_SHARE, _PROXY_MOVES = 0.3, 4.0
_MEASURED_SHARE = 0.5  # of the fall, by a paired evaluation
_ABOVE, _BELOW = 3.0, 2.0  # standard errors
_WAIT_AFTER_JUMP = 5  # a fifth of the evals before the fall
_WAIT_AFTER_KL = 2 / 3  # of `k`

_FELL_FIRST = 2.0  # times the range of the later evals, below the first one
_LATE = 1 / 3  # of the plan: a lucky first eval is reached again sooner, or the later ones spread
_QUIET = Evidence(Kind.STATISTIC, 0.0, None, "no sudden fall")


class Course(Struct, frozen=True):
    """The proxy and KL of a run.

    `total` and `count` are those of the proxies since the last eval, relative to the first; `last` their means at the
    last three evals, `low` and `high` the range of the means, `move` their mean change over `moves` evals. `kl` is the
    largest KL since the last eval, `kl_tops` the largest up to each of the last two.
    """

    origin: float | None = None
    total: float = 0.0
    count: int = 0
    last: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0
    move: float = 0.0
    moves: int = 0
    kl: float = 0.0
    kl_tops: tuple[float, ...] = ()

    def add_proxy(self, value: float) -> Course:
        value = clipped(value)
        origin = value if self.origin is None else self.origin
        return replace(self, origin=origin, total=clipped(self.total + clipped(value - origin)), count=self.count + 1)

    def add_eval(self) -> Course:
        """The course up to an eval, which ends what was waiting for it."""
        top = max(self.kl, *self.kl_tops[-1:], 0.0)
        course = replace(self, total=0.0, count=0, kl=0.0, kl_tops=(*self.kl_tops[-1:], top))
        if not self.count:
            return course
        mean = self.total / self.count
        if not self.last:
            return replace(course, last=(mean,), low=mean, high=mean)
        moves = self.moves + 1
        move = self.move + (abs(mean - self.last[-1]) - self.move) / moves
        last = (*self.last[1 - _START :], mean)
        return replace(course, last=last, low=min(self.low, mean), high=max(self.high, mean), move=move, moves=moves)


class Fall(Struct, frozen=True):
    """A fall in progress: the step before it, the `line` below which it stays, its depth, and its last evals.

    `first` is the sum of its first three evals; `evals` counts them and the later ones, since it last healed by a
    quarter. All values are relative to the run's first eval. `age`: evals before it, or before it healed so far.
    `floor`, `deep`: means from here down lie near the start, or far below. `moved`: the range of the last evals before
    it. `proxy`, `jump`, `kl`: what the proxy was, by how much it must change, and what KL must reach. `changed` are sum
    and number of the proxies of its first evals. `certain`, `jumped`, `measured`: (1), (4), (5) of the module's
    docstring.
    """

    before_step: int
    line: float
    depth: float
    age: int
    floor: float
    deep: float
    moved: float
    proxy: float
    jump: float
    kl: float
    evals: int = 0
    first: float = 0.0
    changed: tuple[float, int] = (0.0, 0)
    certain: bool = False
    jumped: bool = False
    measured: bool = False

    @property
    def is_still(self) -> bool:
        """Whether the proxy is known not to have jumped."""
        return self.changed[1] > 1 and not self.jumped


class CollapseState(Struct, frozen=True):
    """See the module's docstring. `steps` are those of the last eval and of the one before it; `later` the
    lowest and highest eval after the first, relative to that one, whose step is `first_step`."""

    noise: NoiseState = NoiseState()
    start: float = 0.0
    top: float = 0.0
    steps: tuple[int, ...] = ()
    first_step: int | None = None
    later: tuple[float, float] = (0.0, 0.0)
    course: Course = Course()
    fall: Fall | None = None
    evidence: Evidence = Evidence(Kind.STATISTIC, 0.0, None, "no evals yet")


class Collapse(EvalDetector[CollapseState], frozen=True):
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
    roles: ClassVar[frozenset[MetricRole]] = frozenset(
        {MetricRole.EVAL, MetricRole.PROXY, MetricRole.KL, MetricRole.PAIRED}
    )
    thresholds: ClassVar[Thresholds] = Thresholds(suspect_at=0.5, stop_at=1.0)
    state_type: ClassVar[type[CollapseState]] = CollapseState

    k: Annotated[int, Meta(ge=3, le=50)] = 6
    sigmas: Annotated[float, Meta(ge=0.01, le=100)] = 6.0
    share: Annotated[float, Meta(ge=0.01, le=100)] = 0.5

    def state_risk(self, stop_at: float) -> float | None:
        # 2 of the 10,000 healthy runs on which shipped policies are calibrated; with 95 % confidence at most 0.07 %.
        return 0.001 if self == Collapse() and stop_at == self.thresholds.stop_at else None

    def take_eval(self, state: CollapseState, observation: Observation) -> CollapseState:
        noise = advance(state.noise, observation.value, observation.stderr)
        last = noise.recent[-_START:]
        start = add_up(last) / len(last) if noise.seen <= _START else state.start
        steps = (*state.steps[-1:], observation.step)
        fall = state.fall or self._find_fall(state, noise.recent)
        if fall is not None:
            fall = _follow(fall, last, state.course, noise.seen)
        top = state.top
        if fall is None:
            middle = sorted(last)[len(last) // 2]
            top = middle if noise.seen <= _START else max(top, middle)
        first_step, (low, high), value = state.first_step, state.later, last[-1]
        if first_step is None:
            first_step = observation.step
        else:
            low, high = (min(low, value), max(high, value)) if noise.seen > 2 else (value, value)
        evidence = _QUIET
        if fall is not None:
            evidence = self._weigh(fall, noise)
        elif noise.seen >= self.k and high < 0 and -high >= _FELL_FIRST * (high - low):
            later = noise.seen - 1
            note = f"the first eval is the best, and all {later} later ones are far below it"
            is_late = (observation.progress or 0.0) >= _LATE
            value = min(later / self.k, 1.0 if is_late else _UNCONFIRMED)
            evidence = Evidence(Kind.STATISTIC, value, first_step, note)
        course = state.course.add_eval()
        return CollapseState(noise, start, top, steps, first_step, (low, high), course, fall, evidence)

    def take_proxy(self, state: CollapseState, value: float) -> CollapseState:
        return replace(state, course=state.course.add_proxy(value))

    def take_kl(self, state: CollapseState, value: float) -> CollapseState:
        course = state.course
        return replace(state, course=replace(course, kl=clipped(value))) if value > course.kl else state

    def take_answer(self, state: CollapseState, observation: Observation) -> CollapseState:
        """Process a paired evaluation: how far the run is below its best."""
        fall, found, stderr = state.fall, -clipped(observation.value), observation.stderr
        if fall is None or stderr is None or not 0 <= stderr < math.inf:
            return state
        error, half = min(stderr, LARGEST), _MEASURED_SHARE * fall.depth
        if found + _BELOW * error < half:
            cleared = Evidence(Kind.STATISTIC, 0.0, None, "a paired evaluation found no fall: the eval has changed")
            return CollapseState(course=state.course, evidence=cleared)
        if found - _ABOVE * error < half:
            return state
        fall = replace(fall, measured=True)
        return replace(state, fall=fall, evidence=self._weigh(fall, state.noise))

    def _find_fall(self, state: CollapseState, recent: tuple[float, ...]) -> Fall | None:
        """The sudden fall of the last eval, if it is deep enough. The noise is that of before this eval: the fall must
        not hide in a noise that it has increased."""
        value, top, rise = recent[-1], state.top, state.top - state.start
        if state.noise.seen < _LEAST_EVALS or not _is_sudden(recent[-3:], top, top - self.share * rise):
            return None
        sd, depth = estimate(state.noise).sd, top - value
        line = top - max(self.share * rise, self.sigmas * sd)
        if value >= line or rise <= _RISEN_SIGMAS * sd:
            return None
        # In one eval, or with one in between.
        for back in (2, 3):
            if top - recent[-back] <= _NEAR * depth:
                before, course = recent[1 - back - self.k : 1 - back], state.course
                return Fall(
                    before_step=state.steps[1 - back],
                    line=line + _STAY_SIGMAS * sd,
                    depth=depth,
                    age=state.noise.seen + 2 - back,
                    floor=state.start + _LEFT * rise,
                    deep=state.start - _DEEP * rise,
                    moved=max(before) - min(before),
                    proxy=sorted(course.last)[len(course.last) // 2] if course.last else 0.0,
                    jump=max(_PROXY_SHARE * (course.high - course.low), _PROXY_MOVES * course.move),
                    kl=_KL_JUMP * min(course.kl_tops),
                )
        return None

    def _weigh(self, fall: Fall, noise: NoiseState) -> Evidence:
        evals = noise.seen - fall.age  # one more than were followed, if the fall took two
        note = f"fell at once and stayed down for {format_count(evals, 'eval')}"
        if fall.certain:
            value = evals / max(_START, math.ceil(_WAIT_AFTER_KL * self.k))
        elif fall.measured or (evals >= self.k and self._has_lost(fall, noise.recent[-self.k :])):
            value = evals / self.k
        elif fall.jumped:
            value = evals / max(self.k, fall.age // _WAIT_AFTER_JUMP)
        else:
            value = min(evals / self.k, _UNCONFIRMED)
            note = f"{note}; only the eval shows it, and a changed grader looks the same"
        return Evidence(Kind.STATISTIC, value, fall.before_step, note)

    def _has_lost(self, fall: Fall, last: tuple[float, ...]) -> bool:
        """Whether the last evals are those of a dead model: a constant, or not far above the start."""
        is_constant = max(last) - min(last) <= _QUIET_SHARE * fall.moved
        return is_constant or add_up(last) <= self.k * (fall.deep if fall.is_still else fall.floor)


def _is_sudden(recent: Sequence[float], top: float, line: float) -> bool:
    """Whether the last of three evals is below the line and one before it near the top."""
    next_to_last, last, value = recent
    near = _NEAR * (top - value)
    return value < line and (top - last <= near or top - next_to_last <= near)


def _follow(fall: Fall, last: tuple[float, ...], course: Course, seen: int) -> Fall | None:
    """The fall after one more eval, the last of `seen`, with the course since the one before; None once it heals."""
    if last[-1] >= fall.line:
        return None
    evals = fall.evals + 1
    if evals > _START:
        healed = add_up(last) - fall.first
        if healed > _START * _HEALED * fall.depth:
            return replace(fall, evals=1, first=last[-1], age=seen - 1)
        return replace(fall, evals=evals)
    total, count = fall.changed
    if course.count:
        total, count = total + course.total / course.count, count + 1
    jumped = count > 1 and fall.jump > 0 and abs(total / count - fall.proxy) >= fall.jump
    return replace(
        fall,
        evals=evals,
        first=fall.first + last[-1],
        changed=(total, count),
        certain=fall.certain or course.kl >= fall.kl > 0,
        jumped=fall.jumped or jumped,
    )
