"""What policies are made of and what they reach: calls, grounds, actions, guards, verdicts, all detectors by name, and
what a type allows."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, inspect

from evalstop_detectors.detectors.collapse import Collapse
from evalstop_detectors.detectors.detector import Detector, Evidence, Kind
from evalstop_detectors.detectors.divergence import Divergence
from evalstop_detectors.detectors.focus import Focus
from evalstop_detectors.detectors.gao_fit import GaoFit
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.detectors.non_finite import NonFinite
from evalstop_detectors.detectors.posterior import Posterior
from evalstop_detectors.detectors.river_drift import RiverDrift
from evalstop_detectors.detectors.sudden_change import SuddenChange
from evalstop_detectors.observation import MetricRole


class Call(StrEnum):
    """What a verdict calls for."""

    CONTINUE = "continue"
    SUSPECT = "suspect"
    STOP = "stop"


class Action(StrEnum):
    """What a stop asks for: that the job ends, or that it is parked until it recovers."""

    STOP = "stop"
    PARK = "park"


class GuardKind(StrEnum):
    """Guards that put a stop on hold, whatever the detectors say, unless the policy overrides them.

    `stale`: the run has not reported for long. `metric_fault`: a metric that stops it is missing, has ceased,
    does not change or is not finite. `no_checkpoint`: stopping the run would leave no best checkpoint.
    """

    STALE = "stale"
    METRIC_FAULT = "metric_fault"
    NO_CHECKPOINT = "no_checkpoint"


OUTLOOK = "levelled_off"
"""What an `Evidence.outlook` is called among the findings of a verdict."""


class Finding(Struct, frozen=True):
    """The evidence of one detector, with the thresholds that it was compared with."""

    detector: str
    roles: tuple[MetricRole, ...]
    kind: Kind
    value: float
    suspect_at: float | None
    stop_at: float | None
    turn_step: int | None
    note: str

    @property
    def alarms(self) -> bool:
        """Whether it is grounds to suspect or to stop."""
        evidence = Evidence(self.kind, self.value)
        return evidence.reaches(self.suspect_at) or evidence.reaches(self.stop_at)


class Verdict(Struct, frozen=True):
    """`continue`, `suspect` or `stop`, with its reason and the numbers behind it.

    `step`: of the observation on which it was reached, None before the first. `turn_step`: where the
    detectors that called for it place the turn (the earliest). `critical`: the critical eval that called for it,
    None: the watched score.
    """

    verdict: Call
    step: int | None
    turn_step: int | None
    reason: str
    evidence: tuple[Finding, ...] = ()
    critical: str | None = None

    @property
    def stops(self) -> bool:
        return self.verdict is Call.STOP

    @property
    def rests_on_eval(self) -> bool:
        """Whether any alarmed detector sees the eval role."""
        return any(finding.alarms and MetricRole.EVAL in finding.roles for finding in self.evidence)


NOTHING_SEEN = Verdict(Call.CONTINUE, None, None, "nothing observed yet")


DETECTORS: dict[str, type[Detector[Any]]] = {
    "collapse": Collapse,
    "divergence": Divergence,
    "focus": Focus,
    "gao_fit": GaoFit,
    "k_decline": KDecline,
    "non_finite": NonFinite,
    "posterior": Posterior,
    "river_drift": RiverDrift,
    "sudden_change": SuddenChange,
}


def list_allowed(struct: type[Any], path: Sequence[str | int]) -> list[str]:
    """The keys or values allowed at this location of a document of the struct, where there are few; else none.

    >>> list_allowed(KDecline, ())
    ['k', 'min_delta', 'role']
    """
    kind: inspect.Type = inspect.type_info(struct)
    for step in path:
        if isinstance(kind, inspect.UnionType):
            kind = next((item for item in kind.types if isinstance(item, inspect.StructType)), kind)
        if isinstance(kind, inspect.ListType) and isinstance(step, int):
            kind = kind.item_type
        elif isinstance(kind, inspect.StructType):
            field = next((field for field in kind.fields if field.encode_name == step), None)
            if field is None:
                break
            kind = field.type.type if isinstance(field.type, inspect.Metadata) else field.type
    match kind:
        case inspect.StructType(fields=fields):
            return [field.encode_name for field in fields]
        case inspect.EnumType(cls=cls):
            return [str(item.value) for item in cls]
        case inspect.LiteralType(values=values):
            return [str(value) for value in values]
    return []
