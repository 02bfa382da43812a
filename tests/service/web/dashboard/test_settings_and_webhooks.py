"""The pages of webhooks and settings: what is done there is done, shown once where it is secret, and written down."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from html import unescape
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from evalstop_service.ingest import Observations
from evalstop_service.projects import api_keys
from evalstop_service.rules.decision_lifecycle import SERVICE
from evalstop_service.rules.event_types import PRESETS
from evalstop_service.security.address_policy import parse_address_policy
from evalstop_service.security.encryption import Encryption
from evalstop_service.settings import Settings
from evalstop_service.store import audit, endpoints, keys, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.projects import Project
from evalstop_service.store.queue import deliveries
from evalstop_service.store.tables import events
from evalstop_service.web import dashboard
from evalstop_service.webhooks import endpoints as webhooks
from evalstop_service.webhooks import resend

from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant, open_run
from tests.service.web.dashboard.serving import SECRET, serving, token_of


class Desk:
    """An admin of the project at the pages."""

    def __init__(self, client: httpx.Client, database: Database, tenant: Tenant) -> None:
        self.client, self.database, self.tenant = client, database, tenant
        self.token = token_of(client, "/runs")

    def get(self, path: str) -> str:
        """A page that is there."""
        return self.client.get(path).raise_for_status().text

    def post(self, path: str, status: int = 303, **form: Any) -> httpx.Response:
        """Send a form, and expect this of it."""
        response = self.client.post(path, data=form | {"csrf": self.token})
        assert response.status_code == status, response.text
        return response

    def project(self) -> Project:
        """The project as it is now."""
        with self.database.reading() as tx:
            return projects.get_project(tx, self.tenant.project.id)

    def actions(self) -> list[str]:
        """What the audit log has of people, oldest first; the tests open their runs as the service."""
        with self.database.reading() as tx:
            found = [entry for entry in audit.list_entries(tx, self.tenant.project.id) if entry.actor != SERVICE]
        assert {entry.actor for entry in found} <= {"key test"}
        return [entry.action for entry in reversed(found)]


@pytest.fixture
def desk(embedded_database: Database, now: datetime) -> Iterator[Desk]:
    tenant = add_tenant(embedded_database, now)
    settings = Settings(webhook_networks="127.0.0.1/32")
    with serving(embedded_database, settings=settings) as address, httpx.Client(base_url=address, timeout=30) as client:
        client.get("/login", params={"token": dashboard.sign_in_token(SECRET, tenant.key.id)}).raise_for_status()
        yield Desk(client, embedded_database, tenant)


def endpoint_of(desk: Desk, url: str, now: datetime) -> str:
    made = webhooks.create_endpoint(
        desk.database,
        Author(desk.tenant.project.id, "key test", now),
        url=url,
        event_types=["*"],
        format="standard",
        address_policy=parse_address_policy("any"),
        encryption=Encryption(),
    )
    return str(made.id)


def stopped(desk: Desk, name: str, now: datetime) -> None:
    """Have a run announce something."""
    run = open_run(desk.database, desk.tenant, now, name, mode="enforce")
    for step, value in enumerate((0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)):
        submit_message(
            desk.database,
            desk.tenant.project.id,
            run.id,
            Observations((PostedObservation("reward/gold", step, value),)),
            now,
        )


@contextmanager
def receiver(status: int, answer: bytes) -> Iterator[tuple[str, list[Any]]]:
    """An endpoint that answers so, and what it was sent."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", got
        server.shutdown()


