"""Which runs of a sweep are to stop, or to copy a better one: a rule judges a group of runs at equal steps.

Sources     `median`: the Median Stopping Rule (Golovin et al., "Google Vizier", KDD 2017, section 3.2). Stop a run
            whose best score up to step s is below the median of the running means of the others' scores up to s.
            `halving`: Asynchronous Successive Halving (Li et al., arXiv 1810.05934, algorithm 2) in the form that
            stops, as Optuna's SuccessiveHalvingPruner does. Of the n runs that have reached a rung, the best
            max(1, n // eta) go on.
            `pbt`: Population Based Training (Jaderberg et al., arXiv 1711.09846, algorithm 1) with truncation
            selection (section 4.1.1). A run in the bottom share copies one drawn from the top share, and explores by
            factors.
Departs     Scores that differ by less than `sigmas` standard errors of the difference are not ranked; while an error is
            unknown, nothing is. `sigmas` 0 gives the published comparisons. `median` compares with siblings that still
            run, too, because the runs of a sweep start together. `halving` judges a run anew when others reach its
            rung; the paper's promotions are final. Rungs between the same two evals count as one.
Steps       1. Take the scores of each run's newest eval version and current lineage, and estimate their noise.
            2. For each live run find the step at which it is compared: its last eval, its highest rung, or the last
               multiple of `ready_steps` since its lineage began.
            3. Compare it there with the runs that have an eval at or after that step. `halving` takes the first score
               from the rung on, the others smooth the scores up to the step.
Order       The calls depend on the set of members alone. Draws are hashes of the seed, the member and the step, so
            replicas agree.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from sys import float_info
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from evalstop_detectors.checkpoint.choice import Scores
from evalstop_detectors.checkpoint.smoothing import Floats, fit_scores, smooth_scores
from evalstop_detectors.errors import InvalidRule
from evalstop_detectors.summation import LARGEST, find_median
from evalstop_detectors.wording import format_count, format_percent

FEWEST_FOR_NOISE = 5
"""Scores from which a run's own noise is estimated; before, the median of its siblings' noise stands for it."""

_Share = Annotated[float, Meta(ge=0, le=1)]
_Half = Annotated[float, Meta(gt=0, le=0.5)]
_Sigmas = Annotated[float, Meta(ge=0, le=100)]
_Steps = Annotated[int, Meta(ge=0, le=2**53)]
_Count = Annotated[int, Meta(ge=1, le=2**53)]
_Eta = Annotated[int, Meta(ge=2, le=1_000)]
_Factors = Annotated[tuple[Annotated[float, Meta(gt=0, le=1e6)], ...], Meta(min_length=1, max_length=16)]
Setting = float | str  # the value of a hyperparameter
Option = TypeVar("Option")


def _doc(description: str) -> Meta:
    return Meta(description=description)


class Hyperparameter(Struct, frozen=True, forbid_unknown_fields=True):
    """How `pbt` explores a hyperparameter: by factors within bounds, or among choices."""

    factors: Annotated[_Factors, _doc("one of these multiplies the value of the run that is copied")] = (0.8, 1.25)
    low: Annotated[float | None, _doc("the smallest value; null: any")] = None
    high: Annotated[float | None, _doc("the largest value; null: any")] = None
    choices: Annotated[tuple[Setting, ...], _doc("the only values: a number moves to a neighbor, a text to any")] = ()


class GroupRule(Struct, frozen=True, forbid_unknown_fields=True):
    """Compares the runs of a group at equal steps, and stops those that lag, or has them copy a better one."""

    kind: Annotated[Literal["median", "halving", "pbt"], _doc("the rule that compares the runs")]
    action: Annotated[Literal["stop", "park"], _doc("median, halving: what happens to the job of a run")] = "stop"
    mode: Annotated[Literal["shadow", "enforce"], _doc("shadow: decisions are only recorded")] = "shadow"
    from_step: Annotated[_Steps, _doc("median: no run is stopped before this step")] = 0
    fewest: Annotated[_Count, _doc("no run is compared with fewer siblings than this at its step")] = 3
    first_rung: Annotated[_Count, _doc("halving: the step of the first rung")] = 1
    eta: Annotated[_Eta, _doc("halving: one run in `eta` goes on; the next rung is at `eta` times the step")] = 3
    ready_steps: Annotated[_Steps, _doc("pbt: a run is compared each time it has made so many steps")] = 0
    share: Annotated[_Half, _doc("pbt: the bottom share that copies, and the top share that is copied")] = 0.25
    sigmas: Annotated[_Sigmas, _doc("standard errors by which scores must differ to be ranked; 0: by any")] = 1.0
    most_share: Annotated[_Share, _doc("at most this share of the live runs is being stopped at once")] = 0.5
    hyperparameters: Annotated[dict[str, Hyperparameter], _doc("pbt: those that are explored, by name")] = {}


class GroupMember(Struct, frozen=True, eq=False):
    """What was observed of a run of the group.

    `scores`: of its current lineage, higher is better. `since`: the step at which its lineage began: 0, or the step of
    the checkpoint that it copied last. `is_live`: it runs, and nothing is decided about it; others are compared with,
    but never called, and never a source. `sign`: -1 if the eval is minimized, so that reasons have its own values.
    """

    id: str
    scores: Scores
    since: int = 0
    is_live: bool = True
    hyperparameters: dict[str, Setting] = {}
    sign: float = 1.0


class Exploit(Struct, frozen=True):
    """The checkpoint that a run is to load, and the hyperparameters that it is to go on with."""

    source_run: Annotated[str, _doc("the id of the run that is copied")]
    source_step: Annotated[int, _doc("the step of its checkpoint")]
    source_checkpoint: Annotated[str, _doc("the URI of its checkpoint")]
    hyperparameters: Annotated[dict[str, Setting], _doc("those of the run that is copied, explored")]


class GroupCall(Struct, frozen=True):
    """A member is to stop or, with a `source`, to copy another one."""

    member: Annotated[str, _doc("the id of the run")]
    step: Annotated[int, _doc("the step at which it was compared: its last eval, its rung, or where it was ready")]
    reason: Annotated[str, _doc("the reason, for people")]
    score: Annotated[float, _doc("its score as compared; higher is better")]
    compared_with: Annotated[float, _doc("the score that it falls short of")]
    source: Annotated[Exploit | None, _doc("what it is to copy; null: it is to stop")] = None


def check_rule(rule: GroupRule) -> None:
    """Raise InvalidRule if a value is out of its range, or belongs to another kind of rule."""
    try:
        msgspec.convert(msgspec.to_builtins(rule), GroupRule)
    except msgspec.ValidationError as error:
        raise InvalidRule(str(error)) from None
    if rule.kind == "pbt" and (not rule.ready_steps or rule.action != "stop"):
        raise InvalidRule(
            "A rule of kind pbt needs `ready_steps`, the steps between comparisons, and cannot park runs."
        )
    for key, kind in (("hyperparameters", "pbt"), ("ready_steps", "pbt"), ("from_step", "median")):
        if getattr(rule, key) and rule.kind != kind:
            raise InvalidRule(f"`{key}` is for rules of kind {kind}, not {rule.kind}.")
    for name, item in rule.hyperparameters.items():
        bounds = [bound for bound in (item.low, item.high) if bound is not None]
        numbers = [*bounds, *(choice for choice in item.choices if not isinstance(choice, str))]
        if not all(map(math.isfinite, numbers)) or bounds != sorted(bounds):
            raise InvalidRule(f"The numbers of {name} must be finite, and `low` not above `high`.")
        if bounds and item.choices:
            raise InvalidRule(f"{name} has `choices`; leave out `low` and `high`.")


def judge_group(rule: GroupRule, members: Sequence[GroupMember], seed: int) -> list[GroupCall]:
    """The calls of a valid rule for these members, ordered by their ids.

    >>> from evalstop_detectors import Score
    >>> curves = {"a": [1, 2, 3], "b": [1, 3, 4], "c": [2, 2, 5], "d": [0, 1, 1]}
    >>> scores = {name: [Score(step, float(value), 0.0) for step, value in enumerate(curves[name])] for name in curves}
    >>> members = [GroupMember(name, Scores().add_scores(scores[name])) for name in curves]
    >>> [(call.member, call.score, call.compared_with) for call in judge_group(GroupRule("median"), members, seed=0)]
    [('d', 1.0, 2.6666666666666665)]
    """
    curves = _read_curves(sorted(members, key=lambda member: member.id))
    if rule.kind == "pbt":
        return _judge_population(rule, curves, seed)
    return _judge_medians(rule, curves) if rule.kind == "median" else _judge_rungs(rule, curves)


class _Curve(NamedTuple):
    """A member's scores by ascending step, at least one, with the standard error of each; NaN where unknown."""

    member: GroupMember
    steps: list[int]
    values: Floats
    errors: Floats


