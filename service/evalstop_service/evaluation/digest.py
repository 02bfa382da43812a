"""The weekly digest of a project, for endpoints that subscribe to `project.digest`: what its pages say of a week."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from evalstop_service.background import PeriodicJob, Wait, handle_each
from evalstop_service.clock import Clock, rfc3339
from evalstop_service.domain.decision_lifecycle import SERVICE, DecisionState
from evalstop_service.domain.event_types import EventType
from evalstop_service.domain.statuses import DecisionOutcome, ProposalKind, ProposalState, Treatment
from evalstop_service.domain.times import begin_day
from evalstop_service.evaluation import figures
from evalstop_service.store import audit, decisions, endpoints, projects, proposals, run_lists
from evalstop_service.store.cases import CaseFilter
from evalstop_service.store.database import Database, Transaction
from evalstop_service.webhooks import events
from evalstop_service.webhooks.event_data import Digest

WEEK = timedelta(days=7)
SENT_AT = timedelta(hours=7)
"""After the beginning of Monday, in UTC."""

EVERY_SECONDS = 600.0

SENT = "digest.sent"


def load_digest(tx: Transaction, project_id: UUID, since: datetime, until: datetime) -> Digest:
    """The digest of a project for what ended, or was decided, in a period."""
    total = figures.load_figures(tx, project_id, CaseFilter(since=since, until=until))[0]
    stopped, observed = total.counts[Treatment.STOPPED], total.counts[Treatment.OBSERVED]
    period: dict[str, Any] = {"since": since, "until": until, "limit": 1000}
    vetoed = decisions.list_decisions(tx, project_id, state=DecisionState.VETOED, **period)
    ready = proposals.list_proposals(tx, project_id, until, state=ProposalState.OPEN, limit=100)
    return Digest(
        since,
        until,
        stops=sum(stopped.values()),
        right=stopped[DecisionOutcome.RIGHT],
        wrong=stopped[DecisionOutcome.WRONG],
        recorded_only=sum(observed.values()),
        vetoes=len(vetoed),
        to_label=sum(total.counts[treatment][DecisionOutcome.UNKNOWN] for treatment in Treatment),
        gpu_hours_saved=total.hours.saved,
        gpu_hours_lost=total.hours.lost,
        gpu_hours_would_have_saved=total.hours.would_have_saved,
        ready=[proposal.summary for proposal in ready if proposal.kind is ProposalKind.RAISE_STAGE],
    )


def create_job(database: Database, clock: Clock) -> PeriodicJob:
    """The periodic job that sends the digest of each week."""

    def send(_: Wait) -> None:
        now = clock()
        with database.reading() as tx:
            wanting = [project.id for project in projects.list_projects(tx) if _is_wanted(tx, project.id, now)]
        handle_each(wanting, lambda project_id: send_digest(database, project_id, now))

    return PeriodicJob("digests", send, EVERY_SECONDS)


def send_digest(database: Database, project_id: UUID, now: datetime) -> bool:
    """Announce the digest of the week that ended last Monday, unless it was or no endpoint wants it; whether it was."""
    until = _find_end(now)
    with database.transaction() as tx:
        project = projects.lock_project(tx, project_id)  # so that one of several processes sends it
        newest = run_lists.list_runs(tx, project_id, limit=1)
        # Found in the audit log, since retention removes the events of runs.
        sent = audit.list_entries(tx, project_id, action=SENT, limit=1)
        if not newest or (sent and sent[0].at >= until) or not _is_wanted(tx, project_id, now):
            return False
        fields = {"project": project, "digest": load_digest(tx, project_id, until - WEEK, until)}
        # Events belong to a run: this one to the newest of the project.
        events.announce_event(tx, EventType.DIGEST, project_id, newest[0].id, fields, now)
        audit.record_action(tx, project_id, SERVICE, SENT, f"project {project.name}", {"until": rfc3339(until)}, now)
        return True


def _find_end(now: datetime) -> datetime:
    """The last Monday at seven."""
    day = begin_day(now - SENT_AT)
    return day - timedelta(days=day.weekday()) + SENT_AT


def _is_wanted(tx: Transaction, project_id: UUID, now: datetime) -> bool:
    """Whether an endpoint asks for the digest; one that was created since Monday gets its first one next Monday."""
    listed = [item for item in endpoints.list_endpoints(tx, project_id) if item.wants(EventType.DIGEST)]
    return any(item.enabled and item.created_at < _find_end(now) for item in listed)
