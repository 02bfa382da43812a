"""Headers of every response, and details that responses and names must not contain."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from evalstop_service.security.scopes import Grants, parse_grants
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.security.served_project import serve_project
from tests.service.web.api.api_calls import expect_json, expect_problem


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    """A client of a service that is reached by https, with an admin key."""
    with serve_project(database, Settings(public_url="https://evalstop.example")) as project:
        yield project.open_client(path="")


def test_every_response_forbids_sniffing_caching_and_framing(client: httpx.Client) -> None:
    """The headers are on responses of the API, the fast ingest endpoint, MLflow's API, metrics, the docs and pages."""
    run = expect_json(client.post("/api/v1/runs", json={"name": "r"}), 201)["id"]
    batch = {"observations": [{"metric": "eval", "step": 1, "value": 0.5}]}
    responses = [
        client.post(f"/api/v1/runs/{run}/observations", json=batch),
        client.get("/mlflow/api/2.0/mlflow/experiments/get?experiment_id=0"),
        *(client.get(path) for path in ("/api/v1/runs", "/api/v1/nothing", "/livez", "/metrics", "/docs", "/login")),
        client.get("/openapi.json"),
    ]
    for response in responses:
        assert response.headers["x-content-type-options"] == "nosniff", response.url
        assert response.headers["cache-control"] == "no-store", response.url
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy, response.url
        assert "frame-ancestors 'none'" in policy, response.url
        assert "script-src 'unsafe-inline'" not in policy


@pytest.mark.parametrize("path", ["/api/v1/policies/%00", "/runs/%00", "/mlflow/%00", "/%00"])
def test_path_with_a_nul_character_is_not_found(client: httpx.Client, path: str) -> None:
    """PostgreSQL cannot store NUL, so that a path with it is a 404 and no internal error."""
    assert client.get(path).status_code == 404
    assert client.post(path, json={"trainerStatus": {}}).status_code == 404


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\n", "a\r"])
def test_name_with_control_characters_is_refused(client: httpx.Client, name: str) -> None:
    """Names of runs and keys contain no line break, so that logs and messages show them on one line."""
    for path, body in (("/runs", {"name": name}), ("/keys", {"name": name, "scopes": ["read"]})):
        expect_problem(client.post(f"/api/v1{path}", json=body), 422)


def test_readiness_does_not_reveal_the_database_address(database: Database) -> None:
    """An unreachable database is a 503 without its host, port, user or name."""
    unreachable = Database("postgresql://somebody:secret@127.0.0.1:9/hidden")
    with start_server(unreachable) as url:
        refused = expect_problem(httpx.get(f"{url}/readyz", trust_env=False, verify=get_ssl_context(), timeout=60), 503)
    unreachable.close()
    for secret in ("127.0.0.1", "somebody", "secret", "hidden", "port"):
        assert secret not in refused["detail"]


def test_cookies_are_secure_and_bound_to_the_host_over_https(client: httpx.Client) -> None:
    """With an https public URL, cookies have the prefix `__Host-`, and one without the prefix is not accepted."""
    form = client.get("/login")
    assert form.headers["set-cookie"].startswith("__Host-evalstop_visit=")
    assert {"; secure", "; path=/"} <= set(re.findall(r"; [a-z/=]+", form.headers["set-cookie"].lower()))
    assert "domain" not in form.headers["set-cookie"].lower()
    token = form.text.split('name="csrf" value="')[1].split('"')[0]
    fields = {"key": client.headers["Authorization"].removeprefix("Bearer "), "csrf": token}
    cookie_header = {"Cookie": form.headers["set-cookie"].split(";")[0]}
    set_cookies = client.post("/login", data=fields, headers=cookie_header).headers.get_list("set-cookie")
    (session,) = [cookie.split(";")[0] for cookie in set_cookies if cookie.startswith("__Host-evalstop_session=")]
    page = client.get("/runs", headers={"Cookie": session})
    assert page.status_code == 200
    assert client.get("/runs", headers={"Cookie": session.removeprefix("__Host-")}).status_code == 303
    logout_form = {"csrf": page.text.split('name="csrf" value="')[1].split('"')[0]}
    logout_cookies = client.post("/logout", data=logout_form, headers={"Cookie": session}).headers.get_list(
        "set-cookie"
    )
    assert any(re.match(r"__Host-evalstop_session=.*Max-Age=0.*Secure", cookie) for cookie in logout_cookies)
    assert client.get("/runs", headers={"Cookie": session}).status_code == 303


@pytest.mark.parametrize("address", ["dana@ex\u0430mple.com", "dan\u212a@example.com"])
def test_email_with_lookalike_letters_gets_no_grant(address: str) -> None:
    """An address with letters that look like ASCII, or become ASCII in lower case, matches no grant."""
    entries = parse_grants('[{"email": "dank@example.com", "project": "p", "role": "admin"}]')
    claims = {"sub": "1", "email": address, "email_verified": True}
    assert Grants(entries).find_roles(claims) == {}
    with pytest.raises(ValueError, match="ASCII"):
        parse_grants(f'[{{"email": "{address}", "project": "p", "role": "admin"}}]')