class _Standing(NamedTuple):
    """What a member is compared by at a step, and its standard error; NaN if unknown."""

    member: GroupMember
    value: float
    error: float

    @property
    def shown(self) -> str:
        """The value as the eval has it, for reasons."""
        return f"{self.member.sign * self.value:.4g}"

    def lags(self, other: _Standing, sigmas: float) -> bool:
        """Whether it is below the other by more than this many standard errors of the difference."""
        # An unknown error is NaN, and a comparison with NaN is false; without sigmas the error does not matter.
        margin = sigmas * math.hypot(self.error, other.error) if sigmas else 0.0
        return self.value + margin < other.value

    def call(self, sigmas: float, step: int, other: _Standing, reason: str, source: Exploit | None = None) -> GroupCall:
        """That it falls short of the other."""
        error = math.hypot(self.error, other.error)
        if sigmas and error:
            reason += f", by {(other.value - self.value) / error:.1f} standard errors ({sigmas:g} needed)"
        return GroupCall(self.member.id, step, reason, self.value, other.value, source)


def _read_curves(members: Sequence[GroupMember]) -> list[_Curve]:
    """The curves of the members that have scores, in the same order."""
    curves = []
    for member in members:
        scores, since = member.scores, member.since
        # Other versions were measured differently. The score at the step of a copy is that of the source.
        kept = (scores.versions == scores.versions[-1:]) & ((scores.steps > since) | (since == 0))
        if kept.any():
            values, errors = np.clip(scores.values[kept], -LARGEST, LARGEST), scores.stderrs[kept]
            known = np.where((errors >= 0) & (errors <= LARGEST), errors, math.nan)
            curves.append(_Curve(member, scores.steps[kept].tolist(), values, known))
    if not any(np.isnan(curve.errors).any() for curve in curves):
        return curves
    noises = [smooth_scores(c.values).noise if len(c.values) >= FEWEST_FOR_NOISE else math.nan for c in curves]
    measured = [noise for noise in noises if noise == noise]
    typical = find_median(measured) if measured else math.nan
    for place, (curve, noise) in enumerate(zip(curves, noises, strict=True)):
        errors = np.where(np.isnan(curve.errors), noise if noise == noise else typical, curve.errors)
        curves[place] = curve._replace(errors=errors)
    return curves


