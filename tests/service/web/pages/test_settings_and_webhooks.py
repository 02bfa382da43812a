"""The settings and webhooks pages: what they change, what they show once, and what the audit log records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from html import unescape
from typing import Any

import httpx
import pytest
from evalstop_service.domain.decision_lifecycle import SERVICE
from evalstop_service.domain.event_types import PENDING_EVENTS, PRESETS
from evalstop_service.projects import api_keys, project_settings
from evalstop_service.projects.project_settings import QuotasIn
from evalstop_service.settings import Settings
from evalstop_service.store import audit, endpoints, keys, projects
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.projects import Project
from evalstop_service.store.queue import outbox

from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import (
    open_client,
    read_csrf_token,
    sign_in_by_link,
    start_dashboard_server,
)
from tests.service.webhooks.delivery.fakes import FakeEndpoint, Reply


class AdminPages:
    """An admin's session on the pages of a project."""

    def __init__(self, client: httpx.Client, database: Database, tenant: Tenant) -> None:
        self.client, self.database, self.tenant = client, database, tenant
        self.token = read_csrf_token(client, "/runs")

    def get(self, path: str) -> str:
        """The HTML of a page."""
        return self.client.get(path).raise_for_status().text

    def post(self, path: str, status: int = 303, **form: Any) -> httpx.Response:
        """Submit a form, and check the status of the answer."""
        response = self.client.post(path, data=form | {"csrf": self.token})
        assert response.status_code == status, response.text
        return response

    def project(self) -> Project:
        """The project as stored."""
        with self.database.reading() as tx:
            return projects.get_project(tx, self.tenant.id)

    def actions(self) -> list[str]:
        """The actions of people in the audit log, oldest first; the tests open their runs as the service."""
        with self.database.reading() as tx:
            entries = [entry for entry in audit.list_entries(tx, self.tenant.id) if entry.actor != SERVICE]
        assert {entry.actor for entry in entries} <= {"key test"}
        return [entry.action for entry in reversed(entries)]


@pytest.fixture
def pages(embedded_database: Database, now: datetime) -> Iterator[AdminPages]:
    tenant = add_tenant(embedded_database, now)
    settings = Settings(webhook_networks="127.0.0.1/32")
    with start_dashboard_server(embedded_database, settings=settings) as address, open_client(address) as client:
        sign_in_by_link(client, tenant.key)
        yield AdminPages(client, embedded_database, tenant)


