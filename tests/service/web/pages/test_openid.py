"""Signing in by OpenID Connect at a real provider."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from evalstop_service.settings import Settings
from evalstop_service.store import audit
from evalstop_service.store.database import Database
from evalstop_service.web.pages.cookies import FLOW, SESSION
from playwright.sync_api import Browser, ConsoleMessage
from pydantic import SecretStr

from tests.fixtures.certificates import get_ssl_context
from tests.service.web.pages.fake_provider import CLIENT_ID, CLIENT_SECRET
from tests.service.web.pages.recorded_runs import Tenant, add_tenant
from tests.service.web.pages.serving import open_client, read_csrf_token, start_dashboard_server

pytestmark = [pytest.mark.real, pytest.mark.nightly]

GRANTS = [
    {"group": "ml-oncall", "project": "alignment", "role": "operator"},
    {"group": "everyone", "project": "safety", "role": "viewer"},
    {"email": "Kim@example.com", "project": "safety", "role": "admin"},
    {"email": "mallory@example.com", "project": "alignment", "role": "admin"},
]


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real provider: django-oauth-toolkit, in a process of its own."""
    program = Path(__file__).parent / "provider_process.py"
    command = [sys.executable, str(program), str(tmp_path_factory.mktemp("provider"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the provider did not start"
        yield address
        process.stdin.close()


@dataclass
class OpenIdService:
    """A service with an OpenID provider, and a clock that tests can advance."""

    address: str
    database: Database
    tenants: dict[str, Tenant]
    clock_offset: timedelta = timedelta()

    def open_browser(self) -> httpx.Client:
        """A client without a session; follows no redirect."""
        return open_client(self.address)


@pytest.fixture
def service(embedded_database: Database, issuer: str, now: datetime) -> Iterator[OpenIdService]:
    settings = Settings(
        oidc_issuer=issuer,
        oidc_client_id=CLIENT_ID,
        oidc_client_secret=SecretStr(CLIENT_SECRET),
        oidc_grants=json.dumps(GRANTS),
    )
    tenants = {name: add_tenant(embedded_database, now, name) for name in ("alignment", "safety", "secret")}
    service = OpenIdService("", embedded_database, tenants)
    with start_dashboard_server(embedded_database, lambda: now + service.clock_offset, settings) as service.address:
        yield service


def sign_in_at_provider(browser: httpx.Client, name: str, target: str = "/settings") -> str:
    """Sign in at the provider; returns the callback address that it redirects to."""
    start = browser.get("/openid/start", params={"next": target})
    assert start.status_code == 303, start.text
    url = start.headers["location"]
    with httpx.Client(verify=get_ssl_context(), timeout=30, base_url=f"http://{urlsplit(url).netloc}") as provider:
        form = provider.get(url, follow_redirects=True)
        token = form.text.split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]
        answer = provider.post(str(form.url), data={"csrfmiddlewaretoken": token, "username": name, "password": name})
        while urlsplit(answer.headers["location"]).path != "/openid/callback":
            answer = provider.get(answer.headers["location"])
    return str(answer.headers["location"])


def test_sign_in_gives_roles_and_sign_out_ends_the_session(service: OpenIdService) -> None:
    """A member of a group gets its role in its project and an audit entry; after signing out the cookie is
    worthless."""
    with service.open_browser() as browser:
        answer = browser.get(sign_in_at_provider(browser, "dana"))
        assert answer.status_code == 200, answer.text
        assert 'content="0;url=/settings"' in answer.text
        cookies = {text.split("=")[0]: text.lower() for text in answer.headers.get_list("set-cookie")}
        assert "httponly" in cookies[SESSION]
        assert "samesite=strict" in cookies[SESSION]
        assert FLOW not in browser.cookies
        projects_page = browser.get("/projects").text
        assert "user dana@example.com" in projects_page
        assert "operator" in projects_page
        assert "safety" not in projects_page
        with service.database.reading() as tx:
            (entry,) = audit.list_entries(tx, service.tenants["alignment"].project.id)
        assert (entry.actor, entry.action) == ("user dana@example.com", "session.opened")
        assert entry.details["role"] == "operator"
        session = browser.cookies[SESSION]
        assert browser.post("/logout", data={"csrf": read_csrf_token(browser, "/projects")}).status_code == 303
        browser.cookies.set(SESSION, session)
        assert browser.get("/session").json() == {"signed_in": False}


@pytest.mark.nightly
def test_sign_in_with_a_browser(service: OpenIdService, browser: Browser) -> None:
    """A browser goes from the form to the provider, which is another site, and back to the requested page."""
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        console: list[ConsoleMessage] = []
        page.on("console", lambda message: console.append(message))
        page.goto(f"{service.address}/settings")
        page.click("text=Sign in with your organization")
        page.fill("input[name=username]", "kim")
        page.fill("input[name=password]", "kim")
        page.click("text=Sign in")
        page.wait_for_url(f"{service.address}/settings")
        assert page.locator("#members").inner_text().count("user kim@example.com")
        page.click("a.project")
        page.click("text=Switch")
        page.goto(f"{service.address}/settings")
        assert "safety" in page.locator("header").inner_text()
        assert page.locator("text=Create key").count()  # kim is an admin there
        assert [message.text for message in console if message.location["url"].startswith(service.address)] == []
        page.click("text=Sign out")
        page.wait_for_url(f"{service.address}/login")
        page.goto(f"{service.address}/settings")
        assert "/login" in page.url


def test_session_ends_after_twelve_hours(service: OpenIdService) -> None:
    """After twelve hours the visitor has to sign in again."""
    with service.open_browser() as browser:
        browser.get(sign_in_at_provider(browser, "dana"))
        service.clock_offset = timedelta(hours=11, minutes=59)
        assert browser.get("/session").json() == {"signed_in": True}
        service.clock_offset = timedelta(hours=12)
        assert browser.get("/session").json() == {"signed_in": False}


def test_visitor_switches_between_projects(service: OpenIdService) -> None:
    """A visitor with roles in several projects sees those and can switch to them; any other is not found."""
    with service.open_browser() as browser:
        browser.get(sign_in_at_provider(browser, "kim"))
        token = read_csrf_token(browser, "/projects")
        for name, status in (("safety", 303), ("secret", 404)):
            form = {"project": str(service.tenants[name].project.id), "csrf": token}
            assert browser.post("/projects", data=form).status_code == status
        projects_page = browser.get("/projects").text
        assert "secret" not in projects_page
        assert projects_page.index("safety") < projects_page.index(">current<")
        assert "admin" in projects_page


def test_visitor_without_a_role_is_refused(service: OpenIdService, caplog: pytest.LogCaptureFixture) -> None:
    """An unverified address and no group give no role: 403, and no session. The log has the groups."""
    with service.open_browser() as browser:
        answer = browser.get(sign_in_at_provider(browser, "mallory"))
        assert answer.status_code == 403
        assert "no role in any project" in answer.text
        assert SESSION not in browser.cookies
    assert "Mallory has no role in an existing project; groups: []" in caplog.messages


def test_callback_works_once_and_in_one_browser(service: OpenIdService) -> None:
    """A callback is refused a second time, in another browser, and after ten minutes."""
    with service.open_browser() as browser, service.open_browser() as other:
        answer = sign_in_at_provider(browser, "dana")
        flow = browser.cookies[FLOW]
        assert other.get(answer).status_code == 401
        assert "Try again" in other.get(answer).text
        sign_in_at_provider(other, "dana")
        assert other.get(answer).status_code == 401  # that browser started another sign-in
        assert browser.get(answer).status_code == 200
        browser.cookies.delete(SESSION)
        assert browser.get(answer).status_code == 401
        browser.cookies.set(FLOW, flow)
        assert browser.get(answer).status_code == 401  # the provider accepts a code once
        assert SESSION not in browser.cookies
        answer = sign_in_at_provider(other, "dana")
        service.clock_offset = timedelta(minutes=11)
        assert other.get(answer).status_code == 401


def test_next_stays_on_this_host(service: OpenIdService) -> None:
    """A sign-in link whose `next` is on another host leads to the overview."""
    with service.open_browser() as browser:
        answer = browser.get(sign_in_at_provider(browser, "dana", "//evil.example/"))
        assert 'content="0;url=/"' in answer.text


def test_openid_routes_need_a_provider(anonymous: httpx.Client) -> None:
    """Without a provider the routes are not found, and the form does not offer them."""
    assert anonymous.get("/openid/start").status_code == 404
    assert anonymous.get("/openid/callback", params={"code": "x", "state": "y"}).status_code == 404
    assert "/openid/start" not in anonymous.get("/login").text


def test_redirect_uri_uses_the_public_url(embedded_database: Database, issuer: str, now: datetime) -> None:
    """The redirect URI has the public URL, whatever Host header the request sends."""
    settings = Settings(
        public_url="https://evalstop.example",
        oidc_issuer=issuer,
        oidc_client_id=CLIENT_ID,
        oidc_grants=json.dumps(GRANTS),
    )
    with start_dashboard_server(embedded_database, lambda: now, settings) as address:
        answer = httpx.get(f"{address}/openid/start", headers={"Host": "evil.example"}, trust_env=False, timeout=60)
    query = parse_qs(urlsplit(answer.headers["location"]).query)
    assert query["redirect_uri"] == ["https://evalstop.example/openid/callback"]
