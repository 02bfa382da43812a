"""Proposals: actions that end jobs, or permit more stops, and wait for confirmation. Pure.

A step up of a policy's rollout stage is proposed by the service and confirmed by an admin. In a project with
`second_person`, a person's action that ends jobs is also a proposal, which another person confirms; the step to
`enforce` then takes two admins.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated

from msgspec import Struct

from evalstop_service.domain.fields import doc

OPEN_FOR = timedelta(days=1)
"""How long a person's proposal can be confirmed. A proposal of the service stays open while it holds."""

PROPOSED_AGAIN_AFTER = timedelta(days=7)
"""The service does not repeat a refused proposal sooner."""


class ProposalKind(StrEnum):
    """What is proposed; the subject is a policy's name, a run's id, a decision's id, or the project."""

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


class Approval(Struct, frozen=True):
    """An approval: the approver's authenticated identity, and the name in the audit log."""

    identity: str
    actor: Annotated[str, doc("`key NAME` or `user NAME`, as in the audit log")]
    at: Annotated[datetime, doc("time of the approval")]
