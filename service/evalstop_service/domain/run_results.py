"""The results of a run, as rows, responses and events hold them: verdict, best checkpoint, turn, outcome. Pure.

The store and the webhooks know these structs but no detectors. What a later release wrote before a rollback stays
readable: kinds of evidence and roles are plain text here.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from evalstop_service.domain.statuses import RunOutcome


class Call(StrEnum):
    """What a verdict calls for."""

    CONTINUE = "continue"
    SUSPECT = "suspect"
    STOP = "stop"


class Evidence(Struct, frozen=True, cache_hash=True):
    """A detector's reading and its thresholds."""

    detector: str
    roles: tuple[str, ...]
    kind: Annotated[str, Meta(description="the kind of value: a count, a statistic, ...")]
    value: float
    suspect_at: float | None
    stop_at: float | None
    turn_step: int | None
    note: str


class Verdict(Struct, frozen=True):
    """The policy's verdict on the run so far."""

    verdict: Call
    step: int | None
    turn_step: Annotated[int | None, Meta(description="where the detectors believe the turn was")]
    reason: str
    evidence: tuple[Evidence, ...] = ()
    ground: Annotated[str | None, Meta(description="the reason to stop: turned, or levelled_off")] = None
    critical: Annotated[str | None, Meta(description="the critical eval behind it; null: the watched score")] = None

    @property
    def stops(self) -> bool:
        """Whether it calls for a stop."""
        return self.verdict is Call.STOP

    @property
    def reason_in_words(self) -> str:
        """The reason without the names of detectors, for messages to people."""
        words = self.reason
        for item in self.evidence:
            words = words.replace(f"{item.detector}: {item.note}", item.note) if item.note else words
        return words

    @property
    def for_json(self) -> Verdict:
        """The verdict for JSON encoding, with its evidence as already encoded text.

        Evidence is most of a verdict's text, and between two evals only the step changes.
        """
        return msgspec.structs.replace(self, evidence=_encode_evidence(self.evidence))


@lru_cache(maxsize=2_000)
def _encode_evidence(evidence: tuple[Evidence, ...]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(evidence))


class BestCheckpoint(Struct, frozen=True):
    """The checkpoint to ship."""

    step: int
    uri: str
    score: float
    chosen_by: str
    smoothed: Annotated[float | None, Meta(description="the score without most of its noise")] = None
    smoothed_stderr: float | None = None


class RawMaximum(Struct, frozen=True):
    """The highest measured eval, with or without a checkpoint."""

    step: int
    score: float


class ChangePoint(Struct, frozen=True):
    """Where the eval turned, by all evals of an ended run.

    `step`: the last eval before the lasting fall; the peak lies between `low_step` and `high_step`. `gain`: from the
    first eval to the turn, `drop`: from there to the last, both in the unit of the scores, higher is better.
    """

    step: int
    low_step: int
    high_step: int
    gain: float
    drop: float


class Window(Struct, frozen=True):
    """Adjacent evals: the steps of the first, the middle and the last of them, and their mean."""

    first_step: int
    middle_step: int
    last_step: int
    mean: float


class RunAssessment(Struct, frozen=True):
    """The outcome of a run with its reason and the numbers behind it.

    `evals`: the number of finite ones; `window` of them form a mean. `best`, `last`: the means compared. `gain`,
    `drop` and `stderr` (of the drop) are in the unit of the scores, higher is better. None: there were too few evals.
    """

    run_outcome: RunOutcome
    reason: str
    evals: int
    window: int
    best: Window | None = None
    last: Window | None = None
    gain: float | None = None
    drop: float | None = None
    stderr: float | None = None
