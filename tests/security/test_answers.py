"""What every answer has, and what none gives away."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.security.scopes import Grants, parse_grants
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from pydantic import ValidationError

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_project
from tests.service.web.api.api_calls import expect_json, expect_problem


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    create_project(database, "p", "enforce", 0.0, utc_now(), "paper")
    key = api_keys.create_named_key(database, "p", "k", ["admin"], utc_now())[1]
    headers = {"Authorization": f"Bearer {key}"}
    settings = Settings(public_url="https://evalstop.example")
    with (
        start_server(database, settings) as url,
        httpx.Client(base_url=url, headers=headers, trust_env=False, verify=get_ssl_context()) as client,
    ):
        yield client


def test_every_answer_is_what_it_says(client: httpx.Client) -> None:
    """Each answer forbids sniffing, storing and framing, unless its own headers say more: of the API, its problems,
    batches that are read straight from the socket, MLflow's, metrics, the description and pages."""
    run = expect_json(client.post("/api/v1/runs", json={"name": "r"}), 201)["id"]
    batch = {"observations": [{"metric": "eval", "step": 1, "value": 0.5}]}
    answers = [
        client.post(f"/api/v1/runs/{run}/observations", json=batch),
        client.get("/mlflow/api/2.0/mlflow/experiments/get?experiment_id=0"),
        *(client.get(path) for path in ("/api/v1/runs", "/api/v1/nothing", "/livez", "/metrics", "/docs", "/login")),
        client.get("/openapi.json"),
    ]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff", answer.url
        assert answer.headers["cache-control"] == "no-store", answer.url
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy, answer.url
        assert "frame-ancestors 'none'" in policy, answer.url
        assert "script-src 'unsafe-inline'" not in policy


@pytest.mark.parametrize("path", ["/api/v1/policies/%00", "/api/v1/kubeflow/a%00b", "/runs/%00", "/mlflow/%00", "/%00"])
def test_a_path_with_nul_is_nowhere(client: httpx.Client, path: str) -> None:
    """The character NUL, which PostgreSQL stores nowhere, is answered 404 in a path, not as a fault."""
    assert client.get(path).status_code == 404
    assert client.post(path, json={"trainerStatus": {}}).status_code == 404


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\n", "a\r"])
def test_a_name_stands_on_one_line(client: httpx.Client, name: str) -> None:
    """Names of runs, keys and those who act hold no line feeds: a log or a message shows them as one."""
    for path, body in (
        ("/runs", {"name": name}),
        ("/keys", {"name": name, "scopes": ["read"]}),
        ("/project/pause", {"actor": name, "reason": "look"}),
    ):
        expect_problem(client.post(f"/api/v1{path}", json=body), 422)


def test_readiness_says_nothing_of_the_database_s_address(database: Database) -> None:
    """Whoever asks whether the service is ready hears that its database is away, and not where it is."""
    away = Database("postgresql://somebody:secret@127.0.0.1:9/hidden")
    with start_server(away) as url:
        refused = expect_problem(httpx.get(f"{url}/readyz", trust_env=False, verify=get_ssl_context()), 503)
    away.close()
    for hidden in ("127.0.0.1", "somebody", "secret", "hidden", "port"):
        assert hidden not in refused["detail"]


def test_cookies_are_this_host_s_alone_where_the_service_is_reached_by_https(client: httpx.Client) -> None:
    """The public address says that cookies travel by https alone; one that another host could plant opens nothing."""
    form = client.get("/login")
    assert form.headers["set-cookie"].startswith("__Host-evalstop_visit=")
    assert {"; secure", "; path=/"} <= set(re.findall(r"; [a-z/=]+", form.headers["set-cookie"].lower()))
    assert "domain" not in form.headers["set-cookie"].lower()
    token = form.text.split('name="csrf" value="')[1].split('"')[0]
    fields = {"key": client.headers["Authorization"].removeprefix("Bearer "), "csrf": token}
    sent = {"Cookie": form.headers["set-cookie"].split(";")[0]}
    set_cookies = client.post("/login", data=fields, headers=sent).headers.get_list("set-cookie")
    (session,) = [one.split(";")[0] for one in set_cookies if one.startswith("__Host-evalstop_session=")]
    page = client.get("/runs", headers={"Cookie": session})
    assert page.status_code == 200
    assert client.get("/runs", headers={"Cookie": session.removeprefix("__Host-")}).status_code == 303
    out = {"csrf": page.text.split('name="csrf" value="')[1].split('"')[0]}
    ended = client.post("/logout", data=out, headers={"Cookie": session}).headers.get_list("set-cookie")
    assert any(re.match(r"__Host-evalstop_session=.*Max-Age=0.*Secure", one) for one in ended)
    assert client.get("/runs", headers={"Cookie": session}).status_code == 303


@pytest.mark.parametrize("address", ["dana@ex\u0430mple.com", "dan\u212a@example.com"])
def test_an_address_in_other_letters_is_nobody_s(address: str) -> None:
    """A verified e-mail address with letters that look like ASCII, or become it in lower case, gets no grant."""
    entries = parse_grants('[{"email": "dank@example.com", "project": "p", "role": "admin"}]')
    claims = {"sub": "1", "email": address, "email_verified": True}
    assert Grants(entries).find_roles(claims) == {}
    with pytest.raises(ValueError, match="ASCII"):
        parse_grants(f'[{{"email": "{address}", "project": "p", "role": "admin"}}]')


def test_session_secrets_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that could be guessed from a cookie is refused at the start."""
    monkeypatch.setenv("EVALSTOP_SESSION_SECRET", "s" * 31)
    with pytest.raises(ValidationError, match="session_secret"):
        Settings()
    monkeypatch.setenv("EVALSTOP_SESSION_SECRET", "s" * 32)
    assert Settings().session_secret is not None
