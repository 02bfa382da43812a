"""Who is signed in to the pages can be signed out, and what lets more be ended needs a fresh sign-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from uuid import UUID

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.web.dashboard.cookies import SESSION
from evalstop_service.web.dashboard.sessions import FRESH_SECONDS

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import serve_app
from tests.fixtures.projects import create_project
from tests.service.web.api.api_calls import expect_json, expect_problem, sign_in


class People:
    """People with keys to one project, whose clock can be moved."""

    def __init__(self, database: Database) -> None:
        self.database, self.now, self.url, self.opened = database, utc_now(), "", ExitStack()

    def clock(self) -> datetime:
        return self.now

    def person(self, name: str, *scopes: str) -> httpx.Client:
        """A person who has signed in with a key of their own."""
        secret = api_keys.create_named_key(self.database, "p", name, scopes, self.now)[1]
        headers = {"Authorization": f"Bearer {secret}"}
        client = httpx.Client(verify=get_ssl_context(), base_url=f"{self.url}/api/v1", headers=headers, trust_env=False)
        sign_in(self.opened.enter_context(client))
        return client

    def page(self, client: httpx.Client, path: str) -> int:
        """What a page answers to somebody's cookie."""
        return client.get(f"{self.url}{path}").status_code

    def post(self, client: httpx.Client, path: str, **form: str) -> httpx.Response:
        """Send a form of the settings page."""
        token = client.get(f"{self.url}/settings").text.split('name="csrf" value="')[1].split('"')[0]
        return client.post(f"{self.url}{path}", data={"csrf": token} | form)


@pytest.fixture
def people(embedded_database: Database) -> Iterator[People]:
    people = People(embedded_database)
    create_project(embedded_database, "p", "enforce", 0.0, people.now, "paper")
    app = create_app(Settings(), embedded_database, people.clock, session_secret="s" * 32)
    with serve_app(app) as people.url, people.opened:
        yield people


def test_signing_out_ends_the_cookie(people: People) -> None:
    """A cookie that somebody kept opens nothing once its owner has signed out."""
    dana = people.person("dana", "admin")
    stolen = dana.cookies[SESSION]
    assert people.page(dana, "/runs") == 200
    assert people.post(dana, "/logout").status_code == 303
    thief = httpx.Client(verify=get_ssl_context(), cookies={SESSION: stolen}, trust_env=False)
    with thief:
        assert people.page(thief, "/runs") == 303


def test_sessions_are_listed_and_ended(people: People) -> None:
    """An admin sees who is signed in and ends a session, by the API or on the page; others see and end none."""
    dana, eve = people.person("dana", "admin"), people.person("eve", "read")
    listed = {one["name"]: one["id"] for one in expect_json(dana.get("/sessions"), 200)["items"]}
    assert set(listed) == {"dana", "eve"}
    expect_problem(eve.get("/sessions"), 403)
    expect_problem(eve.delete(f"/sessions/{listed['dana']}"), 403)
    assert dana.delete(f"/sessions/{listed['eve']}").status_code == 204
    assert (people.page(eve, "/runs"), people.page(dana, "/runs")) == (303, 200)
    sign_in(eve)
    (again,) = [one["id"] for one in expect_json(dana.get("/sessions"), 200)["items"] if one["name"] == "eve"]
    assert people.post(dana, f"/settings/sessions/{again}/end").status_code == 303
    assert people.page(eve, "/runs") == 303
    expect_problem(dana.delete(f"/sessions/{again}"), 404)
    assert len(expect_json(dana.get("/audit", params={"action": "session.ended"}), 200)["items"]) == 2


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/settings/role-patterns", {"patterns": "reward eval"}),
        ("/webhooks/endpoints", {"url": "https://receiver.example/", "event_types": "run.stop_requested"}),
        (f"/webhooks/endpoints/{UUID(int=1)}/enabled", {"enabled": "true"}),
        (f"/webhooks/endpoints/{UUID(int=1)}/rotate-secret", {}),
    ],
)
def test_where_stops_go_and_what_judges_needs_a_fresh_sign_in(people: People, path: str, form: dict[str, str]) -> None:
    """So do patterns of roles, and endpoints whose secret would be shown or to which stops would go."""
    dana = people.person("dana", "admin")
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
def test_what_lets_more_be_ended_needs_a_fresh_sign_in(people: People, path: str, form: dict[str, str]) -> None:
    """Enforcing and keys need a sign-in of the last minutes: the page asks for one, and nothing is changed before."""
    dana = people.person("dana", "admin")
    people.now += timedelta(seconds=FRESH_SECONDS + 1)
    before = expect_json(dana.get("/audit"), 200)["items"]
    refused = people.post(dana, path, **form)
    assert (refused.status_code, refused.headers["location"]) == (303, "/login?next=%2Fsettings&again=1")
    assert "Sign in again" in dana.get(f"{people.url}{refused.headers['location']}").text
    assert expect_json(dana.get("/audit"), 200)["items"] == before
    sign_in(dana)
    assert people.post(dana, path, **form).status_code in (200, 303)
    assert len(expect_json(dana.get("/audit"), 200)["items"]) == len(before) + (path != "/settings")


def test_letting_more_be_ended_by_a_second_word_needs_a_fresh_sign_in(people: People) -> None:
    """So does an admin's word for another's proposal; after it the page shows the proposal again."""
    dana, eve = people.person("dana", "admin"), people.person("eve", "admin")
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
