"""Changes in what the eval of a run measures: another grader, eval set or number of prompts. Pure.

From the first step of a change on, levels are compared only with each other. Changes are stored by ascending step, one
for each step, the first that was reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from msgspec import Struct
from msgspec.structs import replace

from evalstop_service.domain.fields import doc

MOST_CHANGES = 100


class EvalChange(Struct, frozen=True):
    """From `step` on the eval is measured differently. `version`: the trainer's name for it, if any."""

    step: Annotated[int, doc("the first step measured differently")]
    reason: Annotated[str, doc("what changed")]
    actor: Annotated[str, doc("who reported it")]
    at: Annotated[datetime, doc("when it was reported")]
    version: Annotated[str | None, doc("the eval version from there on; null: not reported")] = None


def find_version(changes: Sequence[EvalChange], step: int) -> int:
    """How many times the measurement had changed by this step."""
    return bisect_right(changes, step, key=lambda change: change.step) if changes else 0


def add_change(changes: Sequence[EvalChange], change: EvalChange) -> tuple[EvalChange, ...]:
    """The changes with another one, unless they already have one at its step."""
    if any(earlier.step == change.step for earlier in changes):
        return tuple(changes)
    return tuple(sorted((*changes, change), key=lambda item: item.step))


def carry_into_attempt(changes: Sequence[EvalChange], resumed_at: int) -> tuple[EvalChange, ...]:
    """The changes for a run resumed after this step. The measurement in force at the end applies from there on."""
    earlier = tuple(change for change in changes if change.step <= resumed_at)
    later = changes[len(earlier) :]
    return (*earlier, replace(later[-1], step=resumed_at + 1)) if later else earlier
