"""Rules on any metric of a run, as people write them: they notify, and never stop. Pure.

kl > 20                             the newest value
loss change > 0.5 over 20           less the value 20 observations before
grad_norm z_score > 6 over 50       in standard deviations from the mean of the 50 observations before
eval/gsm8k absent_for 2h            no value for so long
kl > 20 every 6h                    at most one notice of a run in 6 hours; otherwise in one
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

from msgspec import Struct

from evalstop_service.domain.fields import check_name, doc
from evalstop_service.domain.times import format_duration, parse_duration

MOST_OVER = 200
"""The most earlier observations that a rule compares with."""

PAUSE_SECONDS = 3600.0

_NUMBER = r"-?[0-9]{1,12}(?:\.[0-9]{1,12})?(?:e-?[0-9]{1,2})?"
_TIME = "[1-9][0-9]{0,3}[mhd]"
_BOUND = rf"([<>]) ({_NUMBER})"
PATTERN = (
    rf"^([^\x00-\x20\x7f-\x9f,]{{1,256}}) (?:{_BOUND}|(change|z_score) {_BOUND}"
    rf"(?: over ([2-9]|[1-9][0-9]|1[0-9]{{2}}|200))?|absent_for ({_TIME}))(?: every ({_TIME}))?$"
)


class RuleKind(StrEnum):
    """What a rule compares with its bound."""

    THRESHOLD = "threshold"
    CHANGE = "change"
    Z_SCORE = "z_score"
    ABSENT_FOR = "absent_for"


class MetricRule(NamedTuple):
    """A rule. `over`: how many earlier observations it needs. `bound`: of `absent_for`, in seconds."""

    text: str
    metric: str
    kind: RuleKind
    is_above: bool
    bound: float
    over: int
    pause_seconds: float


Point = tuple[int, float]
"""A step, and the value of a metric there."""


class RuleBreach(Struct, frozen=True):
    """A rule of the project that a run met."""

    rule: Annotated[str, doc("the rule, as the project states it")]
    metric: Annotated[str, doc("the name of the series")]
    step: Annotated[int | None, doc("the step that met it; null: the metric is absent")]
    value: Annotated[float | None, doc("the value there; null: the metric is absent")]
    reason: Annotated[str, doc("what was found, for people")]


_OVER = {RuleKind.CHANGE: 1, RuleKind.Z_SCORE: 20}
"""How many earlier observations a rule needs that does not say."""


def parse_rule(text: str) -> MetricRule:
    """The rule that a text states; raises ValueError.

    >>> parse_rule("loss change > 0.5 over 20 every 6h")[1:]
    ('loss', <RuleKind.CHANGE: 'change'>, True, 0.5, 20, 21600.0)
    """
    match = re.fullmatch(PATTERN, check_name(text))
    if match is None:
        raise ValueError(
            "a rule is written as `kl > 20`, `loss change > 1 over 20`, `kl z_score > 6`, `kl absent_for 2h`"
        )
    metric, sign, bound, kind, other_sign, other_bound, over, absent, pause = match.groups()
    kind = RuleKind(kind or (RuleKind.ABSENT_FOR if absent else RuleKind.THRESHOLD))
    number = parse_duration(absent) if absent else float(bound or other_bound)
    pause_seconds = parse_duration(pause) if pause else PAUSE_SECONDS
    is_above = ">" in (sign, other_sign)
    return MetricRule(text, metric, kind, is_above, number, int(over or _OVER.get(kind, 0)), pause_seconds)


def find_breach(rule: MetricRule, points: Sequence[Point]) -> RuleBreach | None:
    """What meets the rule at the last of these points, which are in the order of their steps; None: nothing does."""
    if rule.kind is RuleKind.ABSENT_FOR or len(points) <= rule.over:
        return None
    step, value = points[-1]
    earlier = [value for _, value in points[-1 - rule.over : -1]]
    compared, said = value, ""
    if rule.kind is RuleKind.CHANGE:
        compared = value - earlier[0]
        said = f", {compared:+.4g} since step {points[-1 - rule.over][0]}"
    elif rule.kind is RuleKind.Z_SCORE:
        spread = statistics.pstdev(earlier) if all(map(math.isfinite, earlier)) else 0.0
        if not spread:
            return None
        compared = (value - statistics.fmean(earlier)) / spread
        said = f", {compared:+.3g} standard deviations from the {rule.over} values before"
    if not (compared > rule.bound if rule.is_above else compared < rule.bound):
        return None
    shown = value if math.isfinite(value) else None
    return RuleBreach(rule.text, rule.metric, step, shown, f"{rule.metric} is {value:.4g} at step {step}{said}")


def find_absence(rule: MetricRule, silent_seconds: float) -> RuleBreach | None:
    """What meets the rule when the metric has had no value for so long; None: nothing does."""
    if rule.kind is not RuleKind.ABSENT_FOR or silent_seconds < rule.bound:
        return None
    reason = f"{rule.metric} has had no value for {format_duration(silent_seconds)}"
    return RuleBreach(rule.text, rule.metric, None, None, reason)
