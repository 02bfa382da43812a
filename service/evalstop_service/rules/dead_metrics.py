"""Which of a run's metrics tell its detectors nothing any more. Pure.

| kind | what is seen | from when on |
|---|---|---|
| `not_finite` | it is NaN or infinite | 3 values in a row: one is a hiccup, three are a broken eval |
| `constant` | its values are the same to the last bit | 8 in a row and 3 times as many as ever before |
| `ceased` | it came and comes no more while others go on: perhaps it was renamed | 5 times its longest gap |
| `missing` | it never came while others go on: perhaps it has another name | a third of the steps, or 6 hours |

Noise repeats itself: a score over 100 questions is the one before about once in seven evals, eight times in a row once
in a million windows. A coarser one, such as won or lost, shows by its own past how long it stays the same.

A gap is measured in steps and in time, and both must be exceeded: evals that are made elsewhere arrive late by many
steps but come as regularly as ever, and a trainer that waits loses time but no steps. Gaps may grow: five times passes
evals at steps 1, 2, 4, 8. Two or three values show one or two gaps, which is little: then it is ten times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby, pairwise
from typing import NamedTuple

NEWEST = 32
"""As many of a metric's newest values are looked at."""

NOT_FINITE = 3
SAME, SAME_TIMES = 8, 3
CEASED_GAPS, CEASED_GAPS_OF_FEW, FEW = 5.0, 10.0, 4
MISSING_SHARE, MISSING_SECONDS = 1 / 3, 6 * 3600.0


class Reading(NamedTuple):
    """One value of a metric, and when it came; NaN and the infinities included."""

    step: int
    value: float
    received_at: datetime


@dataclass(frozen=True)
class Progress:
    """How far a run has come: in any metric, whether watched or not.

    `begun_at`: its present attempt; `heard_at`: the last post; `last_step`: None when nothing was observed.
    """

    begun_at: datetime
    heard_at: datetime
    last_step: int | None
    total_steps: int | None = None


@dataclass(frozen=True)
class Dead:
    """A metric that tells its detectors nothing: in which way, and in words."""

    metric: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Watched:
    """A metric that a policy needs, and its newest readings by ascending step, at most `NEWEST`.

    `promised`: the trainer named it, or nothing is decided without it; any other may be missing.
    """

    metric: str
    readings: Sequence[Reading] = field(default_factory=tuple)
    promised: bool = True


def dead(metrics: Sequence[Watched], progress: Progress) -> tuple[Dead, ...]:
    """The dead ones among these metrics, in their order."""
    if progress.last_step is None:  # nothing goes on that it could have fallen behind
        return ()
    found = ((watched.metric, _of(watched, progress)) for watched in metrics)
    return tuple(Dead(metric, *why) for metric, why in found if why is not None)


def _of(watched: Watched, progress: Progress) -> tuple[str, str] | None:
    readings = watched.readings
    if not readings:
        return _missing(progress) if watched.promised else None
    return _ceased(readings, progress) or _not_finite(readings) or _constant(readings)


def _missing(progress: Progress) -> tuple[str, str] | None:
    assert progress.last_step is not None, "something was observed"
    seconds = (progress.heard_at - progress.begun_at).total_seconds()
    if progress.total_steps is not None:
        late = progress.last_step >= MISSING_SHARE * progress.total_steps
    else:
        late = seconds >= MISSING_SECONDS
    if not late:
        return None
    return "missing", f"it never came, while others have reached step {progress.last_step}; is it called otherwise?"


def _ceased(readings: Sequence[Reading], progress: Progress) -> tuple[str, str] | None:
    assert progress.last_step is not None, "something was observed"
    last = readings[-1]
    came = sorted({reading.received_at for reading in readings})
    # Of a single value, or of many that came in one post, the way to it is the only gap there is.
    steps = [after.step - before.step for before, after in pairwise(readings)] or [last.step]
    seconds = [(after - before).total_seconds() for before, after in pairwise(came)]
    seconds = seconds or [(came[0] - progress.begun_at).total_seconds()]
    allowed = CEASED_GAPS if len(readings) >= FEW else CEASED_GAPS_OF_FEW
    behind_steps = progress.last_step - last.step
    behind_seconds = (progress.heard_at - came[-1]).total_seconds()
    if behind_steps <= allowed * max(1, *steps) or behind_seconds <= allowed * max(0.0, *seconds):
        return None
    return "ceased", f"it last came at step {last.step}, and others are at step {progress.last_step}; was it renamed?"


def _not_finite(readings: Sequence[Reading]) -> tuple[str, str] | None:
    newest = readings[-NOT_FINITE:]
    if len(newest) < NOT_FINITE or any(math.isfinite(reading.value) for reading in newest):
        return None
    return "not_finite", f"its last {NOT_FINITE} values are NaN or infinite"


def _constant(readings: Sequence[Reading]) -> tuple[str, str] | None:
    lengths = [len(list(same)) for _, same in groupby(reading.value for reading in readings)]
    # The first stretch may have begun before what is looked at, so it says at least as much.
    if lengths[-1] < max(SAME, SAME_TIMES * max(lengths[:-1], default=0)):
        return None
    return "constant", f"its last {lengths[-1]} values are the same, {readings[-1].value:g}"


def as_json(found: Sequence[Dead]) -> list[dict[str, str]]:
    """Dead metrics as they are stored and answered."""
    return [{"metric": one.metric, "kind": one.kind, "reason": one.reason} for one in found]


def news(before: Sequence[Mapping[str, str]], found: Sequence[Dead]) -> list[Dead]:
    """Those of the dead that were not dead in the same way before."""
    known = {(one["metric"], one["kind"]) for one in before}
    return [one for one in found if (one.metric, one.kind) not in known]


def differ(before: Sequence[Mapping[str, str]], found: Sequence[Dead]) -> bool:
    """Whether other metrics are dead now than before, or in another way."""
    return len(before) != len(found) or bool(news(before, found))
