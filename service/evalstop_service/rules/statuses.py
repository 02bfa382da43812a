"""The words that rows hold: states of runs, deliveries and backtests, stages of policies, outcomes. Pure."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    """Where a run stands; `lost` is one that stopped reporting, and may come back.

    `parked`: its job was set aside, is held, or runs on idle GPUs; it has not ended.
    """

    RUNNING = "running"
    PARKED = "parked"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


UNENDED = frozenset({RunStatus.RUNNING, RunStatus.PARKED, RunStatus.LOST})
"""A run goes on, or may."""

OPEN = frozenset({RunStatus.RUNNING, RunStatus.PARKED})
"""A run may be attached to: its job runs, or was set aside and may run again."""


class Stage(StrEnum):
    """How far the stops of a policy are carried out: not at all, a share of them, all."""

    SHADOW = "shadow"
    CANARY = "canary"
    ENFORCE = "enforce"


class DeliveryState(StrEnum):
    """Where the delivery of an event stands."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    DEAD = "dead"
    CANCELLED = "cancelled"


class BacktestState(StrEnum):
    """Where a backtest stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class RunOutcome(StrEnum):
    """What became of the eval of an attempt."""

    TURNED = "turned"
    HEALTHY = "healthy"
    UNDECIDED = "undecided"


class DecisionOutcome(StrEnum):
    """Whether a decision was right: to stop a run or, where there was none, to let it continue."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class Treatment(StrEnum):
    """What was done about a stop: not carried out on purpose, carried out as far as possible, or prevented."""

    OBSERVED = "observed"
    STOPPED = "stopped"
    PREVENTED = "prevented"
