"""Who may do what on which page: a table of every route, held against every role, every form, every stranger."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
import sqlalchemy as sa
from evalstop_detectors import policy_from_document
from evalstop_service.evaluation import backtests
from evalstop_service.ingest import Observations
from evalstop_service.projects import api_keys, policies
from evalstop_service.rules.proposals import Approval, ProposalKind, ProposalState
from evalstop_service.security.address_policy import parse_address_policy
from evalstop_service.security.encryption import Encryption
from evalstop_service.store import decisions, keys, proposals, sessions
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.ids import new_id
from evalstop_service.store.observations import PostedObservation
from evalstop_service.store.proposals import Proposal
from evalstop_service.store.queue import deliveries
from evalstop_service.store.sessions import Session
from evalstop_service.web import dashboard
from evalstop_service.web.dashboard.responses import PageRoute
from evalstop_service.web.dashboard.routes import PAGES
from evalstop_service.webhooks import endpoints

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.statements import record_statements
from tests.service.project_fixture import submit_message
from tests.service.web.dashboard.recorded_runs import LEVEL, Tenant, add_tenant, open_run
from tests.service.web.dashboard.serving import SECRET, serving, token_of

ANYONE, VIEWER, OPERATOR, ADMIN = range(4)

ROLES: dict[tuple[str, str], int] = {
    ("GET", "/login"): ANYONE,
    ("POST", "/login"): ANYONE,
    ("GET", "/session"): ANYONE,
    ("GET", "/openid/start"): ANYONE,
    ("GET", "/openid/callback"): ANYONE,
    ("GET", "/{path:path}"): ANYONE,
    ("POST", "/logout"): VIEWER,
    ("GET", "/projects"): VIEWER,
    ("POST", "/projects"): VIEWER,
    ("GET", "/"): VIEWER,
    ("GET", "/overview/events"): VIEWER,
    ("GET", "/precision"): VIEWER,
    ("GET", "/precision/figures.json"): VIEWER,
    ("GET", "/precision/events"): VIEWER,
    ("GET", "/precision/label"): OPERATOR,
    ("POST", "/precision/label/{run_id}"): OPERATOR,
    ("GET", "/cases"): VIEWER,
    ("GET", "/policies"): VIEWER,
    ("GET", "/policies/{name}"): VIEWER,
    ("GET", "/policies/{name}/edit"): OPERATOR,
    ("POST", "/policies/{name}/edit"): ADMIN,
    ("POST", "/policies/{name}/edit/try"): OPERATOR,
    ("POST", "/policies/{name}/stage"): ADMIN,
    ("POST", "/policies/{name}/stage/lower"): ADMIN,
    ("GET", "/policies/backtests/{backtest_id}"): VIEWER,
    ("GET", "/policies/backtests/{backtest_id}/events"): VIEWER,
    ("GET", "/runs"): VIEWER,
    ("GET", "/runs/events"): VIEWER,
    ("GET", "/runs/fleet"): VIEWER,
    ("GET", "/runs/fleet/events"): VIEWER,
    ("GET", "/runs/compare"): VIEWER,
    ("GET", "/runs/compare/series.json"): VIEWER,
    ("GET", "/runs/{run_id}"): VIEWER,
    ("POST", "/runs/{run_id}/description"): OPERATOR,
    ("POST", "/runs/{run_id}/metrics"): OPERATOR,
    ("GET", "/runs/{run_id}/series.json"): VIEWER,
    ("GET", "/runs/{run_id}/events"): VIEWER,
    ("GET", "/runs/{run_id}/analysis.json"): VIEWER,
    ("GET", "/runs/{run_id}/what-if.json"): VIEWER,
    ("GET", "/runs/{run_id}/metric-charts"): VIEWER,
    ("GET", "/runs/{run_id}/observations"): VIEWER,
    ("GET", "/runs/{run_id}/export.csv"): VIEWER,
    ("GET", "/runs/{run_id}/export.json"): VIEWER,
    ("POST", "/runs/{run_id}/stop"): OPERATOR,
    ("POST", "/runs/{run_id}/outcome"): OPERATOR,
    ("POST", "/decisions/{decision_id}/veto"): OPERATOR,
    ("POST", "/decisions/{decision_id}/release"): OPERATOR,
    ("POST", "/decisions/{decision_id}/undo"): OPERATOR,
    ("POST", "/decisions/{decision_id}/outcome"): OPERATOR,
    ("POST", "/proposals/{proposal_id}/confirm"): OPERATOR,
    ("POST", "/proposals/{proposal_id}/refuse"): OPERATOR,
    ("GET", "/webhooks"): VIEWER,
    ("GET", "/webhooks/deliveries/{delivery_id}"): VIEWER,
    ("POST", "/webhooks/endpoints"): ADMIN,
    ("POST", "/webhooks/endpoints/{endpoint_id}/enabled"): ADMIN,
    ("POST", "/webhooks/endpoints/{endpoint_id}/delete"): ADMIN,
    ("POST", "/webhooks/endpoints/{endpoint_id}/rotate-secret"): ADMIN,
    ("POST", "/webhooks/endpoints/{endpoint_id}/test"): OPERATOR,
    ("POST", "/webhooks/endpoints/{endpoint_id}/replay"): OPERATOR,
    ("POST", "/webhooks/deliveries/{delivery_id}/retry"): OPERATOR,
    ("POST", "/webhooks/deliveries/{delivery_id}/replay"): OPERATOR,
    ("GET", "/settings"): VIEWER,
    ("POST", "/settings"): ADMIN,
    ("POST", "/settings/role-patterns"): ADMIN,
    ("POST", "/settings/pause"): OPERATOR,
    ("POST", "/settings/resume"): OPERATOR,
    ("POST", "/settings/keys"): ADMIN,
    ("POST", "/settings/keys/{key_id}/revoke"): ADMIN,
    ("POST", "/settings/sessions/{session_id}/end"): ADMIN,
    ("GET", "/settings/audit"): ADMIN,
}
"""Every route of the pages, and the least role that it opens to."""

SCOPES = {VIEWER: ("read",), OPERATOR: ("read", "operate"), ADMIN: ("admin",)}

FORMS: dict[tuple[str, str], dict[str, str]] = {
    ("POST", "/precision/label/{run_id}"): {"said": "turned"},
    ("POST", "/policies/{name}/stage"): {"required_percent": "90", "canary_percent": "20"},
    ("POST", "/policies/{name}/stage/lower"): {"reason": "it stopped a good run"},
    ("POST", "/runs/{run_id}/stop"): {"reason": "it diverged"},
    ("POST", "/runs/{run_id}/outcome"): {"outcome": "right"},
    ("POST", "/decisions/{decision_id}/veto"): {"reason": "a known dip"},
    ("POST", "/decisions/{decision_id}/release"): {"reason": "it is urgent"},
    ("POST", "/decisions/{decision_id}/undo"): {"reason": "the eval was broken"},
    ("POST", "/decisions/{decision_id}/outcome"): {"outcome": "right"},
    ("POST", "/projects"): {"project": str(uuid4())},
    ("POST", "/webhooks/endpoints/{endpoint_id}/enabled"): {"enabled": "true"},
    ("POST", "/webhooks/endpoints/{endpoint_id}/replay"): {"since": "2026-01-01T00:00"},
}
"""What a form has to carry to be whole."""

IDS = (
    *("session_id", "run_id", "endpoint_id", "key_id", "delivery_id"),
    *("decision_id", "backtest_id", "proposal_id", "name"),
)

GUARDED = sorted(route for route, role in ROLES.items() if role != ANYONE)
POSTS = [route for route in GUARDED if route[0] == "POST"]
ABOUT_SOMETHING = [route for route in GUARDED if "{" in route[1]]


class House:
    """A server with one of everything in a project, and visitors of each role."""

    def __init__(self, address: str, database: Database, now: datetime) -> None:
        self.address, self.database = address, database
        self.tenant = add_tenant(database, now)
        self.ids = self._ids(self.tenant, now)
        self.visitors = {role: self._visitor(role, now) for role in SCOPES}
        self.tokens = {role: token_of(visitor, "/runs") for role, visitor in self.visitors.items()}

    def _ids(self, tenant: Tenant, now: datetime) -> dict[str, str]:
        by = (self.database, Author(tenant.project.id, "key test", now))
        endpoint = endpoints.create_endpoint(
            *by,
            url="http://127.0.0.1:9/",
            event_types=["*"],
            format="standard",
            address_policy=parse_address_policy("any"),
            encryption=Encryption(),
        )
        key, _ = api_keys.create_key(self.database, tenant.project.id, "key test", "key of somebody", ["read"], now)
        run = open_run(self.database, tenant, now, "a run of somebody", mode="enforce")
        for step, value in enumerate((0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)):
            submit_message(
                self.database,
                tenant.project.id,
                run.id,
                Observations((PostedObservation("reward/gold", step, value),)),
                now,
            )
        policy = policies.add_policy(*by, policy_from_document(LEVEL | {"name": "of-somebody"}))
        backtest = backtests.request_backtest(self.database, tenant.project.id, policy.document, 1, "key test", now)
        with self.database.reading() as tx:
            delivery = deliveries.list_deliveries(tx, tenant.project.id)[0]
            decision = decisions.list_decisions(tx, tenant.project.id)[0]
        proposal = Proposal(
            new_id(),
            tenant.project.id,
            ProposalKind.STOP_RUN,
            str(run.id),
            "Stop a run of somebody now",
            "",
            "it diverged",
            "key test",
            (Approval("key test", "key test", now),),
            ProposalState.OPEN,
            now,
        )
        with self.database.transaction() as tx:
            proposals.add_proposal(tx, proposal)
        session = Session("", "", "somebody", {}, now, now + timedelta(days=1), key.id)
        with self.database.transaction() as tx:
            sessions.create_session(tx, session)
        return {
            "session_id": str(session.id),
            "run_id": str(run.id),
            "endpoint_id": str(endpoint.id),
            "key_id": str(key.id),
            "delivery_id": str(delivery.id),
            "decision_id": str(decision.id),
            "backtest_id": str(backtest.id),
            "proposal_id": str(proposal.id),
            "name": policy.name,
        }

    def _visitor(self, role: int, now: datetime) -> httpx.Client:
        with self.database.transaction() as tx:
            key, _ = keys.create_key(
                tx, project_id=self.tenant.project.id, name="visitor", scopes=SCOPES[role], now=now
            )
        client = httpx.Client(verify=get_ssl_context(), base_url=self.address, timeout=30)
        client.get("/login", params={"token": dashboard.sign_in_token(SECRET, key.id)}).raise_for_status()
        return client

    def ask(
        self,
        client: httpx.Client,
        route: tuple[str, str],
        ids: dict[str, str],
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Ask a route, with a whole form where it takes one; of a stream only the head is read."""
        method, template = route
        form = FORMS.get(route, {}) | ({"csrf": token} if token is not None else {})
        data = form if method == "POST" else None
        with client.stream(method, template.format(**ids), data=data, headers=headers) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                response.read()
        return response


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[House]:
    file = tmp_path_factory.mktemp("roles") / "evalstop.db"
    file.write_bytes(request.getfixturevalue("migrated_file").read_bytes())
    database = Database(f"sqlite:///{file}", "NORMAL")
    with serving(database) as address:
        house = House(address, database, datetime.now().astimezone())
        yield house
        for visitor in house.visitors.values():
            visitor.close()
    database.close()


