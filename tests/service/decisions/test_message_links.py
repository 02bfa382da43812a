"""Links in messages: good for one decision and one veto window, and for nothing else."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa
from evalstop_service.decisions import commands, deadlines, message_links, transitions
from evalstop_service.decisions.message_links import Choice, MessageLink
from evalstop_service.domain.decision_commands import Vetoed
from evalstop_service.domain.decision_events import GuardsRaised
from evalstop_service.domain.decision_lifecycle import DecisionState, Guard, GuardKind
from evalstop_service.domain.times import StopHours
from evalstop_service.errors import Conflict
from evalstop_service.store import decisions, endpoints, runs, tables
from evalstop_service.store.endpoints import UNENCRYPTED, Endpoint
from evalstop_service.store.runs import Run
from evalstop_service.webhooks import links

from tests.service.project_fixture import NOW, ProjectFixture

MINUTE = timedelta(minutes=1)
SOON = NOW + timedelta(seconds=5)


@pytest.fixture
def chat(veto_project: ProjectFixture) -> Endpoint:
    with veto_project.database.transaction() as tx:
        return endpoints.add_endpoint(
            *(tx, veto_project.id),
            url="https://chat.example/secret-path",
            event_types=["run.stop_pending"],
            format="slack",
            now=NOW,
        )


def find_link(project: ProjectFixture, run: Run, endpoint: Endpoint) -> tuple[UUID, str]:
    """The delivery and the token in the newest message about a run."""
    sent = [row for row in project.load_rows(tables.deliveries, run) if row["endpoint_id"] == endpoint.id]
    delivery_id: UUID = max(row["id"] for row in sent)
    url = links.locate_act_page("https://evalstop.example", delivery_id, endpoint.secret)
    assert url is not None
    return delivery_id, url.rpartition("/")[2]


def open_link(project: ProjectFixture, link: tuple[UUID, str], now: datetime = SOON) -> MessageLink | None:
    with project.database.reading() as tx:
        return message_links.open_link(tx, UNENCRYPTED, *link, now)


def act(project: ProjectFixture, link: tuple[UUID, str], choice: Choice, name: str = "") -> MessageLink | None:
    return message_links.act(project.database, UNENCRYPTED, *link, choice, name, SOON)


def test_link_vetoes_its_stop_once(veto_project: ProjectFixture, chat: Endpoint) -> None:
    """Whoever has the link vetoes the stop; history and audit log name the channel, not the secret in its URL."""
    run, decision = veto_project.open_declining_run()
    link = find_link(veto_project, run, chat)
    opened = open_link(veto_project, link)
    assert opened is not None
    assert set(opened.choices) == set(Choice)
    assert act(veto_project, link, Choice.VETO, "Kim") is not None
    assert veto_project.load_decision(run).state == DecisionState.VETOED
    change = veto_project.load_rows(tables.decision_changes, run)[-1]
    channel = f"a link sent to chat.example (endpoint {chat.id})"
    assert (change["actor"], change["reason"]) == (channel, "by Kim")
    with veto_project.database.reading() as tx:
        query = sa.select(tables.audit_log).where(tables.audit_log.c.action == "decision.vetoed")
        (entry,) = tx.execute(query.where(tables.audit_log.c.project_id == veto_project.id)).mappings()
    assert entry["actor"] == channel
    assert "secret-path" not in str(dict(entry))
    with pytest.raises(Conflict, match="no longer offers"):
        act(veto_project, link, Choice.VETO)
    assert decision.id == veto_project.load_decision(run).id


def test_stop_waits_once_in_a_window(veto_project: ProjectFixture, chat: Endpoint) -> None:
    """It waits an hour, or until 09:00 where its project's hours are; then it can only be vetoed."""
    veto_project.change_settings(stop_hours=StopHours(("thu", "fri"), "00:00", "00:00", "Europe/Berlin"))
    run, decision = veto_project.open_declining_run()
    link = find_link(veto_project, run, chat)
    opened = open_link(veto_project, link)
    assert opened is not None
    hour_later = decision.due_at + timedelta(hours=1)
    # The first of January 2026, noon in UTC: the next morning in Berlin is at eight.
    morning = datetime.fromisoformat("2026-01-02T08:00Z")
    assert opened.choices[Choice.WAIT_AN_HOUR] == hour_later
    assert opened.choices[Choice.WAIT_UNTIL_MORNING] == morning
    act(veto_project, link, Choice.WAIT_AN_HOUR)
    waiting = veto_project.load_decision(run)
    assert (waiting.state, waiting.due_at) == (DecisionState.PENDING, hour_later)
    for choice in (Choice.WAIT_AN_HOUR, Choice.WAIT_UNTIL_MORNING):
        with pytest.raises(Conflict):
            act(veto_project, link, choice)
    assert veto_project.load_decision(run).due_at == hour_later
    assert act(veto_project, link, Choice.VETO) is not None


