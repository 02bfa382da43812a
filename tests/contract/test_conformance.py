"""The API conforms to its OpenAPI document, for requests that Schemathesis generates, on a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest
import requests
import schemathesis
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES
from hypothesis import HealthCheck, settings
from schemathesis.generation.meta import CoverageScenario
from schemathesis.specs.openapi.checks import ignored_auth, negative_data_rejection, positive_data_acceptance

from tests.fixtures.http_server import start_server
from tests.fixtures.projects import create_named_key, create_project

pytestmark = [pytest.mark.real, pytest.mark.nightly]

BEYOND_SCHEMA = {
    r"there is no policy .* in this project": "policies are stored in the database",
    r"a version number must follow the @": "NAME@VERSION names a stored policy",
    r"there is no detector|the policy is not valid": "members refer to each other; parameters depend on the detector",
    r"/metrics/literal": "reported with the next one, because `auto` is allowed too",
    r"only the role eval may have several": "JSON Schema cannot compare the members of an object",
    r"a \[ is not closed": "a regular expression cannot count brackets",
    r"did not turn: omit turn_step|a stop is right at or after": "the valid labels depend on the run",
    r"group_by names two periods": "OpenAPI cannot relate parameters",
    r"the period would end at": "JSON Schema cannot relate fields",
    r"/details: ": "each level would need its own schema",
    r"expires_at: it lies in the past": "depends on the clock",
    r"write days, hours|write 'mon-fri|days are mon|a time of day from|the time zone": "hours may be a text",
    r"_seconds: Input should be (less|greater) than": "a duration may be a text",
    r"until: it must be a duration": "depends on the clock",
    r"/networks/": "a regular expression cannot check network bits",
    r"endpoint_ids: (only a key with|there is no)": "depends on the key's scopes and on stored endpoints",
    r"require the format email": "JSON Schema could express it, but generators of clients do not support it",
    r"\burl: ": "depends on DNS and on the networks that the installation allows",
    r"A rule of kind|is for rules of kind|give `low` and|leave out `low`|must be finite|give the run a group": (
        "JSON Schema cannot relate fields"
    ),
    r"only an eval has a weight|only the metric with the role eval has": "JSON Schema can relate fields only by `if`",
    r"a run occurs twice|observations; a request may have": "JSON Schema cannot compare the items of a list",
}
"""Error messages for data that the document allows, and why JSON Schema cannot express the rule."""

DECLINING_EVALS = [
    {"metric": "eval", "step": step, "value": value} for step, value in enumerate([0.5, 0.9, 0.8, 0.7, 0.6])
]

Document = dict[str, Any]

SentValue = tuple[str | None, ...]
"""What makes a generated value a repetition of another."""


@pytest.fixture(scope="module")
def server(migrated_file: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Database]]:
    """A server on an embedded database of its own."""
    file = tmp_path_factory.mktemp("openapi") / "evalstop.db"
    file.write_bytes(migrated_file.read_bytes())
    database = Database(f"sqlite:///{file}")
    with start_server(database) as url:
        yield url, database
    database.close()


@pytest.fixture(scope="module")
def document(server: tuple[str, Database]) -> Document:
    document: Document = httpx.get(f"{server[0]}/openapi.json", timeout=60, trust_env=False).raise_for_status().json()
    return document


class Keys:
    """A key with all scopes for the first project, and an administrator key for the installation."""

    def __init__(self, database: Database) -> None:
        project_key = api_keys.create_first_key(database, utc_now())
        assert project_key is not None
        self.project = project_key
        self.installation = create_named_key(database, None, "installation", ("admin",), utc_now())[1]
        self._database, self._projects = database, 0

    def replace_project_key(self) -> None:
        """Use another key, which may send as many costly requests as the one before."""
        self.project = create_named_key(self._database, "default", "next", SCOPES, utc_now())[1]

    def create_other_project(self) -> str:
        """The key of a new project, which owes nothing for costly requests yet."""
        self._projects += 1
        name = f"other-{self._projects}"
        create_project(self._database, name, "shadow", 0.0, utc_now())
        return create_named_key(self._database, name, "first", SCOPES, utc_now())[1]


@pytest.fixture(scope="module")
def keys(server: tuple[str, Database]) -> Keys:
    return Keys(server[1])


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One session, so that thousands of requests reuse connections."""
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.fixture(scope="module")
def ids(server: tuple[str, Database], keys: Keys) -> dict[str, str]:
    """Ids of one object of each kind, to fill path parameters."""
    headers = {"Authorization": f"Bearer {keys.project}"}
    with httpx.Client(base_url=f"{server[0]}/api/v1", headers=headers, trust_env=False, timeout=60) as client:

        def create(path: str, body: Document) -> str:
            return str(client.post(path, json=body).raise_for_status().json().get("id"))

        ids = {
            "endpoint_id": create("/endpoints", {"url": "http://127.0.0.1:9/", "event_types": ["*"]}),
            "project_id": client.get("/project").raise_for_status().json()["id"],
            "key_id": create("/keys", {"name": "k", "scopes": ["read"]}),
            "run_id": create("/runs", {"name": "r", "mode": "enforce", "policy": "paper"}),
        }
        create(f"/runs/{ids['run_id']}/observations", {"observations": DECLINING_EVALS})
        ids["decision_id"] = client.get("/decisions").json()["items"][0]["id"]
        ids["delivery_id"] = client.get("/deliveries").json()["items"][0]["id"]
        return ids


