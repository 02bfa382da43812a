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

from evalstop_service.domain.fields import doc
from evalstop_service.domain.statuses import RunOutcome


class Call(StrEnum):
    """What a verdict calls for."""

    CONTINUE = "continue"
    SUSPECT = "suspect"
    STOP = "stop"


class Evidence(Struct, frozen=True, cache_hash=True):
    """A detector's reading and its thresholds."""

    detector: Annotated[str, doc("the name of the detector")]
    roles: Annotated[tuple[str, ...], doc("the roles of the metrics that it uses")]
    kind: Annotated[str, Meta(description="the kind of value: a count, a statistic, ...")]
    value: Annotated[float, doc("the number, in the unit of `kind`")]
    suspect_at: Annotated[float | None, doc("the value from which the verdict is `suspect`; null: never")]
    stop_at: Annotated[float | None, doc("the value from which the verdict is `stop`; null: never")]
    turn_step: Annotated[int | None, doc("the estimated step of the turn; null: no estimate")]
    note: Annotated[str, doc("the evidence, for people")]


class Verdict(Struct, frozen=True):
    """The policy's verdict on the run so far."""

    verdict: Annotated[Call, doc("what to do with the run")]
    step: Annotated[int | None, doc("the step of the observation that led to it; null: none yet")]
    turn_step: Annotated[int | None, doc("the detectors' estimate of the step of the turn")]
    reason: Annotated[str, doc("the reason, for people")]
    evidence: Annotated[tuple[Evidence, ...], doc("the evidence of each detector")] = ()
    ground: Annotated[str | None, doc("why the verdict is `stop`: turned or levelled_off; null: it is not")] = None
    critical: Annotated[str | None, doc("the critical eval that caused it; null: the watched score")] = None

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

    step: Annotated[int, doc("the training step that it holds")]
    uri: Annotated[str, doc("the URI that the trainer reported")]
    score: Annotated[float, doc("the score measured at this step")]
    chosen_by: Annotated[str, doc("the rule that chose it, such as smoothed_maximum or raw_maximum")]
    smoothed: Annotated[float | None, doc("the score smoothed over neighboring evals")] = None
    smoothed_stderr: Annotated[float | None, doc("standard error of `smoothed`")] = None


class RawMaximum(Struct, frozen=True):
    """The highest measured eval, with or without a checkpoint."""

    step: Annotated[int, doc("the training step of the highest eval")]
    score: Annotated[float, doc("the highest eval, as measured")]


class ChangePoint(Struct, frozen=True):
    """Where the eval turned, by all evals of an ended run; higher is better."""

    step: Annotated[int, doc("the last eval before the lasting fall")]
    low_step: Annotated[int, doc("the first step of the range of the peak")]
    high_step: Annotated[int, doc("the last step of the range")]
    gain: Annotated[float, doc("from the first eval to the peak, in the unit of the metric")]
    drop: Annotated[float, doc("from the peak to the last eval")]


class Window(Struct, frozen=True):
    """Adjacent evals: the steps of the first, the middle and the last of them, and their mean."""

    first_step: Annotated[int, doc("step of its first eval")]
    middle_step: Annotated[int, doc("step of its middle eval")]
    last_step: Annotated[int, doc("step of its last eval")]
    mean: Annotated[float, doc("in the unit of the metric")]


class RunAssessment(Struct, frozen=True):
    """The outcome of a run with its reason and the numbers behind it; None: there were too few evals."""

    run_outcome: Annotated[RunOutcome, doc("turned: the eval fell for good; healthy: it did not; undecided: unknown")]
    reason: Annotated[str, doc("the rule that applied, with its numbers")]
    evals: Annotated[int, doc("number of finite evals")]
    window: Annotated[int, doc("number of consecutive evals in a mean")]
    best: Annotated[Window | None, doc("the evals around the peak")] = None
    last: Annotated[Window | None, doc("the evals at the end")] = None
    gain: Annotated[float | None, doc("in the unit of the metric, higher is better; so are drop and stderr")] = None
    drop: Annotated[float | None, doc("from the best mean to the last")] = None
    stderr: Annotated[float | None, doc("the standard error of the drop")] = None
