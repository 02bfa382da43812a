"""Signing in by OpenID at a real provider, and what is granted to whom."""

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
from evalstop_service.configuration import check_settings
from evalstop_service.errors import InvalidSetting
from evalstop_service.security.scopes import Grant, Grants, VisitorRole, find_role, parse_grants
from evalstop_service.settings import Settings
from evalstop_service.store import audit
from evalstop_service.store.database import Database
from evalstop_service.web.dashboard.cookies import FLOW, SESSION
from playwright.sync_api import Browser, ConsoleMessage
from pydantic import SecretStr, ValidationError

from tests.fixtures.certificates import get_ssl_context
from tests.service.web.dashboard.fake_provider import CLIENT_ID, CLIENT_SECRET
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant
from tests.service.web.dashboard.serving import serving, token_of

pytestmark = pytest.mark.real

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
class House:
    """A service whose visitors sign in by the provider, and the moment that it believes in."""

    address: str
    database: Database
    tenants: dict[str, Tenant]
    past: timedelta = timedelta()

    def browser(self) -> httpx.Client:
        """A browser of somebody's; follows no redirect."""
        return httpx.Client(verify=get_ssl_context(), base_url=self.address, timeout=30)


@pytest.fixture
def house(embedded_database: Database, issuer: str, now: datetime) -> Iterator[House]:
    settings = Settings(
        oidc_issuer=issuer,
        oidc_client_id=CLIENT_ID,
        oidc_client_secret=SecretStr(CLIENT_SECRET),
        oidc_grants=json.dumps(GRANTS),
    )
    tenants = {name: add_tenant(embedded_database, now, name) for name in ("alignment", "safety", "secret")}
    house = House("", embedded_database, tenants)
    with serving(embedded_database, lambda: now + house.past, settings) as house.address:
        yield house


def answer_of(browser: httpx.Client, name: str, target: str = "/settings") -> str:
    """Sign in at the provider by a browser; gives the address that it is sent back to."""
    begun = browser.get("/openid/start", params={"next": target})
    assert begun.status_code == 303, begun.text
    url = begun.headers["location"]
    with httpx.Client(verify=get_ssl_context(), timeout=30, base_url=f"http://{urlsplit(url).netloc}") as there:
        form = there.get(url, follow_redirects=True)
        token = form.text.split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]
        said = there.post(str(form.url), data={"csrfmiddlewaretoken": token, "username": name, "password": name})
        while urlsplit(said.headers["location"]).path != "/openid/callback":
            said = there.get(said.headers["location"])
    return str(said.headers["location"])


def test_a_visitor_signs_in_and_out(house: House) -> None:
    """Who is in a group gets its role in its project, is in the audit log, and is out for good after signing out."""
    with house.browser() as browser:
        answer = browser.get(answer_of(browser, "dana"))
        assert answer.status_code == 200, answer.text
        assert 'content="0;url=/settings"' in answer.text
        cookies = {text.split("=")[0]: text.lower() for text in answer.headers.get_list("set-cookie")}
        assert "httponly" in cookies[SESSION]
        assert "samesite=strict" in cookies[SESSION]
        assert FLOW not in browser.cookies
        shown = browser.get("/projects").text
        assert "user dana@example.com" in shown
        assert "operator" in shown
        assert "safety" not in shown
        with house.database.reading() as tx:
            (entry,) = audit.list_entries(tx, house.tenants["alignment"].project.id)
        assert (entry.actor, entry.action) == ("user dana@example.com", "session.opened")
        assert entry.details["role"] == "operator"
        session = browser.cookies[SESSION]
        assert browser.post("/logout", data={"csrf": token_of(browser, "/projects")}).status_code == 303
        browser.cookies.set(SESSION, session)
        assert browser.get("/session").json() == {"signed_in": False}


def test_a_real_browser_signs_in(house: House, browser: Browser) -> None:
    """From the form by the provider, which is another site to the browser, to the page that was wanted, and out."""
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(30_000)
        said: list[ConsoleMessage] = []
        page.on("console", lambda message: said.append(message))
        page.goto(f"{house.address}/settings")
        page.click("text=Sign in with your organization")
        page.fill("input[name=username]", "kim")
        page.fill("input[name=password]", "kim")
        page.click("text=Sign in")
        page.wait_for_url(f"{house.address}/settings")
        assert page.locator("#members").inner_text().count("user kim@example.com")
        page.click("a.project")
        page.click("text=Switch")
        page.goto(f"{house.address}/settings")
        assert "safety" in page.locator("header").inner_text()
        assert page.locator("text=Create key").count()  # an admin there
        assert [message.text for message in said if message.location["url"].startswith(house.address)] == []
        page.click("text=Sign out")
        page.wait_for_url(f"{house.address}/login")
        page.goto(f"{house.address}/settings")
        assert "/login" in page.url


def test_a_session_ends_by_itself(house: House) -> None:
    """After a working day the provider is asked again."""
    with house.browser() as browser:
        browser.get(answer_of(browser, "dana"))
        house.past = timedelta(hours=11, minutes=59)
        assert browser.get("/session").json() == {"signed_in": True}
        house.past = timedelta(hours=12)
        assert browser.get("/session").json() == {"signed_in": False}


def test_a_visitor_goes_from_project_to_project(house: House) -> None:
    """Who has roles in several projects sees them, and no others, and goes to one of them."""
    with house.browser() as browser:
        browser.get(answer_of(browser, "kim"))
        token = token_of(browser, "/projects")
        for name, status in (("safety", 303), ("secret", 404)):
            wanted = {"project": str(house.tenants[name].project.id), "csrf": token}
            assert browser.post("/projects", data=wanted).status_code == status
        shown = browser.get("/projects").text
        assert "secret" not in shown
        assert shown.index("safety") < shown.index(">current<")
        assert "admin" in shown


