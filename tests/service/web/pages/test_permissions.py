"""Permissions of the pages: every route against every role, form tokens, and other projects."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
import sqlalchemy as sa
from evalstop_service.decisions import second_person
from evalstop_service.evaluation import backtests
from evalstop_service.projects import api_keys
from evalstop_service.runs.descriptions import add_step_note, describe_run
from evalstop_service.store import keys, run_details
from evalstop_service.store.audit import Author
from evalstop_service.store.database import Database
from evalstop_service.store.keys import Session
from evalstop_service.store.queue import outbox
from evalstop_service.web.pages.responses import PageRoute
from evalstop_service.web.pages.routes import PAGES
from msgspec import structs

from tests.fixtures.statements import record_statements
from tests.service.web.pages.recorded_runs import LEVEL_POLICY, Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import (
    open_client,
    read_csrf_token,
    sign_in_by_link,
    start_dashboard_server,
)

ANYONE, VIEWER, OPERATOR, ADMIN = range(4)

ROUTE_ROLES: dict[tuple[str, str], int] = {
    ("GET", "/login"): ANYONE,
    ("POST", "/login"): ANYONE,
    ("GET", "/session"): ANYONE,
    ("GET", "/openid/start"): ANYONE,
    ("GET", "/openid/callback"): ANYONE,
    ("POST", "/logout"): VIEWER,
    ("GET", "/projects"): VIEWER,
    ("POST", "/projects"): VIEWER,
    ("GET", "/"): VIEWER,
    ("GET", "/groups/{name:path}"): VIEWER,
    ("GET", "/group/series.json"): VIEWER,
    ("GET", "/precision"): VIEWER,
    ("GET", "/precision/figures.json"): VIEWER,
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
    ("GET", "/runs"): VIEWER,
    ("GET", "/runs/fleet"): VIEWER,
    ("GET", "/runs/compare"): VIEWER,
    ("GET", "/runs/compare/series.json"): VIEWER,
    ("GET", "/runs/{run_id}"): VIEWER,
    ("POST", "/runs/{run_id}/description"): OPERATOR,
    ("POST", "/runs/{run_id}/notes"): OPERATOR,
    ("POST", "/runs/{run_id}/notes/{note_id}/remove"): OPERATOR,
    ("POST", "/runs/{run_id}/metrics"): OPERATOR,
    ("GET", "/runs/{run_id}/series.json"): VIEWER,
    ("GET", "/runs/{run_id}/analysis.json"): VIEWER,
    ("GET", "/runs/{run_id}/what-if.json"): VIEWER,
    ("GET", "/runs/{run_id}/metric-charts"): VIEWER,
    ("GET", "/runs/{run_id}/export.csv"): VIEWER,
    ("GET", "/runs/{run_id}/segments.json"): VIEWER,
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
    ("POST", "/webhooks/deliveries/{delivery_id}/replay"): OPERATOR,
    ("GET", "/settings"): VIEWER,
    ("POST", "/settings"): ADMIN,
    ("POST", "/settings/pause"): OPERATOR,
    ("POST", "/settings/resume"): OPERATOR,
    ("POST", "/settings/keys"): ADMIN,
    ("POST", "/settings/keys/{key_id}/revoke"): ADMIN,
    ("POST", "/settings/sessions/{session_id}/end"): ADMIN,
    ("GET", "/settings/audit"): ADMIN,
}
"""Every route of the pages, and the lowest role that may use it."""

ROLE_SCOPES = {VIEWER: ("read",), OPERATOR: ("read", "operate"), ADMIN: ("admin",)}

FORMS: dict[tuple[str, str], dict[str, str]] = {
    ("POST", "/precision/label/{run_id}"): {"run_outcome": "turned"},
    ("POST", "/policies/{name}/stage"): {"required_percent": "90", "canary_percent": "20"},
    ("POST", "/policies/{name}/stage/lower"): {"reason": "it stopped a good run"},
    ("POST", "/runs/{run_id}/stop"): {"reason": "it diverged"},
    ("POST", "/runs/{run_id}/notes"): {"step": "1", "text": "a new grader"},
    ("POST", "/runs/{run_id}/outcome"): {"outcome": "right"},
    ("POST", "/decisions/{decision_id}/veto"): {"reason": "a known dip"},
    ("POST", "/decisions/{decision_id}/release"): {"reason": "it is urgent"},
    ("POST", "/decisions/{decision_id}/undo"): {"reason": "the eval was broken"},
    ("POST", "/decisions/{decision_id}/outcome"): {"outcome": "right"},
    ("POST", "/projects"): {"project": str(uuid4())},
    ("POST", "/webhooks/endpoints/{endpoint_id}/enabled"): {"enabled": "true"},
}
"""The fields that each form requires."""

QUERIES = {
    ("GET", "/runs/{run_id}/what-if.json"): {"policy": "paper"},
    ("GET", "/group/series.json"): {"group": "of-somebody"},
}
"""The queries of routes that require one."""

PATH_PARAMETERS = (
    *("session_id", "run_id", "endpoint_id", "key_id", "delivery_id"),
    *("decision_id", "backtest_id", "proposal_id", "note_id", "name"),
)

GUARDED_ROUTES = sorted(route for route, role in ROUTE_ROLES.items() if role != ANYONE)
POST_ROUTES = [route for route in GUARDED_ROUTES if route[0] == "POST"]
ROUTES_WITH_PARAMETERS = [route for route in GUARDED_ROUTES if "{" in route[1]]


class PopulatedService:
    """A server with one object of every kind in a project, and a signed-in client for each role."""

    def __init__(self, address: str, database: Database, now: datetime) -> None:
        self.address, self.database = address, database
        self.tenant = add_tenant(database, now)
        self.ids = self._create_objects(self.tenant, now)
        self.visitors = {role: self._sign_in(role, now) for role in ROLE_SCOPES}
        self.tokens = {role: read_csrf_token(visitor, "/runs") for role, visitor in self.visitors.items()}

    def _create_objects(self, tenant: Tenant, now: datetime) -> dict[str, str]:
        endpoint = tenant.add_endpoint()
        key, _ = api_keys.create_key(self.database, tenant.id, "key test", "key of somebody", ["read"], now)
        run, decision = tenant.open_stopped_run("a run of somebody", load_recorded_evals("np-0044")[:29])
        policy = tenant.add_policy(LEVEL_POLICY | {"name": "of-somebody"})
        backtest = backtests.run_backtest(self.database, tenant.id, policy.document, 1, "key test", now)
        with self.database.reading() as tx:
            delivery = outbox.list_deliveries(tx, tenant.id)[0]
        tenant.change_settings(second_person=True)
        author = Author(tenant.id, "key test", now)
        other_run = tenant.open_run("another run of somebody")
        proposal = second_person.stop_run(self.database, author, other_run.id, "it diverged")
        assert proposal is not None
        tenant.change_settings(second_person=False)
        add_step_note(self.database, author, run.id, 1, "a note of somebody")
        describe_run(self.database, author, run.id, lambda before: structs.replace(before, group=policy.name))
        with self.database.reading() as tx:
            (note,) = run_details.load_descriptions(tx, [run.id])[run.id].step_notes
        session = Session("", "", "somebody", {}, now, now + timedelta(days=1), key.id)
        with self.database.transaction() as tx:
            keys.create_session(tx, session)
        return {
            "session_id": str(session.id),
            "run_id": str(run.id),
            "note_id": str(note.id),
            "endpoint_id": str(endpoint.id),
            "key_id": str(key.id),
            "delivery_id": str(delivery.id),
            "decision_id": str(decision.id),
            "backtest_id": str(backtest.id),
            "proposal_id": str(proposal.id),
            "name": policy.name,
        }

    def _sign_in(self, role: int, now: datetime) -> httpx.Client:
        with self.database.transaction() as tx:
            key, _ = keys.create_key(tx, project_id=self.tenant.id, name="visitor", scopes=ROLE_SCOPES[role], now=now)
        client = open_client(self.address)
        sign_in_by_link(client, key)
        return client

    def send_request(
        self,
        client: httpx.Client,
        route: tuple[str, str],
        ids: dict[str, str],
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request, with a complete form where the route takes one."""
        method, template = route
        form = FORMS.get(route, {}) | ({"csrf": token} if token is not None else {})
        data = form if method == "POST" else None
        path = template.replace(":path", "").format(**ids)
        return client.request(method, path, params=QUERIES.get(route), data=data, headers=headers)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[PopulatedService]:
    file = tmp_path_factory.mktemp("roles") / "evalstop.db"
    file.write_bytes(request.getfixturevalue("migrated_file").read_bytes())
    database = Database(f"sqlite:///{file}")
    with start_dashboard_server(database) as address:
        service = PopulatedService(address, database, datetime.now().astimezone())
        yield service
        for visitor in service.visitors.values():
            visitor.close()
    database.close()


