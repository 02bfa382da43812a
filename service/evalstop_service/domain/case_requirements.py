"""The requirements for a case to count towards a rollout stage. Pure.

Only real runs count: anyone with an ingest key can open many tiny runs that turn at will.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from evalstop_service.domain.durations import format_duration


class Shortfall(StrEnum):
    """What a case lacks to count; the first that applies is named."""

    DURATION = "duration"
    EVALS = "evals"
    GPU_HOURS = "gpu_hours"
    KEY_AND_DAY = "key_and_day"


@dataclass(frozen=True)
class CaseRequirements:
    """The least duration, evals and GPU-hours of an attempt, and the most cases of one key and UTC day.

    `gpu_hours` applies only to attempts whose number of GPUs is known.
    """

    seconds: float
    evals: int
    gpu_hours: float
    per_key_and_day: int

    def explain(self, shortfall: Shortfall, seconds: float, evals: int, gpu_hours: float | None) -> str:
        """Why a case with this shortfall does not count, with its value and the requirement."""
        match shortfall:
            case Shortfall.DURATION:
                return f"lasted {format_duration(seconds)} of the {format_duration(self.seconds)} needed"
            case Shortfall.EVALS:
                return f"has {evals} of the {self.evals} finite evals needed"
            case Shortfall.GPU_HOURS:
                return f"used {gpu_hours or 0.0:.3g} of the {self.gpu_hours:.3g} GPU-hours needed"
            case Shortfall.KEY_AND_DAY:
                return f"its key already has the {self.per_key_and_day} cases that count in a day"
