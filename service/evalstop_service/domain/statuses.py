"""The values of states, stages and outcomes in rows: runs, deliveries, policies, proposals. Pure."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Literal


class RunStatus(StrEnum):
    """The state of a run; `lost`: it stopped reporting, and may return.

    `parked`: its job was parked, and is held or runs on idle GPUs; it has not ended.
    """

    RUNNING = "running"
    PARKED = "parked"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


UNENDED = frozenset({RunStatus.RUNNING, RunStatus.PARKED, RunStatus.LOST})
"""The run continues, or may."""

OPEN = frozenset({RunStatus.RUNNING, RunStatus.PARKED})
"""A trainer may attach to the run: its job runs, or was parked and may run again."""


class Stage(StrEnum):
    """How much of a policy's stops is carried out: none, a share, all."""

    SHADOW = "shadow"
    CANARY = "canary"
    ENFORCE = "enforce"


class DeliveryState(StrEnum):
    """The state of the delivery of an event."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    DEAD = "dead"
    CANCELLED = "cancelled"


class RunOutcome(StrEnum):
    """What happened to the eval of an attempt."""

    TURNED = "turned"
    HEALTHY = "healthy"
    UNDECIDED = "undecided"


class DecisionOutcome(StrEnum):
    """Whether a decision to stop a run was right or, where there was none, to let it continue."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


def read_run_outcome(outcome: DecisionOutcome, turn_step: int | None, *, flagged: bool) -> RunOutcome:
    """The outcome of a run implied by a person's outcome of its decision; `flagged`: the decision was to stop it.

    A wrong stop of a run that turned came too early.
    """
    if outcome is DecisionOutcome.UNKNOWN:
        return RunOutcome.UNDECIDED
    turned = outcome is (DecisionOutcome.RIGHT if flagged else DecisionOutcome.WRONG) or turn_step is not None
    return RunOutcome.TURNED if turned else RunOutcome.HEALTHY


class Treatment(StrEnum):
    """What was done about a stop: deliberately not carried out, carried out as far as possible, or prevented."""

    OBSERVED = "observed"
    STOPPED = "stopped"
    PREVENTED = "prevented"


def name_hours(treatment: str | None, outcome: str) -> Literal["saved", "saved_if_right", "would_have_saved"] | None:
    """What the GPU-hours after a stop count as: `saved` if it was carried out and right, `would_have_saved` if it was
    recorded only and right; None: nothing."""
    if treatment == Treatment.OBSERVED:
        return "would_have_saved" if outcome == DecisionOutcome.RIGHT else None
    if treatment != Treatment.STOPPED or outcome == DecisionOutcome.WRONG:
        return None
    return "saved" if outcome == DecisionOutcome.RIGHT else "saved_if_right"


class ProposalKind(StrEnum):
    """An action that ends jobs, or permits more stops, and waits for confirmation.

    A step up of a policy's rollout stage is proposed by the service and confirmed by an admin. In a project with
    `second_person`, a person's action that ends jobs is also a proposal, which another person confirms; the step to
    `enforce` then takes two admins. The subject is a policy's name, a run's id, a decision's id, or the project.
    """

    RAISE_STAGE = "raise_stage"
    REMOVE_STAGE = "remove_stage"
    STOP_RUN = "stop_run"
    RELEASE_STOP = "release_stop"
    CHANGE_PROJECT = "change_project"
    CHANGE_STAGE = "change_stage"
    ADD_POLICY_VERSION = "add_policy_version"

    @property
    def needs_admin(self) -> bool:
        """Whether only admins may confirm or refuse it; otherwise operators may too."""
        return self not in (ProposalKind.STOP_RUN, ProposalKind.RELEASE_STOP)


class ProposalState(StrEnum):
    """The state of a proposal; `withdrawn`: the service found that its proposal no longer holds."""

    OPEN = "open"
    CONFIRMED = "confirmed"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"


PROPOSAL_OPEN_FOR = timedelta(days=1)
"""How long a person's proposal can be confirmed. A proposal of the service stays open while it holds."""
