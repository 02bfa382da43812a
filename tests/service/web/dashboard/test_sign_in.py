"""Signing in, and what those see who did not."""

from __future__ import annotations

from datetime import datetime, timedelta
from urllib.parse import urljoin, urlsplit
from uuid import uuid4

import httpx
import pytest
from evalstop_service.store import keys
from evalstop_service.store.database import Database
from evalstop_service.web import dashboard
from evalstop_service.web.dashboard.cookies import SESSION
from evalstop_service.web.dashboard.sessions import LINK_SECONDS, Sessions
from evalstop_service.web.dashboard.sign_in import safe_path
from hypothesis import example, given
from hypothesis import strategies as st

from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant, open_run
from tests.service.web.dashboard.serving import EMBEDDED, SECRET, form_token_of, sign_in, token_of

PATHS = ("", "/series.json", "/events")


@EMBEDDED
def test_a_key_opens_the_pages(stranger: httpx.Client, tenant: Tenant) -> None:
    """A key with the scope read gives a session that scripts cannot see and other sites cannot send."""
    answer = sign_in(stranger, f" {tenant.secret}\n", "/?status=running")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?status=running")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie
    assert tenant.secret not in answer.headers["set-cookie"]
    assert stranger.get("/runs").status_code == 200


@EMBEDDED
def test_the_cookie_is_secure_on_https(stranger: httpx.Client) -> None:
    """Behind a proxy that ends TLS the browser is told to send the cookie over https only."""
    answer = stranger.get("/login", headers={"X-Forwarded-Proto": "https"})
    assert "; secure" in answer.headers["set-cookie"].lower()
    assert answer.headers["set-cookie"].startswith("__Host-")


@EMBEDDED
def test_a_link_opens_the_pages(stranger: httpx.Client, tenant: Tenant) -> None:
    """A signed link gives a session by a page that goes on by itself, so that a strict cookie travels with it."""
    answer = stranger.get("/login", params={"token": dashboard.sign_in_token(SECRET, tenant.key.id), "next": "/runs/x"})
    assert answer.status_code == 200
    assert 'content="0;url=/runs/x"' in answer.text
    assert stranger.get("/session").json() == {"signed_in": True}
    assert stranger.get("/runs").status_code == 200


@EMBEDDED
@pytest.mark.parametrize("token", ["", "nonsense", "a.b.c", "\x00", "x" * 5000])
def test_forged_links_do_not(stranger: httpx.Client, tenant: Tenant, token: str) -> None:
    """A token that this service did not sign opens nothing."""
    answer = stranger.get("/login", params={"token": token})
    assert answer.status_code == 401
    assert SESSION not in stranger.cookies


def test_a_link_is_for_one_purpose_and_one_time(now: datetime) -> None:
    """A link grows old, another secret does not sign it, and what is signed for another purpose is none."""
    key_id, present = uuid4(), [now]
    sessions = Sessions("one", lambda: present[0])
    link = sessions.sign_link(key_id)
    assert sessions.read_link(link) == key_id
    assert sessions.read_link(sessions.sign_flow({"key": str(key_id)})) is None
    assert sessions.read_flow(link) is None
    assert Sessions("other", lambda: now).read_link(link) is None
    present[0] = now + timedelta(seconds=LINK_SECONDS + 1)
    assert sessions.read_link(link) is None


@EMBEDDED
def test_wrong_keys_are_told_why(stranger: httpx.Client, database: Database, now: datetime) -> None:
    """An unknown key, and one that may not read, get the form again with the reason, and never see the key again."""
    deaf = add_tenant(database, now, "deaf", scopes=("ingest",))
    for key, status, words in (
        ("esk_wrong", 401, "No active key"),
        ("", 401, "No active key"),
        (deaf.secret, 403, "the scope read"),
    ):
        answer = sign_in(stranger, key)
        assert answer.status_code == status
        assert words in answer.text
        assert not key or key not in answer.text
        assert SESSION not in stranger.cookies