def test_new_endpoint_shows_its_secret_once(pages: AdminPages) -> None:
    """The secret is shown after creation only; an invalid form names the field and keeps the input."""
    form = {"event_types": ["run.stopped", "run.stop_requested"], "format": "slack"}
    url = "http://127.0.0.1:9/hook"
    created_page = pages.post("/webhooks/endpoints", 200, url=f" {url} ", **form).text
    with pages.database.reading() as tx:
        (endpoint,) = endpoints.list_endpoints(tx, pages.tenant.id)
    assert (endpoint.url, endpoint.event_types, endpoint.format) == (
        url,
        ("run.stopped", "run.stop_requested"),
        "slack",
    )
    assert endpoint.secret in created_page
    rotated = pages.post(f"/webhooks/endpoints/{endpoint.id}/rotate-secret", 200).text
    assert endpoint.secret not in rotated
    assert "whsec_" in rotated
    assert "whsec_" not in pages.get("/webhooks")
    for invalid, words in (
        ({"url": "ftp://x"}, "url: an absolute http or https"),
        ({"url": "http://10.0.0.1/"}, "not a public address"),
        ({"url": url, "event_types": [], "preset": "nonsense"}, "one of receiver"),
        ({"url": url, "event_types": ["run.nonsense"]}, "or one of"),
    ):
        text = pages.post("/webhooks/endpoints", 422, **(form | invalid)).text
        assert words in text.replace("&#34;", '"')
        assert f'value="{invalid["url"]}"' in text
    assert pages.actions() == ["endpoint.created", "endpoint.secret_rotated"]


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/settings/keys", {"name": "trainers", "scopes": ["ingest"]}),
        ("/webhooks/endpoints", {"url": "http://127.0.0.1:9/", "event_types": ["run.stopped"]}),
    ],
)
def test_reached_quota_is_named_on_the_page(
    pages: AdminPages, now: datetime, path: str, form: dict[str, str | list[str]]
) -> None:
    """A form that would exceed a quota changes nothing, and its answer names the quota."""
    pages.tenant.add_endpoint()
    author = Author(pages.tenant.id, "operator", now)
    project_settings.set_quotas(pages.database, author, QuotasIn.model_validate({"keys": 1, "endpoints": 1}))
    assert "its quota of 1 for" in pages.post(path, 409, **form).text


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_selects_event_types(pages: AdminPages, preset: str) -> None:
    """A preset subscribes to its event types; types selected by hand take precedence, in the API too."""
    assert f'name="preset" value="{preset}"' in pages.get("/webhooks")
    pages.post("/webhooks/endpoints", 200, url="http://127.0.0.1:9/", preset=preset)
    pages.post("/webhooks/endpoints", 200, url="http://127.0.0.1:9/people", preset=preset, event_types=["run.lost"])
    with pages.database.reading() as tx:
        event_types = [endpoint.event_types for endpoint in endpoints.list_endpoints(tx, pages.tenant.id)]
    assert sorted(event_types) == sorted([PRESETS[preset].event_types, ("run.lost",)])
    assert all(event in PRESETS[preset].event_types for event in PENDING_EVENTS) != preset.endswith("receiver")


@pytest.mark.parametrize(
    ("url", "form", "preset"),
    [
        ("http://127.0.0.1:9/", "standard", "receiver"),
        ("http://127.0.0.1:9/", "slack", "team"),
        ("mailto:dana@example.org", "email", "team"),
        ("mailto:owner", "email", "owner"),
    ],
)
def test_default_events_suit_the_endpoint(pages: AdminPages, url: str, form: str, preset: str) -> None:
    """Without event types or a preset, an endpoint gets what suits its format, and owners what concerns their run."""
    pages.post("/webhooks/endpoints", 200, url=url, format=form)
    with pages.database.reading() as tx:
        (endpoint,) = endpoints.list_endpoints(tx, pages.tenant.id)
    assert endpoint.event_types == PRESETS[preset].event_types


def test_endpoint_is_disabled_enabled_and_deleted(pages: AdminPages) -> None:
    """A disabled endpoint is marked; a deleted one is gone."""
    path = f"/webhooks/endpoints/{pages.tenant.add_endpoint().id}"
    pages.post(f"{path}/enabled", enabled="false")
    assert "disabled" in pages.get("/webhooks")
    pages.post(f"{path}/enabled", enabled="true")
    assert "disabled" not in pages.get("/webhooks")
    pages.post(f"{path}/delete")
    assert "127.0.0.1:9" not in pages.get("/webhooks")
    pages.post(f"{path}/delete", 404)
    assert pages.actions() == ["endpoint.changed", "endpoint.changed", "endpoint.deleted"]


@pytest.mark.parametrize(("status", "words"), [(204, "delivered"), (500, "not delivered")])
def test_test_event_shows_the_answer(pages: AdminPages, status: int, words: str) -> None:
    """A test event is sent at once, and the answer is shown as text, whatever it contains."""
    answer = b"" if status == 204 else b"<script>alert(1)</script>"
    with FakeEndpoint(Reply(status, body=answer)) as fake:
        text = pages.post(f"/webhooks/endpoints/{pages.tenant.add_endpoint(url=fake.url).id}/test", 200).text
    assert [json.loads(request.body)["type"] for request in fake.received] == ["endpoint.test"]
    assert words in text
    assert f"HTTP {status}" in text
    assert text.count("&lt;script&gt;alert(1)") == (1 if status == 500 else 0)
    assert "<script>alert" not in text