def missing() -> dict[str, str]:
    """Ids of nothing."""
    return dict.fromkeys(IDS, str(uuid4()))


def test_the_table_is_complete() -> None:
    """Every route of the pages has its row: a new one without fails here."""
    routes = [route for part in PAGES for route in part.router.routes if isinstance(route, PageRoute)]
    assert {(method, route.path) for route in routes for method in route.methods or ()} == set(ROLES)


@pytest.mark.parametrize("role", SCOPES, ids=["viewer", "operator", "admin"])
def test_roles(house: House, role: int) -> None:
    """A visitor may do exactly what their role covers; all else answers 403 and says which role it takes."""
    visitor, token = house.visitors[role], house.tokens[role]
    for route in GUARDED:
        if route == ("POST", "/logout"):
            continue  # a session of a key that goes on elsewhere
        response = house.ask(visitor, route, missing(), token)
        if role >= ROLES[route]:
            assert response.status_code not in (401, 403), (route, response.text)
            assert response.status_code < 500, (route, response.text)
            assert not response.headers.get("location", "").startswith("/login"), route
        else:
            assert response.status_code == 403, route
            assert "This needs the role" in response.text


def test_strangers_see_nothing(house: House) -> None:
    """Without a session every route but those to sign in by leads to the form, whatever it is about."""
    with httpx.Client(verify=get_ssl_context(), base_url=house.address, timeout=30) as stranger:
        for route in GUARDED:
            for ids in (house.ids, missing()):
                response = house.ask(stranger, route, ids)
                assert response.status_code == 303, route
                assert response.headers["location"].startswith("/login"), route