def test_link_ends_with_its_window(veto_project: ProjectFixture, chat: Endpoint) -> None:
    """Once another veto window has opened, the link of the earlier one does nothing, and that of the newer one acts."""
    run, _ = veto_project.open_declining_run()
    first = find_link(veto_project, run, chat)
    act(veto_project, first, Choice.WAIT_AN_HOUR)
    guard = Guard(GuardKind.PAUSED, "the project was paused by dana")
    with veto_project.database.transaction() as tx:
        locked = runs.lock_run(tx, veto_project.id, run.id)
        decision = decisions.lock_decision(tx, run.id, veto_project.load_decision(run).id)
        transitions.move_decision(tx, locked, decision, GuardsRaised(SOON, (guard,)))
    assert veto_project.load_decision(run).state == DecisionState.ON_HOLD
    deadlines.process_overdue(veto_project.database, NOW + 2 * MINUTE)
    assert veto_project.load_decision(run).state == DecisionState.PENDING
    second = find_link(veto_project, run, chat)
    assert first != second
    opened, renewed = open_link(veto_project, first), open_link(veto_project, second)
    assert opened is not None
    assert renewed is not None
    assert not opened.choices
    assert Choice.WAIT_AN_HOUR in renewed.choices, "the stop may wait once in each window"


def test_only_valid_links_open(veto_project: ProjectFixture, chat: Endpoint) -> None:
    """A token is good for its delivery alone, while its endpoint and the project's setting allow it."""
    run, _ = veto_project.open_declining_run()
    delivery_id, token = find_link(veto_project, run, chat)
    (receiver,) = (row for row in veto_project.load_events(run, "run.stop_pending"))
    others = [row["id"] for row in veto_project.load_rows(tables.deliveries, run) if row["id"] != delivery_id]
    signed = [(other, links._sign(other, chat.secret)) for other in others]
    for wrong in [(delivery_id, token[:-1] + "!"), (delivery_id, ""), (delivery_id, "é"), (run.id, token), *signed]:
        assert open_link(veto_project, wrong) is None
    assert open_link(veto_project, (receiver["id"], token)) is None
    veto_project.change_settings(act_from_messages=False)
    assert open_link(veto_project, (delivery_id, token)) is None
    assert act(veto_project, (delivery_id, token), Choice.VETO) is None
    veto_project.change_settings(act_from_messages=True)
    with veto_project.database.transaction() as tx:
        rotated = endpoints.rotate_secret(tx, veto_project.id, chat.id, now=NOW, encryption=UNENCRYPTED)
    assert open_link(veto_project, (delivery_id, token)) is not None, "the previous secret signs for another day"
    assert open_link(veto_project, (delivery_id, token), NOW + timedelta(days=2)) is None
    link = (delivery_id, links._sign(delivery_id, rotated.secret))
    assert open_link(veto_project, link) is not None
    for change in ({"enabled": False}, {"deleted_at": NOW}):
        with veto_project.database.transaction() as tx:
            tx.execute(sa.update(tables.endpoints).where(tables.endpoints.c.id == chat.id).values(**change))
        assert open_link(veto_project, link) is None


def test_veto_by_a_person_ends_the_link(veto_project: ProjectFixture, chat: Endpoint) -> None:
    """After a veto elsewhere the link says so, and offers nothing."""
    run, decision = veto_project.open_declining_run()
    link = find_link(veto_project, run, chat)
    commands.apply_command(veto_project.database, veto_project.id, decision.id, Vetoed(SOON, "dana", "a known dip"))
    opened = open_link(veto_project, link)
    assert opened is not None
    assert (opened.decision.state, opened.choices) == (DecisionState.VETOED, {})