def test_an_endpoint_is_made_and_its_secret_shown_once(desk: Desk) -> None:
    """Whoever adds an endpoint sees its secret, and nobody sees it again; what cannot be is said, and kept written."""
    form = {"event_types": ["run.stopped", "run.stop_requested"], "format": "slack"}
    url = "http://127.0.0.1:9/hook"
    shown = desk.post("/webhooks/endpoints", 200, url=f" {url} ", **form).text
    with desk.database.reading() as tx:
        (made,) = endpoints.list_endpoints(tx, desk.tenant.project.id)
    assert (made.url, made.event_types, made.format) == (url, ("run.stopped", "run.stop_requested"), "slack")
    assert made.secret in shown
    rotated = desk.post(f"/webhooks/endpoints/{made.id}/rotate-secret", 200).text
    assert made.secret not in rotated
    assert "whsec_" in rotated
    assert "whsec_" not in desk.get("/webhooks")
    for wrong, words in (
        ({"url": "ftp://x"}, "URL: an absolute http or https"),
        ({"url": "http://10.0.0.1/"}, "not a public address"),
        ({"url": url, "event_types": []}, "at least one event type"),
        ({"url": url, "event_types": ["run.nonsense"]}, "or one of"),
    ):
        text = desk.post("/webhooks/endpoints", 422, **(form | wrong)).text
        assert words in text.replace("&#34;", '"')
        assert f'value="{wrong["url"]}"' in text
    assert desk.actions() == ["endpoint.made", "endpoint.secret_rotated"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_chooses_the_events(desk: Desk, preset: str) -> None:
    """Each choice of the form wants what it says; types that are ticked go before it."""
    assert f'name="preset" value="{preset}"' in desk.get("/webhooks")
    url = "http://127.0.0.1:9/"
    desk.post("/webhooks/endpoints", 200, url=url, preset=preset)
    desk.post("/webhooks/endpoints", 200, url=url, preset=preset, event_types=["run.lost"])
    with desk.database.reading() as tx:
        made = [one.event_types for one in endpoints.list_endpoints(tx, desk.tenant.project.id)]
    assert sorted(made) == sorted([PRESETS[preset], ("run.lost",)])


def test_an_endpoint_is_switched_off_and_deleted(desk: Desk, now: datetime) -> None:
    """One that is off is shown so and can be put on again; one that was deleted is gone."""
    place = f"/webhooks/endpoints/{endpoint_of(desk, 'http://127.0.0.1:9/', now)}"
    desk.post(f"{place}/enabled", enabled="false")
    assert "disabled" in desk.get("/webhooks")
    desk.post(f"{place}/replay", 409, since="2026-01-01T00:00")
    desk.post(f"{place}/enabled", enabled="true")
    assert "disabled" not in desk.get("/webhooks")
    desk.post(f"{place}/delete")
    assert "127.0.0.1:9" not in desk.get("/webhooks")
    desk.post(f"{place}/delete", 404)
    assert desk.actions()[1:] == ["endpoint.changed", "endpoint.changed", "endpoint.deleted"]


@pytest.mark.parametrize(("status", "words"), [(204, "delivered"), (500, "not delivered")])
def test_a_test_shows_what_came_back(desk: Desk, now: datetime, status: int, words: str) -> None:
    """A test is sent at once, and its answer is shown as text, whatever is in it."""
    answer = b"" if status == 204 else b"<script>alert(1)</script>"
    with receiver(status, answer) as (url, got):
        text = desk.post(f"/webhooks/endpoints/{endpoint_of(desk, url, now)}/test", 200).text
    assert [event["type"] for event in got] == ["endpoint.test"]
    assert words in text
    assert f"HTTP {status}" in text
    assert text.count("&lt;script&gt;alert(1)") == (1 if status == 500 else 0)
    assert "<script>alert" not in text


def test_deliveries_are_filtered_looked_at_and_sent_once_more(desk: Desk, now: datetime) -> None:
    """A delivery has a page with what is sent; it goes out again as a new one, alone or with all of a time."""
    endpoint = endpoint_of(desk, "http://127.0.0.1:9/", now)
    stopped(desk, "one", now)
    with desk.database.reading() as tx:
        before = deliveries.list_deliveries(tx, desk.tenant.project.id)
    assert all(str(one.id) in desk.get(f"/webhooks?state=waiting&endpoint={endpoint}") for one in before)
    assert "No matching deliveries" in desk.get("/webhooks?state=dead")
    page = desk.get(f"/webhooks/deliveries/{before[0].id}")
    assert f'{{\n  "type": "{before[0].event_type}",\n' in unescape(page)
    assert "No attempts yet" in page
    desk.post(f"/webhooks/deliveries/{before[0].id}/retry", 409)
    made = desk.post(f"/webhooks/deliveries/{before[0].id}/replay").headers["location"]
    assert made != f"/webhooks/deliveries/{before[0].id}"
    since = (now - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
    done = desk.post(f"/webhooks/endpoints/{endpoint}/replay", 200, since=since).text
    assert "Replay complete" in done
    with desk.database.reading() as tx:
        assert len(deliveries.list_deliveries(tx, desk.tenant.project.id)) == 2 * len(before) + 1
    for odd in ("yesterday", "0001-01-01T00:00+14:00"):
        desk.post(f"/webhooks/endpoints/{endpoint}/replay", 422, since=odd)
    turned = desk.post(
        f"/webhooks/endpoints/{endpoint}/replay", 422, since="2026-02-02T00:00", until="2026-02-01T00:00"
    )
    assert "would end at 2026-02-01T00:00:00Z, before it begins at 2026-02-02T00:00:00Z" in turned.text
    assert desk.actions()[1:] == ["delivery.replayed", "endpoint.replayed"]


def test_settings_are_changed_by_the_rules_of_the_api(desk: Desk) -> None:
    """What is written is kept, what is left empty has no bound, and what cannot be changes nothing."""
    modes = {"default_mode": "enforce", "max_mode": "enforce"}
    desk.post("/settings", default_policy="paper", allowed_policies="early, patient", stops_per_hour="")
    desk.post("/settings", 303, **modes)
    desk.post("/settings", veto_window_seconds="90.5")
    project = desk.project()
    assert (project.max_mode, project.allowed_policies) == ("enforce", ["early", "patient"])
    assert (project.default_policy, project.default_mode, project.veto_window_seconds) == ("paper", "enforce", 90.5)
    assert project.stops_per_hour is None
    for wrong, words in (
        ({"veto_window_seconds": "soon"}, "Veto window before a stop is sent: Input should be a valid number"),
        ({"stops_share": "2"}, "Share of the runs: Input should be less than or equal to 1"),
        ({"default_policy": "no-such"}, "no-such"),
        ({"allowed_policies": "x" * 2001}, "Allowed policies: "),
        ({"veto_window_seconds": ""}, "Veto window before a stop is sent: "),
        ({"default_mode": "enforce", "max_mode": "shadow"}, "change both"),
    ):
        text = desk.post("/settings", 422, **({"default_mode": "shadow"} | wrong)).text
        assert words in text
        assert "Nothing was changed" in text
    assert desk.project() == project
    desk.post("/settings", default_policy="paper", veto_window_seconds="90.5")
    assert desk.actions() == ["project.changed"] * 3


def test_a_wrong_setting_is_told_beside_its_field(desk: Desk) -> None:
    """The field is marked, and described by what is wrong with it; no other field is."""
    page = desk.post("/settings", 422, stops_share="2", stops_per_hour="3").text
    (marked,) = re.findall(r'name="(\w+)"[^>]*aria-invalid="true" aria-describedby="fault"', page)
    assert marked == "stops_share"
    assert re.search(r'name="stops_share"[^>]*>\s*<p class="problem small" id="fault">Input should be less', page)
    assert 'name="stops_per_hour" value="3"' in page


def test_long_times_are_shown_whole(desk: Desk) -> None:
    """To the second, and in words beside: what is saved as it was shown changes nothing."""
    desk.post("/settings", stale_seconds="1296001", confirm_seconds="5400")
    page = desk.get("/settings")
    assert 'name="stale_seconds" value="1296001"' in page
    assert "unconfirmed stops are escalated after this time; now 1.5 h<" in page
    assert "a run is stale; now 15 d<" in page


def test_roles_of_metrics_are_lines_of_patterns(desk: Desk) -> None:
    """A line is a pattern, a role and maybe a direction."""
    desk.post("/settings/role-patterns", patterns="val/*/mean@* eval\n\n loss loss minimize \n")
    assert [pattern["pattern"] for pattern in desk.project().role_patterns] == ["val/*/mean@*", "loss"]
    assert "loss loss minimize" in desk.get("/settings")
    for wrong in ("alone", "x gold", "a eval maximize now", "[ eval"):
        assert wrong in desk.post("/settings/role-patterns", 422, patterns=wrong).text
    assert desk.actions() == ["project.changed"]


def test_stopping_is_paused_and_goes_on(desk: Desk) -> None:
    """Whoever pauses says why, and everybody sees it."""
    desk.post("/settings/pause", reason="the eval set is <b>broken</b>")
    assert "the eval set is &lt;b&gt;broken" in desk.get("/settings")
    assert desk.project().paused_by == "key test"
    desk.post("/settings/resume")
    assert desk.project().paused_at is None
    assert desk.actions() == ["project.paused", "project.resumed"]


def test_a_key_is_made_shown_once_and_revoked(desk: Desk, now: datetime) -> None:
    """The key that is shown works, nobody sees it again, and revoked it works no more, here and in the API."""
    shown = desk.post("/settings/keys", 200, name="grafana", scopes=["read", "nonsense"]).text
    secret = "esk_" + shown.split("<code>esk_")[1].split("<")[0]
    with desk.database.reading() as tx:
        key = keys.authenticate_key(tx, secret, now)
    assert key is not None
    assert (key.name, key.scopes) == ("grafana", ("read",))
    assert secret not in desk.get("/settings")
    desk.post("/settings/keys", 422, name="", scopes=["read"])
    desk.post("/settings/keys", 422, name="none", scopes=[])
    with httpx.Client(base_url=desk.client.base_url, headers={"Authorization": f"Bearer {secret}"}) as api:
        assert api.get("/api/v1/project").status_code == 200
        desk.post(f"/settings/keys/{key.id}/revoke")
        assert api.get("/api/v1/project").status_code == 401
    desk.post(f"/settings/keys/{key.id}/revoke", 404)
    assert "revoked" in desk.get("/settings")
    assert desk.actions() == ["key.made", "key.revoked"]


def test_the_audit_log_is_read_page_by_page(desk: Desk, now: datetime) -> None:
    """The newest stand first, fifty a page, and the filter goes with one from page to page."""
    for number in range(60):
        api_keys.create_key(desk.database, desk.tenant.project.id, "key test", f"k{number:02}", ["read"], now)
    desk.post("/settings/pause")
    first = desk.get("/settings/audit?action=key&actor=TEST")
    assert "key k59" in first
    assert "key k09" not in first
    assert "project.paused" not in first
    second = desk.get(first.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&"))
    assert "key k09" in second
    assert "key k10" not in second
    assert "No matching entries" in desk.get("/settings/audit?actor=nobody")


def test_a_long_replay_goes_on_where_it_was(desk: Desk, now: datetime) -> None:
    """A thousand events are sent at a time; the page says how far it is and holds the form that goes on."""
    endpoint = endpoint_of(desk, "http://127.0.0.1:9/", now)
    run = open_run(desk.database, desk.tenant, now, "long")
    announced = [
        {
            "run_id": run.id,
            "id": new_id(),
            "project_id": desk.tenant.project.id,
            "decision_id": None,
            "type": "run.stale",
            "body": "{}",
            "created_at": now,
        }
        for _ in range(resend.MAX_REPLAYED_EVENTS + 1)
    ]
    with desk.database.transaction() as tx:
        tx.execute(events.insert(), announced)
    since, until = ((now + timedelta(hours=hours)).isoformat() for hours in (-1, 1))
    text = desk.post(f"/webhooks/endpoints/{endpoint}/replay", 200, since=since, until=until).text
    names = ("since", "until", "after", "replayed")
    form = {name: text.split(f'name="{name}" value="')[1].split('"')[0] for name in names}
    assert form["replayed"] == "1000"
    assert form["after"] == str(announced[-2]["id"])
    assert 40 <= int(text.split('<progress value="')[1].split('"')[0]) <= 60
    done = desk.post(f"/webhooks/endpoints/{endpoint}/replay", 200, **form).text
    assert "Replay complete" in done
    assert "1\u202f001" in done