def test_deliveries_are_filtered_shown_and_replayed(pages: AdminPages, now: datetime) -> None:
    """A delivery's page shows its body; it is sent again as a new delivery."""
    endpoint = pages.tenant.add_endpoint().id
    pages.tenant.open_stopped_run("one", load_recorded_evals("np-0044")[:29])
    with pages.database.reading() as tx:
        before = outbox.list_deliveries(tx, pages.tenant.id)
    assert all(str(delivery.id) in pages.get(f"/webhooks?state=waiting&endpoint={endpoint}") for delivery in before)
    assert "No matching deliveries" in pages.get("/webhooks?state=dead")
    page = pages.get(f"/webhooks/deliveries/{before[0].id}")
    assert f'{{\n  "type": "{before[0].event_type}",\n' in unescape(page)
    assert "No attempts yet" in page
    new_delivery = pages.post(f"/webhooks/deliveries/{before[0].id}/replay").headers["location"]
    assert new_delivery != f"/webhooks/deliveries/{before[0].id}"
    assert pages.actions() == ["delivery.replayed"]


def test_saving_the_settings_form_keeps_an_empty_list_of_policies(pages: AdminPages) -> None:
    """A project that allows no other policies still allows none after its form is saved as it was shown."""
    pages.post("/settings", allowed_policies="none")
    assert pages.project().allowed_policies == []
    shown = re.search(r'name="allowed_policies" value="([^"]*)"', pages.get("/settings"))
    assert shown is not None
    pages.post("/settings", allowed_policies=shown[1])
    assert pages.project().allowed_policies == []
    pages.post("/settings", allowed_policies="")
    assert pages.project().allowed_policies is None


def test_settings_form_follows_the_rules_of_the_api(pages: AdminPages) -> None:
    """Valid settings are stored, an empty limit means none, and an invalid one changes nothing."""
    modes = {"default_mode": "enforce", "max_mode": "enforce"}
    pages.post("/settings", default_policy="paper", allowed_policies="early, patient", stops_per_hour="")
    pages.post("/settings", 303, **modes)
    pages.post("/settings", veto_window_seconds="90.5", stop_hours="mon-fri 09:00-18:00 Europe/Berlin")
    project = pages.project()
    shown = pages.get("/settings")
    assert 'value="mon,tue,wed,thu,fri 09:00-18:00 Europe/Berlin"' in shown
    assert 'value="15m"' in shown, "durations are shown as people write them"
    assert (project.max_mode, project.allowed_policies) == ("enforce", ["early", "patient"])
    assert (project.default_policy, project.default_mode, project.veto_window_seconds) == ("paper", "enforce", 90.5)
    assert project.stops_per_hour is None
    for invalid, words in (
        ({"veto_window_seconds": "soon"}, "Veto window: a duration such as 90s"),
        ({"held_out_share": "2"}, "Held out (0 to 1): Input should be less than or equal to 1"),
        ({"stops_share": "2"}, "Share of the runs (0 to 1): Input should be less than or equal to 1"),
        ({"default_policy": "no-such"}, "no-such"),
        ({"allowed_policies": "x" * 2001}, "Allowed policies: "),
        ({"veto_window_seconds": ""}, "Veto window: "),
        ({"default_mode": "enforce", "max_mode": "shadow"}, "change both"),
    ):
        text = pages.post("/settings", 422, **({"default_mode": "shadow"} | invalid)).text
        assert words in text
        assert "Nothing was changed" in text
    assert pages.project() == project
    pages.post("/settings", default_policy="paper", veto_window_seconds="90.5")
    assert pages.actions() == ["project.changed"] * 3