def _compare(
    rule: GroupRule,
    curves: Sequence[_Curve],
    find_step: Callable[[_Curve], int | None],
    stand: Callable[[_Curve, int], _Standing],
) -> Iterator[tuple[_Curve, _Standing, int, list[_Standing]]]:
    """For each live member with enough siblings at its step: its curve and standing, the step, and all standings."""

    @cache  # most members of a group are at the same step
    def rank(step: int) -> list[_Standing]:
        # Evals may arrive late: only one at or after the step shows that those before it are there.
        begun = [c for c in curves if c.steps[-1] >= step and (rule.kind == "halving" or c.steps[0] <= step)]
        # The best first; equals stay in the order of ids.
        return sorted([stand(curve, step) for curve in begun], key=lambda item: -item.value)

    for curve in curves:
        step = find_step(curve) if curve.member.is_live else None
        if step is not None and len(ranked := rank(step)) > rule.fewest:
            yield from ((curve, own, step, ranked) for own in ranked if own.member is curve.member)


def _judge_medians(rule: GroupRule, curves: Sequence[_Curve]) -> list[GroupCall]:
    def find_last(curve: _Curve) -> int | None:
        return curve.steps[-1] if curve.steps[-1] >= rule.from_step else None

    calls = []
    for curve, own, step, ranked in _compare(rule, curves, find_last, _average):
        best = _smooth(curve, step, at_best=True)
        others = [item for item in ranked if item is not own]
        low, high = others[len(others) // 2], others[(len(others) - 1) // 2]
        # The error of the one or two in the middle: that of a median of many is smaller.
        error = low.error if low is high else math.hypot(low.error, high.error) / 2
        median = _Standing(curve.member, (low.value + high.value) / 2, error)
        if best.lags(median, rule.sigmas):
            reason = (
                f"its best score by step {step}, {best.shown}, is worse than the median of the running means of "
                f"{format_count(len(others), 'sibling')}, {median.shown}"
            )
            calls.append(best.call(rule.sigmas, step, median, reason))
    return calls


def _judge_rungs(rule: GroupRule, curves: Sequence[_Curve]) -> list[GroupCall]:
    def find_rung(curve: _Curve) -> int | None:
        rung = rule.first_rung
        while rung * rule.eta <= curve.steps[-1]:
            rung *= rule.eta
        return rung if rung <= curve.steps[-1] else None

    calls = []
    for _, own, rung, ranked in _compare(rule, curves, find_rung, _pick):
        kept = max(1, len(ranked) // rule.eta)
        last = ranked[kept - 1]
        if own.lags(last, rule.sigmas):
            reason = (
                f"its score {own.shown} at the rung of step {rung} is not among the best {kept} of {len(ranked)}, "
                f"the last of which has {last.shown}"
            )
            calls.append(own.call(rule.sigmas, rung, last, reason))
    return calls


def _judge_population(rule: GroupRule, curves: Sequence[_Curve], seed: int) -> list[GroupCall]:
    """1. Find the members in the bottom share at the step at which each is ready.
    2. For each, by id, draw a source from the top share there. What is being copied is not called, and what is called
       is not copied: of two that would copy each other, the first does.
    """

    def find_ready(curve: _Curve) -> int | None:
        rounds = (curve.steps[-1] - curve.member.since) // rule.ready_steps
        return curve.member.since + rounds * rule.ready_steps if rounds > 0 else None

    lagging = []
    for _, own, step, ranked in _compare(rule, curves, find_ready, _smooth):
        # A share such as 0.29 times 100 is slightly less than 29.
        count = max(1, math.floor(rule.share * len(ranked) + 1e-9))
        if own in ranked[-count:]:
            top = [item for item in ranked[:count] if item.member.is_live and own.lags(item, rule.sigmas)]
            lagging.append((own, step, len(ranked), [item for item in top if _list_checkpoints(item.member, step)]))
    calls: list[GroupCall] = []
    called, copied = set[str](), set[str]()
    for own, step, compared, top in lagging:
        sources = [item for item in top if item.member.id not in called]
        if not sources or own.member.id in copied:
            continue
        key = f"{seed} {own.member.id} {step}"
        source = _choose(sources, key)
        called.add(own.member.id)
        copied.add(source.member.id)
        found = source.member
        saved, explored = _list_checkpoints(found, step)[-1], found.hyperparameters.copy()
        for name, item in rule.hyperparameters.items():
            if (value := _explore(item, explored.get(name), f"{key} {name}")) is not None:
                explored[name] = value
        exploit = Exploit(found.id, saved, found.scores.addresses[saved], explored)
        reason = (
            f"its score {own.shown} at step {step} is in the bottom {format_percent(rule.share)} of "
            f"{compared} runs; it copies one of the top, with {source.shown}"
        )
        calls.append(own.call(rule.sigmas, step, source, reason, exploit))
    return calls


def _average(curve: _Curve, step: int) -> _Standing:
    """By the mean of the scores up to the step."""
    count = bisect_right(curve.steps, step)
    error = math.hypot(*curve.errors[:count]) / count
    return _Standing(curve.member, math.fsum(curve.values[:count]) / count, error)


def _pick(curve: _Curve, step: int) -> _Standing:
    """By the first score from the step on."""
    place = bisect_left(curve.steps, step)
    return _Standing(curve.member, float(curve.values[place]), float(curve.errors[place]))


def _smooth(curve: _Curve, step: int, at_best: bool = False) -> _Standing:
    """By the last, or the best, of the smoothed scores up to the step; scores without noise are not smoothed."""
    count = bisect_right(curve.steps, step)
    values, errors = curve.values[:count], curve.errors[:count]
    if not errors.any():
        return _Standing(curve.member, float(values.max() if at_best else values[-1]), 0.0)
    fit = fit_scores(values, errors)
    means = fit.frame.outward(fit.smooth(values), float(values.min()), float(values.max()))
    place = int(np.argmax(means)) if at_best else count - 1
    error = math.hypot(*errors) / math.sqrt(count)
    # The fit takes the range of the scores for the largest noise, which is too little when they are few.
    if fit.sd and error == error:
        error = max(error, fit.frame.width_outward(fit.sd)) * fit.stderr(place, count) / fit.sd
    return _Standing(curve.member, float(means[place]), error)


def _list_checkpoints(member: GroupMember, step: int) -> list[int]:
    """The steps of the checkpoints of its lineage up to this step."""
    saved = member.scores.saved.tolist()
    return [item for item in saved if item <= step and (item > member.since or not member.since)]


def _explore(item: Hyperparameter, value: Setting | None, key: str) -> Setting | None:
    """A new value from that of the source, if it has one, or from the choices."""
    if item.choices:
        numbers = [choice for choice in item.choices if not isinstance(choice, str)]
        if not isinstance(value, float | int) or len(numbers) < len(item.choices):
            return _choose(item.choices, key)
        distances = [abs(number - value) for number in numbers]
        place = distances.index(min(distances)) + _choose((-1, 1), key)
        return numbers[min(max(place, 0), len(numbers) - 1)]
    if not isinstance(value, float | int):
        return value
    # JSON has no infinity.
    low, high = -float_info.max if item.low is None else item.low, float_info.max if item.high is None else item.high
    return min(max(value * _choose(item.factors, key), low), high)


def _choose(options: Sequence[Option], key: str) -> Option:
    return options[int(_draw(key) * len(options))]


def _draw(key: str) -> float:
    """A number of at least 0 and below 1, which is the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / 2**48
