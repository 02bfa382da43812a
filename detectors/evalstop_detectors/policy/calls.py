"""What a policy calls for, on which grounds, by which action, and what holds it back."""

from __future__ import annotations

from enum import StrEnum


class Call(StrEnum):
    """What a verdict calls for."""

    CONTINUE = "continue"
    SUSPECT = "suspect"
    STOP = "stop"


class Ground(StrEnum):
    """Why a run is to be stopped: its eval has turned for good, or has levelled off, with no more to be gained."""

    TURNED = "turned"
    LEVELLED_OFF = "levelled_off"


class Action(StrEnum):
    """What a policy asks for when it calls for a stop: that the job ends, or that it is set aside until it recovers."""

    STOP = "stop"
    PARK = "park"


class GuardKind(StrEnum):
    """What holds a stop back, whatever the detectors say, unless the policy says that it does not.

    `stale`: nothing has been heard of the run for long. `metric_fault`: a metric that stops it is missing, has ceased,
    does not change or is not finite. `no_checkpoint`: there is no best checkpoint that would be left of the run.
    """

    STALE = "stale"
    METRIC_FAULT = "metric_fault"
    NO_CHECKPOINT = "no_checkpoint"
