"""The page of a link in a message: reading changes nothing, its buttons veto the stop or have it wait."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timedelta

import httpx
from evalstop_service.domain.decision_lifecycle import DecisionState
from evalstop_service.store import decisions, endpoints, tables
from evalstop_service.store.database import Database
from evalstop_service.store.decisions import Decision
from evalstop_service.web.body import SHORT_BYTES
from evalstop_service.webhooks import links
from sqlalchemy import select

from tests.faults import raw_sockets
from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import SQLITE_ONLY, get_html

HACKING = load_recorded_evals("np-0044")
HOSTILE = "<script>alert(1)</script> & 'x'"


def open_pending_stop(database: Database, now: datetime) -> tuple[Tenant, Decision, str]:
    """A project with a pending stop, and the path of the link in the message about it."""
    tenant = add_tenant(database, now, veto_window_seconds=3600)
    with database.transaction() as tx:
        chat = endpoints.add_endpoint(
            tx, tenant.id, url="https://chat.example/x", event_types=["run.stop_pending"], format="slack", now=now
        )
    _, decision = tenant.open_stopped_run(HOSTILE, HACKING[:29])
    with database.reading() as tx:
        delivery_id = tx.execute(
            select(tables.deliveries.c.id).where(tables.deliveries.c.endpoint_id == chat.id)
        ).scalar_one()
    url = links.locate_act_page("", delivery_id, chat.secret)
    assert url is not None
    return tenant, decision, url


def load_decision(database: Database, tenant: Tenant, decision: Decision) -> Decision:
    with database.reading() as tx:
        return decisions.load_decision(tx, tenant.id, decision.id)


def test_reading_the_page_changes_nothing(anonymous: httpx.Client, database: Database, now: datetime) -> None:
    """Whoever has the link sees why and when without signing in; only a POST acts, and only once."""
    tenant, decision, path = open_pending_stop(database, now)
    page = anonymous.get(path)
    assert page.status_code == anonymous.head(path).status_code == 200
    assert "Veto the stop" in page.text
    assert "<polyline" in page.text
    assert "<script>alert" not in page.text
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["x-robots-tag"] == "noindex"
    for method in ("GET", "HEAD"):
        assert anonymous.request(method, f"{path}/veto").status_code in (404, 405)
    assert load_decision(database, tenant, decision) == decision
    assert anonymous.post(f"{path}/wait", data={"until": "hour"}).status_code == 303
    assert load_decision(database, tenant, decision).due_at == decision.due_at + timedelta(hours=1)
    assert anonymous.post(f"{path}/wait", data={"until": "morning"}).status_code == 409
    assert anonymous.post(f"{path}/veto", data={"name": HOSTILE}).status_code == 303
    assert load_decision(database, tenant, decision).state == DecisionState.VETOED
    assert anonymous.post(f"{path}/veto").status_code == 409
    assert "can no longer do anything" in get_html(anonymous, path)


@SQLITE_ONLY
def test_strangers_at_the_same_address_hold_up_no_link(
    anonymous: httpx.Client, database: Database, now: datetime
) -> None:
    """Whoever has the link has a share of their own, also where bodies without a key have used that of the address."""
    tenant, decision, path = open_pending_stop(database, now)
    with ExitStack() as stack:
        for size in [SHORT_BYTES - 1] * 8 + [8]:
            connection = stack.enter_context(raw_sockets.connect(str(anonymous.base_url)))
            head = raw_sockets.build_request_head("POST", "/api/v1/runs", "esk_nobody", Content_Length=str(SHORT_BYTES))
            connection.sendall(head + b"x" * size)
        assert anonymous.post(f"{path}/wait", data={"until": "veto"}).status_code == 422
        assert anonymous.post(f"{path}/veto", data={"name": "dana"}).status_code == 303
    assert load_decision(database, tenant, decision).state == DecisionState.VETOED


@SQLITE_ONLY
def test_unknown_links_are_all_alike(anonymous: httpx.Client, database: Database, now: datetime) -> None:
    """A wrong token, another delivery and nonsense get the same answer."""
    _, decision, path = open_pending_stop(database, now)
    own, _, token = path.rpartition("/")
    other = ("B" if token[0] == "A" else "A") + token[1:]  # a last character may hold bits that do not count
    wrong = [f"{own}/{other}", f"/act/{decision.id}/{token}", "/act/nonsense/x"]
    answers = [anonymous.get(each) for each in wrong] + [anonymous.post(f"{each}/veto") for each in wrong]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.text for answer in answers}) == 1
