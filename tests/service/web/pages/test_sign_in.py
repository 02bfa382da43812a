"""Signing in and out, and what is shown without a session."""

from __future__ import annotations

from datetime import datetime, timedelta
from urllib.parse import urljoin, urlsplit
from uuid import uuid4

import httpx
import pytest
from evalstop_service.store import keys
from evalstop_service.store.database import Database
from evalstop_service.web.pages.cookies import LINK_SECONDS, SESSION, Sessions
from evalstop_service.web.pages.sign_in import safe_path
from hypothesis import example, given
from hypothesis import strategies as st

from tests.service.web.pages.recorded_runs import Tenant, add_tenant
from tests.service.web.pages.serving import (
    SQLITE_ONLY,
    read_csrf_token,
    sign_in_link,
    submit_login_form,
)

RUN_PATHS = ("", "/series.json")


@SQLITE_ONLY
def test_key_gives_a_session(anonymous: httpx.Client, tenant: Tenant) -> None:
    """A key with the scope read gives a cookie that scripts cannot read and other sites cannot send."""
    answer = submit_login_form(anonymous, f" {tenant.secret}\n", "/?status=running")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?status=running")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie
    assert tenant.secret not in answer.headers["set-cookie"]
    assert anonymous.get("/runs").status_code == 200


@SQLITE_ONLY
def test_cookie_is_secure_behind_tls(anonymous: httpx.Client) -> None:
    """Behind a proxy that terminates TLS, the cookie is sent over https only."""
    answer = anonymous.get("/login", headers={"X-Forwarded-Proto": "https"})
    assert "; secure" in answer.headers["set-cookie"].lower()
    assert answer.headers["set-cookie"].startswith("__Host-")


@SQLITE_ONLY
def test_link_gives_a_session(anonymous: httpx.Client, tenant: Tenant) -> None:
    """A signed link answers with a page that redirects itself, so that the strict cookie is sent with the next
    request."""
    answer = anonymous.get(f"{sign_in_link(tenant.key)}&next=/runs/x")
    assert answer.status_code == 200
    assert 'content="0;url=/runs/x"' in answer.text
    assert anonymous.get("/session").json() == {"signed_in": True}
    assert anonymous.get("/runs").status_code == 200


@SQLITE_ONLY
@pytest.mark.parametrize("token", ["", "nonsense", "a.b.c", "\x00", "x" * 5000])
def test_forged_link_is_refused(anonymous: httpx.Client, tenant: Tenant, token: str) -> None:
    """A token that this service did not sign gives no session."""
    answer = anonymous.get("/login", params={"token": token})
    assert answer.status_code == 401
    assert SESSION not in anonymous.cookies


def test_link_has_one_purpose_and_expires(now: datetime) -> None:
    """A link expires, and a token with another secret or for another purpose is not accepted."""
    key_id, current_time = uuid4(), [now]
    sessions = Sessions("one", lambda: current_time[0])
    link = sessions.sign_link(key_id)
    assert sessions.read_link(link) == key_id
    assert sessions.read_link(sessions.sign_flow({"key": str(key_id)})) is None
    assert sessions.read_flow(link) is None
    assert Sessions("other", lambda: now).read_link(link) is None
    current_time[0] = now + timedelta(seconds=LINK_SECONDS + 1)
    assert sessions.read_link(link) is None


@SQLITE_ONLY
def test_rejected_key_gets_the_reason(anonymous: httpx.Client, database: Database, now: datetime) -> None:
    """An unknown key, and one without the scope read, get the form with the reason, and without the key."""
    ingest_only = add_tenant(database, now, "ingest-only", scopes=("ingest",))
    for key, status, words in (
        ("esk_wrong", 401, "No active key"),
        ("", 401, "No active key"),
        (ingest_only.secret, 403, "the scope read"),
    ):
        answer = submit_login_form(anonymous, key)
        assert answer.status_code == status
        assert words in answer.text
        assert not key or key not in answer.text
        assert SESSION not in anonymous.cookies


@SQLITE_ONLY
def test_installation_key_is_refused(anonymous: httpx.Client, database: Database, now: datetime) -> None:
    """Pages show one project, so a key without a project cannot sign in."""
    with database.transaction() as tx:
        _, secret = keys.create_key(tx, project_id=None, name="root", scopes=("admin",), now=now)
    assert submit_login_form(anonymous, secret).status_code == 403


@SQLITE_ONLY
def test_revoked_key_ends_the_session(visitor: httpx.Client, database: Database, tenant: Tenant, now: datetime) -> None:
    """Each request checks that the session's key is still active."""
    assert visitor.get("/runs").status_code == 200
    with database.transaction() as tx:
        assert keys.revoke_key(tx, tenant.id, tenant.key.id, now)
    answer = visitor.get("/runs")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/runs")
    assert visitor.get("/session").json() == {"signed_in": False}


@SQLITE_ONLY
def test_another_site_cannot_sign_a_visitor_in(anonymous: httpx.Client, tenant: Tenant) -> None:
    """A sign-in form that another site sends is refused, so that nobody uses a foreign project unawares."""
    assert submit_login_form(anonymous, tenant.secret, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert anonymous.post("/login", data={"key": tenant.secret}).status_code == 403
    token = read_csrf_token(anonymous, "/login")
    anonymous.cookies.clear()
    assert anonymous.post("/login", data={"key": tenant.secret, "csrf": token}).status_code == 403
    assert SESSION not in anonymous.cookies


@SQLITE_ONLY
def test_without_a_session_pages_redirect_to_sign_in(anonymous: httpx.Client, tenant: Tenant) -> None:
    """Each page redirects to the form, which leads back to the requested page."""
    run = tenant.open_run("secret run")
    for path in (
        "/",
        "/runs?name=a%20b&status=running",
        *(f"/runs/{run.id}{path}" for path in RUN_PATHS),
    ):
        answer = anonymous.get(path)
        assert answer.status_code == 303
        form = anonymous.get(answer.headers["location"])
        back = form.text.split('name="next" value="')[1].split('"')[0].replace("&amp;", "&")
        assert back == path
        assert "secret run" not in answer.text + form.text


@given(st.text() | st.from_regex(r"[/\\\t\n ]{1,4}[a-z.:/\\@]*", fullmatch=True))
@example("/\t/evil.example")
@example("//evil.example")
@example("/\\evil.example")
@example("https://evil.example")
@example("javascript:alert(1)")
def test_next_never_leaves_the_host(text: str) -> None:
    """Whatever `next` says, the browser stays on this host."""
    path = safe_path(text)
    as_browsers_read_it = path.replace("\\", "/").replace("\t", "").replace("\n", "").replace("\r", "").strip()
    assert urlsplit(urljoin("http://host.example/login", as_browsers_read_it)).netloc == "host.example"
    assert path.startswith("/")


def test_ordinary_next_is_kept() -> None:
    """A path with a query and a fragment is unchanged."""
    assert safe_path("/runs/1?x=%20y#top") == "/runs/1?x=%20y#top"
