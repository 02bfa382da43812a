"""Proposals: what ends jobs, or lets more be ended, and waits for somebody's word. Pure.

A step up of a policy's rollout stage is proposed by the service and confirmed by an admin. In a project with
`second_person` what a person does that ends jobs is a proposal as well, and another person confirms it; the step to
`enforce` takes two admins there.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct

OPEN_FOR = timedelta(days=1)
"""After that nobody can confirm what a person proposed. What the service proposes stands until it no longer holds."""

PROPOSED_AGAIN_AFTER = timedelta(days=7)
"""The service does not repeat sooner what a person refused."""


class ProposalKind(StrEnum):
    """What is proposed: the subject is a policy's name, a run's id, a decision's id, or the project."""

    RAISE_STAGE = "raise_stage"
    REMOVE_STAGE = "remove_stage"
    STOP_RUN = "stop_run"
    RELEASE_STOP = "release_stop"
    CHANGE_PROJECT = "change_project"

    @property
    def needs_admin(self) -> bool:
        """Whether admins alone may speak; else operators may."""
        return self not in (ProposalKind.STOP_RUN, ProposalKind.RELEASE_STOP)


class ProposalState(StrEnum):
    """Where a proposal stands; `withdrawn`: the service saw that what it proposed no longer holds."""

    OPEN = "open"
    CONFIRMED = "confirmed"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"


class Word(Struct, frozen=True):
    """Somebody is for it: by the identity that they proved, under the name of the audit log."""

    identity: str
    actor: str
    at: datetime


def has_enough_words(words: tuple[Word, ...], needed: int) -> bool:
    """Whether enough different people are for it."""
    return len({word.identity for word in words}) >= needed
