"""The calls of a policy, their grounds, the actions they ask for, and the guards against them."""

from __future__ import annotations

from enum import StrEnum


class Call(StrEnum):
    """What a verdict calls for."""

    CONTINUE = "continue"
    SUSPECT = "suspect"
    STOP = "stop"


class Ground(StrEnum):
    """Why a run is to be stopped: its eval has turned for good, or has levelled off with no more gain expected."""

    TURNED = "turned"
    LEVELLED_OFF = "levelled_off"


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