def random_ids() -> dict[str, str]:
    """Ids of objects that do not exist."""
    return dict.fromkeys(PATH_PARAMETERS, str(uuid4()))


def test_every_route_has_a_role() -> None:
    """A new route fails here until it has a row in the table."""
    routes = [route for part in PAGES for route in part.router.routes if isinstance(route, PageRoute)]
    listed = {(method, route.path) for route in routes for method in route.methods or ()}
    signed = {(method, path) for method, path in listed if path.startswith("/act/")}  # the link is the permission
    assert listed - signed == set(ROUTE_ROLES)


@pytest.mark.parametrize("role", ROLE_SCOPES, ids=["viewer", "operator", "admin"])
def test_role_may_do_exactly_what_it_covers(service: PopulatedService, role: int) -> None:
    """A role may use its routes; all others answer 403 and name the required role."""
    visitor, token = service.visitors[role], service.tokens[role]
    for route in GUARDED_ROUTES:
        if route == ("POST", "/logout"):
            continue  # other tests still use this session
        response = service.send_request(visitor, route, random_ids(), token)
        if role >= ROUTE_ROLES[route]:
            assert response.status_code not in (401, 403), (route, response.text)
            assert response.status_code < 500, (route, response.text)
            assert not response.headers.get("location", "").startswith("/login"), route
        else:
            assert response.status_code == 403, route
            assert "This needs the role" in response.text