@EMBEDDED
def test_a_key_to_the_installation_opens_no_pages(stranger: httpx.Client, database: Database, now: datetime) -> None:
    """Pages show one project: a key that is bound to none is told so."""
    with database.transaction() as tx:
        _, secret = keys.create_key(tx, project_id=None, name="root", scopes=("admin",), now=now)
    assert sign_in(stranger, secret).status_code == 403


@EMBEDDED
def test_a_revoked_key_is_signed_out(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Every request asks whether the key is still in use."""
    assert visitor.get("/runs").status_code == 200
    with database.transaction() as tx:
        assert keys.revoke_key(tx, tenant.project.id, tenant.key.id, now)
    answer = visitor.get("/runs")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/runs")
    assert visitor.get("/session").json() == {"signed_in": False}


@EMBEDDED
def test_signing_out(visitor: httpx.Client) -> None:
    """After signing out the pages ask for a key again; another site cannot sign a visitor out."""
    token = {"csrf": token_of(visitor)}
    assert visitor.post("/logout", data=token, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert visitor.post("/logout").status_code == 403
    assert visitor.get("/runs").status_code == 200
    assert visitor.post("/logout", data=token).status_code == 303
    assert visitor.get("/runs").status_code == 303


@EMBEDDED
def test_another_site_cannot_sign_a_visitor_in(stranger: httpx.Client, tenant: Tenant) -> None:
    """A form that another site sends is refused, so that nobody looks at a stranger's project unawares."""
    assert sign_in(stranger, tenant.secret, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert stranger.post("/login", data={"key": tenant.secret}).status_code == 403
    token = form_token_of(stranger)
    stranger.cookies.clear()
    assert stranger.post("/login", data={"key": tenant.secret, "csrf": token}).status_code == 403
    assert SESSION not in stranger.cookies


@EMBEDDED
def test_strangers_are_sent_to_sign_in(
    stranger: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """Without a session every page leads to the form, which leads back to where one wanted to go."""
    run = open_run(database, tenant, now, "secret run")
    for path in ("/", "/runs?name=a%20b&status=running", "/runs/events", *(f"/runs/{run.id}{path}" for path in PATHS)):
        answer = stranger.get(path)
        assert answer.status_code == 303
        form = stranger.get(answer.headers["location"])
        back = form.text.split('name="next" value="')[1].split('"')[0].replace("&amp;", "&")
        assert back == path
        assert "secret run" not in answer.text + form.text


def test_the_runs_of_others_do_not_exist(
    visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime
) -> None:
    """A run of another project is not found, by any path, nor listed, nor searched."""
    other = add_tenant(database, now, "others")
    foreign = open_run(database, other, now, "foreign run")
    missing = {path: visitor.get(f"/runs/{uuid4()}{path}") for path in PATHS}
    for path in PATHS:
        answer = visitor.get(f"/runs/{foreign.id}{path}")
        assert answer.status_code == 404
        assert answer.text == missing[path].text
    assert "foreign" not in visitor.get("/runs").text
    assert str(foreign.id) not in visitor.get("/runs", params={"name": "foreign"}).text


@given(st.text() | st.from_regex(r"[/\\\t\n ]{1,4}[a-z.:/\\@]*", fullmatch=True))
@example("/\t/evil.example")
@example("//evil.example")
@example("/\\evil.example")
@example("https://evil.example")
@example("javascript:alert(1)")
def test_the_way_back_never_leaves_the_host(text: str) -> None:
    """Whatever `next` says, the browser stays on this host."""
    path = safe_path(text)
    seen_by_a_browser = path.replace("\\", "/").replace("\t", "").replace("\n", "").replace("\r", "").strip()
    assert urlsplit(urljoin("http://host.example/login", seen_by_a_browser)).netloc == "host.example"
    assert path.startswith("/")


def test_ordinary_ways_back_are_kept() -> None:
    """A path with a query is where one wanted to go."""
    assert safe_path("/runs/1?x=%20y#top") == "/runs/1?x=%20y#top"
