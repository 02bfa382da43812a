"""Links in messages to people: who has one can veto a stop, or have it wait once, without signing in.

A link names the delivery of a message, and is signed with the secret of the endpoint that the message went to. It is
good for one decision and for the veto window that the message announced, and nothing is stored for it: replicas and
restarts change nothing, and a rotated secret ends the links of an endpoint a day later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID
from zoneinfo import ZoneInfo

from evalstop_service.decisions import commands, transitions
from evalstop_service.domain.decision_commands import Postponed, Vetoed
from evalstop_service.domain.event_types import PENDING_EVENTS
from evalstop_service.domain.times import find_morning
from evalstop_service.errors import Conflict
from evalstop_service.security.encryption import Encryption, UnreadableSecret
from evalstop_service.store import decisions, endpoints, projects, runs
from evalstop_service.store.database import Database, Transaction
from evalstop_service.store.decisions import Decision
from evalstop_service.store.endpoints import Endpoint
from evalstop_service.store.projects import Project
from evalstop_service.store.queue import outbox
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import links
from evalstop_service.webhooks.channels import Format
from evalstop_service.webhooks.endpoints import name_host

HOUR = timedelta(hours=1)


class Choice(StrEnum):
    """What a link lets a person do."""

    VETO = "veto"
    WAIT_AN_HOUR = "hour"
    WAIT_UNTIL_MORNING = "morning"


@dataclass(frozen=True)
class MessageLink:
    """A link whose signature is right. `channel`: where its message went. `choices`: until when each has the stop wait;
    empty: nothing is left to do."""

    project: Project
    run: Run
    decision: Decision
    channel: str
    choices: dict[Choice, datetime]

    @property
    def actor(self) -> str:
        """Who acts, in the history and the audit log."""
        return f"a link sent to {self.channel}"


def open_link(
    tx: Transaction, encryption: Encryption, delivery_id: UUID, token: str, now: datetime, *, lock: bool = False
) -> MessageLink | None:
    """The link with this token; None if it is not valid, or its project allows no links.

    `lock`: its decision cannot change until this transaction ends.
    """
    sent = outbox.find_delivery(tx, delivery_id)
    endpoint = endpoints.find_endpoint(tx, sent.project_id, sent.endpoint_id) if sent is not None else None
    is_signed = links.verify_act_token(token, delivery_id, _read_secrets(endpoint, encryption, now))
    if sent is None or endpoint is None or not is_signed or not endpoint.enabled:
        return None
    if sent.event_type not in PENDING_EVENTS or sent.decision_id is None:
        return None
    if lock:
        decisions.lock_with_run(tx, sent.project_id, sent.decision_id)
    project = projects.get_project(tx, sent.project_id)
    if not project.act_from_messages:
        return None
    decision = decisions.load_decision(tx, project.id, sent.decision_id)
    # Read after the lock: another window may have opened meanwhile.
    newest = outbox.find_newest_announcement(tx, decision.run_id, decision.id)
    choices = _list_choices(tx, decision, project, now) if newest == sent.event_id else {}
    run = runs.load_run(tx, project.id, decision.run_id)
    # All channels of a chat may share one host: only the id tells which of them it was.
    return MessageLink(project, run, decision, f"{name_host(endpoint.url)} (endpoint {endpoint.id})", choices)


def _read_secrets(endpoint: Endpoint | None, encryption: Encryption, now: datetime) -> Sequence[str]:
    """The secrets that links of an endpoint may be signed with; no link for an endpoint without messages for people."""
    if endpoint is None or endpoint.format == Format.STANDARD:
        return []
    try:
        return endpoints.decrypt_secrets(endpoint, endpoint.id, now, encryption)
    except UnreadableSecret:
        return []


def act(
    database: Database, encryption: Encryption, delivery_id: UUID, token: str, choice: Choice, name: str, now: datetime
) -> MessageLink | None:
    """Do what a link offers; None if it is not valid. Raises Conflict when it offers that no more.

    `name`: how the person calls themselves, if they do.
    """
    with database.transaction() as tx:
        link = open_link(tx, encryption, delivery_id, token, now, lock=True)
        if link is None:
            return None
        if choice not in link.choices:
            raise Conflict("this message no longer offers that: open its link again to see what became of the stop")
        reason = f"by {name}" if name else ""
        command: Vetoed | Postponed = Vetoed(now, link.actor, reason)
        if choice is not Choice.VETO:
            command = Postponed(now, link.actor, reason, link.choices[choice])
        commands.carry_out_command(tx, link.project.id, link.decision.id, command)
        return link


def _list_choices(tx: Transaction, decision: Decision, project: Project, now: datetime) -> dict[Choice, datetime]:
    zone = ZoneInfo(project.stop_hours.time_zone if project.stop_hours is not None else "UTC")
    offered: dict[Choice, Vetoed | Postponed] = {
        Choice.VETO: Vetoed(now, "", ""),
        Choice.WAIT_AN_HOUR: Postponed(now, "", "", decision.due_at + HOUR),
        Choice.WAIT_UNTIL_MORNING: Postponed(now, "", "", find_morning(decision.due_at, zone)),
    }
    allowed = transitions.list_allowed(tx, decision, offered.values())
    return {
        choice: command.until if isinstance(command, Postponed) else now
        for choice, command in offered.items()
        if command in allowed
    }