@pytest.mark.parametrize("route", POSTS, ids=" ".join)
def test_every_form_needs_its_token(house: House, route: tuple[str, str]) -> None:
    """Without the token of this very session, or sent by another site, a form changes nothing: 403."""
    admin, token = house.visitors[ADMIN], house.tokens[ADMIN]
    before = state(house.database)
    for wrong in (None, "", "x", house.tokens[VIEWER], token[:-1], token + "x"):
        response = house.ask(admin, route, house.ids, wrong)
        assert response.status_code == 403, wrong
        assert "Nothing was changed" in response.text
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        assert house.ask(admin, route, house.ids, token, headers).status_code == 403
    assert house.ask(admin, route, house.ids, headers={"X-CSRF-Token": house.tokens[VIEWER]}).status_code == 403
    assert state(house.database) == before


def test_a_script_sends_the_token_as_a_header(house: House) -> None:
    """What is no form carries the token of the page's head."""
    headers = {"X-CSRF-Token": house.tokens[ADMIN]}
    assert house.ask(house.visitors[ADMIN], ("POST", "/settings/resume"), {}, headers=headers).status_code == 303


@pytest.mark.parametrize("route", ABOUT_SOMETHING, ids=" ".join)
def test_what_is_foreign_is_missing(house: House, now: datetime, route: tuple[str, str]) -> None:
    """What belongs to another project answers as what does not exist does: the same text, by the same statements."""
    other = add_tenant(house.database, now, f"other {uuid4()}", scopes=("admin",))
    with httpx.Client(verify=get_ssl_context(), base_url=house.address, timeout=30) as stranger:
        stranger.get("/login", params={"token": dashboard.sign_in_token(SECRET, other.key.id)}).raise_for_status()
        token = token_of(stranger, "/runs")
        answers = []
        before = state(house.database)
        for ids in (house.ids, missing()):
            with record_statements(house.database) as seen:
                response = house.ask(stranger, route, ids, token)
            text = response.text
            for one in ids.values():
                text = text.replace(one, "ID")
            answers.append((response.status_code, text, seen))
        assert answers[0] == answers[1]
        assert answers[0][0] == 404
        assert state(house.database) == before


