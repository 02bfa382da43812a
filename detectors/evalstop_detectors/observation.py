"""What arrives: one value of one signal of one run at one step."""

from __future__ import annotations

import math
from enum import StrEnum

from msgspec import Struct


class Signal(StrEnum):
    """The role that a metric plays for a run.

    Members stand in the order in which detectors see the signals of one step: gold comes last, so that a detector that
    weighs the proxy against gold has the whole step before it when gold arrives.
    """

    KL = "kl"
    LOSS = "loss"
    PROXY = "proxy"
    EVAL = "eval"


_RANK = {signal: rank for rank, signal in enumerate(Signal)}


class Observation(Struct, frozen=True):
    """One value of one signal, turned so that higher is better (KL is left as it is).

    `stderr` is the standard error of `value`, in its unit; None when the trainer did not say.
    `progress` is the share of the planned steps that are done, 0 to 1; None when the run has no planned end.
    """

    signal: Signal
    step: int
    value: float
    stderr: float | None = None
    progress: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """The place of this observation in its run: by step, then by signal."""
        return self.step, _RANK[self.signal]

    @property
    def finite(self) -> bool:
        """False for NaN and the infinities, which are evidence of their own and enter no arithmetic."""
        return math.isfinite(self.value)