def test_easier_guard_is_proposed_where_two_must_agree(pages: AdminPages) -> None:
    """A change that permits more stops leads to where it waits; saving the unchanged form proposes nothing."""
    pages.post("/settings", second_person="yes", stops_share="0.1")
    unchanged = pages.post(
        "/settings", second_person="yes", stops_share="0.1", stops_per_hour="30", veto_window_seconds="0"
    )
    assert unchanged.headers["location"] == "/settings"
    assert pages.post("/settings", stops_share="0.3").headers["location"] == "/#queue"
    assert pages.project().stops_share == 0.1


def test_invalid_setting_marks_its_field(pages: AdminPages) -> None:
    """Only the invalid field is marked, and described by its error."""
    page = pages.post("/settings", 422, stops_share="2", stops_per_hour="3").text
    (marked,) = re.findall(r'name="(\w+)"[^>]*aria-invalid="true" aria-describedby="fault"', page)
    assert marked == "stops_share"
    assert re.search(r'name="stops_share"[^>]*>\s*<p class="problem small" id="fault">Input should be less', page)
    assert 'name="stops_per_hour" value="3"' in page


def test_durations_are_shown_exactly(pages: AdminPages) -> None:
    """A duration is shown to the second, so that saving the form unchanged changes nothing."""
    pages.post("/settings", stale_seconds="1296001", confirm_seconds="5400")
    page = pages.get("/settings")
    assert 'name="stale_seconds" value="15d1s"' in page
    assert 'name="confirm_seconds" value="1h30m"' in page


def test_stopping_is_paused_and_resumed(pages: AdminPages) -> None:
    """A pause has a reason, which the settings page shows."""
    pages.post("/settings/pause", reason="the eval set is <b>broken</b>")
    assert "the eval set is &lt;b&gt;broken" in pages.get("/settings")
    assert pages.project().paused_by == "key test"
    pages.post("/settings/resume")
    assert pages.project().paused_at is None
    assert pages.actions() == ["project.paused", "project.resumed"]


def test_new_key_is_shown_once_and_revoked(pages: AdminPages, now: datetime) -> None:
    """A new key works until it is revoked, and its secret is shown after creation only."""
    created_page = pages.post("/settings/keys", 200, name="grafana", scopes=["read"]).text
    secret = "esk_" + created_page.split("<code>esk_")[1].split("<")[0]
    with pages.database.reading() as tx:
        key = keys.authenticate_key(tx, secret, now)
    assert key is not None
    assert (key.name, key.scopes) == ("grafana", ("read",))
    assert secret not in pages.get("/settings")
    pages.post("/settings/keys", 422, name="", scopes=["read"])
    pages.post("/settings/keys", 422, name="none", scopes=[])
    pages.post("/settings/keys", 422, name="unknown", scopes=["read", "nonsense"])
    with httpx.Client(base_url=pages.client.base_url, headers={"Authorization": f"Bearer {secret}"}, timeout=60) as api:
        assert api.get("/api/v1/project").status_code == 200
        pages.post(f"/settings/keys/{key.id}/revoke")
        assert api.get("/api/v1/project").status_code == 401
    pages.post(f"/settings/keys/{key.id}/revoke", 404)
    assert str(key.id) not in pages.get("/settings")
    assert pages.actions() == ["key.created", "key.revoked"]


def test_audit_log_is_filtered_and_paged(pages: AdminPages, now: datetime) -> None:
    """The newest entries come first, fifty a page, and the link to the next page keeps the filter."""
    for number in range(60):
        api_keys.create_key(pages.database, pages.tenant.id, "key test", f"k{number:02}", ["read"], now)
    pages.post("/settings/pause")
    first = pages.get("/settings/audit?action=key&actor=TEST")
    assert "key k59" in first
    assert "key k09" not in first
    assert "project.paused" not in first
    second = pages.get(first.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&"))
    assert "key k09" in second
    assert "key k10" not in second
    assert "No matching entries" in pages.get("/settings/audit?actor=nobody")