def test_to_be_known_is_not_enough(house: House) -> None:
    """An address that the provider did not verify, and no group, give nothing."""
    with house.browser() as browser:
        answer = browser.get(answer_of(browser, "mallory"))
        assert answer.status_code == 403
        assert "no role in any project" in answer.text
        assert SESSION not in browser.cookies


def test_an_answer_is_good_once_and_in_one_browser(house: House) -> None:
    """What comes back is worth nothing a second time, in another browser, or after ten minutes."""
    with house.browser() as browser, house.browser() as other:
        answer = answer_of(browser, "dana")
        flow = browser.cookies[FLOW]
        assert other.get(answer).status_code == 401
        assert "Try again" in other.get(answer).text
        answer_of(other, "dana")
        assert other.get(answer).status_code == 401  # another sign-in was begun there
        assert browser.get(answer).status_code == 200
        browser.cookies.delete(SESSION)
        assert browser.get(answer).status_code == 401
        browser.cookies.set(FLOW, flow)
        assert browser.get(answer).status_code == 401  # the provider knows the code no more
        assert SESSION not in browser.cookies
        answer = answer_of(other, "dana")
        house.past = timedelta(minutes=11)
        assert other.get(answer).status_code == 401


def test_the_way_back_stays_on_this_host(house: House) -> None:
    """A link to sign in cannot lead anywhere else afterwards."""
    with house.browser() as browser:
        answer = browser.get(answer_of(browser, "dana", "//evil.example/"))
        assert 'content="0;url=/"' in answer.text


def test_without_a_provider_there_is_no_such_page(stranger: httpx.Client) -> None:
    """Where no provider is set the form offers none."""
    assert stranger.get("/openid/start").status_code == 404
    assert stranger.get("/openid/callback", params={"code": "x", "state": "y"}).status_code == 404
    assert "/openid/start" not in stranger.get("/login").text


def test_what_is_granted() -> None:
    """The highest role counts, groups may be one or many, and only what a provider verified is an address."""
    grants = Grants(parse_grants(json.dumps([*GRANTS, {"group": "root", "project": "*", "role": "viewer"}])))
    verified = {"email": "KIM@example.com", "email_verified": True}
    assert grants.find_roles({"groups": ["everyone", 7, None]} | verified) == {"safety": "admin"}
    assert grants.find_roles({"groups": "everyone", "email": "kim@example.com"}) == {"safety": "viewer"}
    assert grants.find_roles({"groups": {"everyone": 1}, "email": 7, "email_verified": "true"}) == {}
    held = grants.find_roles({"groups": ["root", "ml-oncall"]})
    assert find_role(held, "alignment") == VisitorRole.OPERATOR
    assert find_role(held, "any other") == VisitorRole.VIEWER
    assert find_role({}, "alignment") is None
    assert grants.display_name({"sub": "1", "name": "key\x00 first\n" + "x" * 500}).startswith("key  first")
    assert len(grants.display_name({"sub": "1", "name": "x" * 500})) == 200
    assert grants.display_name({"sub": "1", "name": 7}) == "1"


@pytest.mark.parametrize(
    "text",
    [
        "/no/such/file",
        "[",
        "[]",
        '[{"group": "a", "email": "b", "project": "c", "role": "viewer"}]',
        '[{"project": "c", "role": "viewer"}]',
        '[{"group": "a", "project": "c", "role": "root"}]',
        '[{"group": "", "project": "c", "role": "viewer"}]',
        "[7]",
    ],
)
def test_grants_that_are_none_are_refused(text: str) -> None:
    """A service does not start with grants that cannot be read."""
    settings = Settings(oidc_issuer="https://id.example", oidc_client_id="x", oidc_grants=text)
    with pytest.raises(InvalidSetting, match="EVALSTOP_OIDC_GRANTS"):
        check_settings(settings)


def test_grants_are_read_from_a_file(tmp_path: Path) -> None:
    """Long lists go into a file of their own."""
    file = tmp_path / "grants.json"
    file.write_text(json.dumps(GRANTS[:1]))
    assert parse_grants(str(file)) == (Grant("alignment", VisitorRole.OPERATOR, group="ml-oncall"),)


@pytest.mark.parametrize("issuer", ["http://id.example", "id.example", "https://", "https://id.example/?a=b"])
def test_an_issuer_is_talked_to_by_tls(issuer: str) -> None:
    """Only on the own machine may a provider do without."""
    with pytest.raises(ValidationError, match="issuer"):
        Settings(oidc_issuer=issuer, oidc_client_id="x", oidc_grants=json.dumps(GRANTS))


def test_half_a_provider_is_refused() -> None:
    """What is missing is named."""
    with pytest.raises(ValidationError, match="EVALSTOP_OIDC_GRANTS"):
        Settings(oidc_issuer="https://id.example", oidc_client_id="x")


def test_the_provider_sends_people_back_to_the_public_address(
    embedded_database: Database, issuer: str, now: datetime
) -> None:
    """Whatever host a request names, as one that a stranger has somebody follow would."""
    settings = Settings(
        public_url="https://evalstop.example",
        oidc_issuer=issuer,
        oidc_client_id=CLIENT_ID,
        oidc_grants=json.dumps(GRANTS),
    )
    with serving(embedded_database, lambda: now, settings) as address:
        answer = httpx.get(f"{address}/openid/start", headers={"Host": "evil.example"}, trust_env=False)
    sent = parse_qs(urlsplit(answer.headers["location"]).query)
    assert sent["redirect_uri"] == ["https://evalstop.example/openid/callback"]
