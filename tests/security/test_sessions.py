"""Dashboard sessions: they can be ended, and sensitive changes need a recent sign-in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from uuid import UUID

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.pages.cookies import FRESH_SECONDS, SESSION

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import serve_app
from tests.fixtures.projects import create_named_key, create_project
from tests.service.web.api.api_calls import expect_json, sign_in


class SignedInPeople:
    """Clients with a key each to one project, and a clock that tests move."""

    def __init__(self, database: Database) -> None:
        self.database, self.now, self.url, self.stack = database, utc_now(), "", ExitStack()

    def clock(self) -> datetime:
        return self.now

    def sign_in_client(self, name: str, *scopes: str) -> httpx.Client:
        """A client that has signed in with its own key."""
        secret = create_named_key(self.database, "p", name, scopes, self.now)[1]
        headers = {"Authorization": f"Bearer {secret}"}
        client = httpx.Client(
            verify=get_ssl_context(), base_url=f"{self.url}/api/v1", headers=headers, trust_env=False, timeout=60
        )
        sign_in(self.stack.enter_context(client))
        return client

    def get_page_status(self, client: httpx.Client, path: str) -> int:
        """The status of a page for the client's cookie."""
        return client.get(f"{self.url}{path}").status_code

    def list_sessions(self, client: httpx.Client) -> set[str]:
        """The ids of the sessions on the page of settings."""
        return set(re.findall("/settings/sessions/([^/]+)/end", client.get(f"{self.url}/settings").text))

    def post(self, client: httpx.Client, path: str, **form: str) -> httpx.Response:
        """Submit a form of the settings page."""
        token = client.get(f"{self.url}/settings").text.split('name="csrf" value="')[1].split('"')[0]
        return client.post(f"{self.url}{path}", data={"csrf": token} | form)


@pytest.fixture
def people(embedded_database: Database) -> Iterator[SignedInPeople]:
    people = SignedInPeople(embedded_database)
    create_project(embedded_database, "p", "enforce", 0.0, people.now, "paper")
    app = create_app(Settings(), embedded_database, people.clock, session_secret="s" * 32)
    with serve_app(app) as people.url, people.stack:
        yield people


def test_sign_out_ends_the_session(people: SignedInPeople) -> None:
    """A copied cookie is no longer valid after its owner signed out."""
    dana = people.sign_in_client("dana", "admin")
    cookie = dana.cookies[SESSION]
    assert people.get_page_status(dana, "/runs") == 200
    assert people.post(dana, "/logout").status_code == 303
    other_browser = httpx.Client(verify=get_ssl_context(), cookies={SESSION: cookie}, trust_env=False, timeout=60)
    with other_browser:
        assert people.get_page_status(other_browser, "/runs") == 303


def test_admin_lists_and_ends_sessions(people: SignedInPeople) -> None:
    """An admin ends sessions on the page of settings; others can not."""
    dana = people.sign_in_client("dana", "admin")
    (own,) = people.list_sessions(dana)
    eve = people.sign_in_client("eve", "read")
    (others,) = people.list_sessions(dana) - {own}
    assert people.post(eve, f"/settings/sessions/{own}/end").status_code == 403
    assert people.post(dana, f"/settings/sessions/{others}/end").status_code == 303
    assert (people.get_page_status(eve, "/runs"), people.get_page_status(dana, "/runs")) == (303, 200)
    assert people.post(dana, f"/settings/sessions/{others}/end").status_code == 404
    assert len(expect_json(dana.get("/audit", params={"action": "session.ended"}), 200)["items"]) == 1


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/webhooks/endpoints", {"url": "https://receiver.example/", "event_types": "run.stop_requested"}),
        (f"/webhooks/endpoints/{UUID(int=1)}/enabled", {"enabled": "true"}),
        (f"/webhooks/endpoints/{UUID(int=1)}/rotate-secret", {}),
    ],
)
def test_role_and_endpoint_changes_need_a_recent_sign_in(
    people: SignedInPeople, path: str, form: dict[str, str]
) -> None:
    """Role patterns, and endpoints that would receive stops, cannot be changed in an old session."""
    dana = people.sign_in_client("dana", "admin")
    people.now += timedelta(seconds=FRESH_SECONDS + 1)
    before = expect_json(dana.get("/audit"), 200)["items"]
    refused = people.post(dana, path, **form)
    page = path.split("/")[1]
    assert (refused.status_code, refused.headers["location"]) == (303, f"/login?next=%2F{page}&again=1")
    assert expect_json(dana.get("/audit"), 200)["items"] == before


@pytest.mark.parametrize(
    ("path", "form"),
    [("/settings", {"default_mode": "enforce"}), ("/settings/keys", {"name": "k", "scopes": "admin"})],
)
def test_enforcing_and_keys_need_a_recent_sign_in(people: SignedInPeople, path: str, form: dict[str, str]) -> None:
    """The page asks for a sign-in and changes nothing before."""
    dana = people.sign_in_client("dana", "admin")
    people.now += timedelta(seconds=FRESH_SECONDS + 1)
    before = expect_json(dana.get("/audit"), 200)["items"]
    refused = people.post(dana, path, **form)
    assert (refused.status_code, refused.headers["location"]) == (303, "/login?next=%2Fsettings&again=1")
    assert "Sign in again" in dana.get(f"{people.url}{refused.headers['location']}").text
    assert expect_json(dana.get("/audit"), 200)["items"] == before
    sign_in(dana)
    assert people.post(dana, path, **form).status_code in (200, 303)
    assert len(expect_json(dana.get("/audit"), 200)["items"]) == len(before) + (path != "/settings")


def test_confirming_a_proposal_needs_a_recent_sign_in(people: SignedInPeople) -> None:
    """After the sign-in the page shows the proposal again."""
    dana, eve = people.sign_in_client("dana", "admin"), people.sign_in_client("eve", "admin")
    expect_json(
        dana.patch("/project", json={"max_mode": "shadow", "default_mode": "shadow", "second_person": True}), 200
    )
    expect_json(dana.patch("/project", json={"max_mode": "enforce"}), 202)
    (proposal,) = expect_json(eve.get("/proposals"), 200)["items"]
    people.now += timedelta(seconds=FRESH_SECONDS + 1)
    refused = people.post(eve, f"/proposals/{proposal['id']}/confirm")
    assert (refused.status_code, refused.headers["location"]) == (303, "/login?next=%2F%23queue&again=1")
    assert expect_json(eve.get("/project"), 200)["max_mode"] == "shadow"
    sign_in(eve)
    assert people.post(eve, f"/proposals/{proposal['id']}/confirm").status_code == 303
    assert expect_json(eve.get("/project"), 200)["max_mode"] == "enforce"