def test_without_a_session_every_route_leads_to_sign_in(service: PopulatedService) -> None:
    """Without a session every guarded route redirects to the form, whether its object exists or not."""
    with open_client(service.address) as anonymous:
        for route in GUARDED_ROUTES:
            for ids in (service.ids, random_ids()):
                response = service.send_request(anonymous, route, ids)
                assert response.status_code == 303, route
                assert response.headers["location"].startswith("/login"), route


@pytest.mark.parametrize("route", POST_ROUTES, ids=" ".join)
def test_form_without_its_csrf_token_is_refused(service: PopulatedService, route: tuple[str, str]) -> None:
    """Without the session's own token, or from another site, a form answers 403 and changes nothing."""
    admin, token = service.visitors[ADMIN], service.tokens[ADMIN]
    before = read_state(service.database)
    for wrong in (None, "", "x", service.tokens[VIEWER], token[:-1], token + "x"):
        response = service.send_request(admin, route, service.ids, wrong)
        assert response.status_code == 403, wrong
        assert "Nothing was changed" in response.text
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        assert service.send_request(admin, route, service.ids, token, headers).status_code == 403
    assert read_state(service.database) == before


@pytest.mark.parametrize("route", ROUTES_WITH_PARAMETERS, ids=" ".join)
def test_objects_of_another_project_are_not_found(
    service: PopulatedService, now: datetime, route: tuple[str, str]
) -> None:
    """An object of another project answers like one that does not exist: same text, same SQL statements."""
    other = add_tenant(service.database, now, f"other {uuid4()}", scopes=("admin",))
    with open_client(service.address) as other_visitor:
        sign_in_by_link(other_visitor, other.key)
        token = read_csrf_token(other_visitor, "/runs")
        answers = []
        before = read_state(service.database)
        for ids in (service.ids, random_ids()):
            with record_statements(service.database) as statements:
                response = service.send_request(other_visitor, route, ids, token)
            text = response.text
            for object_id in ids.values():
                text = text.replace(object_id, "ID")
            answers.append((response.status_code, text, statements))
        assert answers[0] == answers[1]
        assert answers[0][0] == 404
        assert read_state(service.database) == before


def test_no_page_names_objects_of_another_project(service: PopulatedService, now: datetime) -> None:
    """No list, filter or cursor shows anything of another project."""
    other = add_tenant(service.database, now, f"other {uuid4()}", scopes=("admin",))
    with open_client(service.address) as other_visitor:
        sign_in_by_link(other_visitor, other.key)
        last = "ffffffff-ffff-7fff-bfff-ffffffffffff"
        for path in (
            "/runs",
            "/runs?name=somebody",
            f"/runs?cursor={last}",
            "/webhooks",
            f"/webhooks?endpoint={service.ids['endpoint_id']}",
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
            text = other_visitor.get(path).text
            for foreign_name in ("of somebody", "of-somebody", "127.0.0.1:9", service.tenant.project.name):
                assert foreign_name not in text, (path, foreign_name)
            in_request = {service.ids["endpoint_id"]} if "endpoint=" in path else set()
            assert not any(object_id in text for object_id in set(service.ids.values()) - in_request), path


def read_state(database: Database) -> list[Any]:
    """The rows that a form could change, without what a background job writes."""
    tables = ("projects", "keys", "endpoints", "audit_log", "deliveries", "decisions", "backtests")
    with database.reading() as tx:
        rows = [tx.execute(sa.text(f"SELECT * FROM {table} ORDER BY id")).mappings() for table in tables]
        return [{name: row[name] for name in row if name != "last_used_at"} for found in rows for row in found]