@pytest.fixture(scope="module")
def sent_values() -> set[SentValue]:
    """The values that were sent, and the paths with an undefined method."""
    return set()


@pytest.fixture
def schemathesis_schema(document: Document, request: pytest.FixtureRequest) -> Any:
    """The document, loaded by Schemathesis."""
    request.node._nodeid = request.node.nodeid  # Schemathesis reads _nodeid, which pytest 9.2 removed
    return schemathesis.openapi.from_dict(remove_security(document))


def remove_security(document: Document) -> Document:
    """The document without security: our valid key would replace the invalid ones that Schemathesis sends."""
    paths = {
        path: {method: {**operation, "security": []} for method, operation in methods.items()}
        for path, methods in document["paths"].items()
    }
    return {**document, "paths": paths}


schema = schemathesis.pytest.from_fixture("schemathesis_schema")  # generates cases when the test runs


REPEATABLE = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.timeout(900)
@schema.parametrize()
@settings(REPEATABLE, max_examples=2)
def test_requests_and_answers_conform(
    case: Any,
    server: tuple[str, Database],
    session: requests.Session,
    keys: Keys,
    ids: dict[str, str],
    sent_values: set[SentValue],
) -> None:
    """Requests that the document allows are accepted, others are refused, and every answer is described in it."""
    if not is_repetition(case, sent_values):
        check_case(case, server[0], session, keys, ids)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@schema.parametrize()
@settings(REPEATABLE, max_examples=24)
def test_many_requests_and_answers_conform(
    case: Any, server: tuple[str, Database], session: requests.Session, keys: Keys, ids: dict[str, str]
) -> None:
    """All generated values and more random requests for each operation get answers that conform."""
    check_case(case, server[0], session, keys, ids)


def check_case(case: Any, url: str, session: requests.Session, keys: Keys, ids: dict[str, str]) -> None:
    """Send a request and validate the answer by the document."""
    for name, value in case.path_parameters.items():
        if name in ids and is_uuid(value):
            case.path_parameters[name] = ids[name]
    installation = case.path.startswith("/api/v1/projects")
    response, headers = call(case, url, session, keys.installation if installation else keys.project)
    if response.status_code == 429:
        keys.replace_project_key()
        response, headers = call(case, url, session, keys.project)
    if response.status_code == 429:
        response, headers = call(case, url, session, keys.create_other_project())
    assert response.status_code != 429, "every request is judged by its content"
    excluded = [ignored_auth]  # would double the requests; test_keys_and_tenants tests every route without a key
    if response.status_code == 422 and all(map(is_beyond_schema, list_errors(response.json()))):
        excluded.append(positive_data_acceptance)
    if any(mutation.parameter == "Authorization" for mutation in case.meta.phase.data.mutations):
        excluded.append(negative_data_rejection)  # our valid key replaced the invalid one
    case.validate_response(response, headers=headers, excluded_checks=excluded)


def call(case: Any, url: str, session: requests.Session, key: str) -> tuple[Any, dict[str, str]]:
    """Send a request; returns the answer and the headers."""
    headers = {"Authorization": f"Bearer {key}"}
    return case.call(base_url=url, session=session, headers=headers, timeout=30), headers


def is_repetition(case: Any, sent_values: set[SentValue]) -> bool:
    """Whether to skip a case.

    One value of a wrong type is sent to each location of an operation, one undefined method to each path, any other
    value to one of the operations that have the same schema, and the boundary itself instead of values beside it.
    """
    data = case.meta.phase.data
    scenario = getattr(data, "scenario", None)
    if scenario is None or (data.parameter is None and scenario is not CoverageScenario.UNSPECIFIED_HTTP_METHOD):
        return False
    if "Near-boundary" in data.description:
        return True
    value: SentValue
    if scenario is CoverageScenario.UNSPECIFIED_HTTP_METHOD:
        value = case.path, scenario
    elif scenario is CoverageScenario.INCORRECT_TYPE:
        value = case.operation.label, scenario, data.parameter, data.location
    else:
        value = find_schema(case.operation.definition.raw, data.parameter), scenario, data.description, data.location
    if value in sent_values:
        return True
    sent_values.add(value)
    return False


def find_schema(operation: Document, parameter: str) -> str:
    """The schema of a parameter, with its name, or of a body, whose parameter is its media type."""
    content = operation.get("requestBody", {}).get("content", {})
    parameters = {item["name"]: item for item in operation.get("parameters", [])}
    return json.dumps(content[parameter]["schema"] if parameter in content else parameters.get(parameter, parameter))


def list_errors(problem: Document) -> list[str]:
    """The messages of a problem document."""
    messages = [f"{item['pointer']}: {item['detail']}" for item in problem.get("errors", [])]
    return messages or [f"{problem['title']}: {problem['detail']}"]


def is_beyond_schema(message: str) -> bool:
    return any(re.search(pattern, message) for pattern in BEYOND_SCHEMA)


def is_uuid(text: object) -> bool:
    try:
        UUID(str(text))
    except ValueError:
        return False
    return True