def test_nothing_of_others_is_listed_or_searched(house: House, now: datetime) -> None:
    """No page of a project names anything of another one, whatever it is asked for."""
    other = add_tenant(house.database, now, f"other {uuid4()}", scopes=("admin",))
    with httpx.Client(verify=get_ssl_context(), base_url=house.address, timeout=30) as stranger:
        stranger.get("/login", params={"token": dashboard.sign_in_token(SECRET, other.key.id)}).raise_for_status()
        last = "ffffffff-ffff-7fff-bfff-ffffffffffff"
        for path in (
            "/runs",
            "/runs?name=somebody",
            f"/runs?cursor={last}",
            "/webhooks",
            f"/webhooks?endpoint={house.ids['endpoint_id']}",
            f"/webhooks?cursor={last}",
            "/",
            "/precision",
            "/precision/figures.json",
            "/cases",
            "/policies",
            "/settings",
            "/settings/audit",
            "/settings/audit?actor=key",
            f"/settings/audit?cursor={last}",
            "/projects",
        ):
            text = stranger.get(path).text
            for needle in ("of somebody", "of-somebody", "127.0.0.1:9", house.tenant.project.name):
                assert needle not in text, (path, needle)
            asked = {house.ids["endpoint_id"]} if "endpoint=" in path else set()
            assert not any(one in text for one in set(house.ids.values()) - asked), path


def state(database: Database) -> list[Any]:
    """What a form could have changed."""
    tables = ("projects", "keys", "endpoints", "audit_log", "deliveries", "decisions", "backtests")
    with database.reading() as tx:
        return [tx.execute(sa.text(f"SELECT * FROM {table} ORDER BY id")).all() for table in tables]
