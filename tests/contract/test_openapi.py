"""The API does what its OpenAPI document says, and the document says all of it: tried on a real server."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
import jsonschema_rs
import pytest
import requests
import schemathesis
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.store.database import Database
from hypothesis import HealthCheck, settings
from schemathesis.generation.meta import CoverageScenario
from schemathesis.specs.openapi.checks import ignored_auth, negative_data_rejection, positive_data_acceptance

from tests.fixtures.http_server import start_server

pytestmark = pytest.mark.real

BEYOND_SCHEMA = {
    r"there is no policy .* in this project": "which policies there are is on record",
    r"a version number must follow the @": "NAME@VERSION names a policy on record too",
    r"there is no detector|The policy is not valid": "members refer to each other, and parameters belong to detectors",
    r"/metrics/literal": "said beside the next one, because the word auto may stand there too",
    r"only the role eval may have several": "JSON Schema cannot compare the members of an object",
    r"a \[ is not closed": "no regular expression counts brackets",
    r"did not turn: omit turn_step|a stop is right at or after": "whether a label can be true depends on the record",
    r"the scrape has no|has \d+ values in the scrape|has no timestamp": "a scrape is text",
    r"the body is not (OpenMetrics|the text format)|a step is a whole number from": "a scrape is text",
    r"set at most one of step|group_by names two periods": "OpenAPI relates no parameters",
    r"the period would end at": "JSON Schema relates no fields",
    r"/details: ": "each of its 8 levels would need a schema of its own",
    r"expires_at: it lies in the past": "what is past depends on the clock",
    r"/networks/": "no regular expression knows the bits of a network",
    r"endpoint_ids: (only a key with|there is no)": "a key is bound by its scopes, and to endpoints on record",
    r"require the format email": "JSON Schema could relate the two, and generated clients could not read it",
    r"/url: ": "names are resolved, and the installation says which networks webhooks may reach",
}
"""What may be said when data is refused that the document allows, and why JSON Schema cannot say it."""

FALLING = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate([0.5, 0.9, 0.8, 0.7, 0.6])]

Document = dict[str, Any]

Place = tuple[str, str | None, str | None]
"""An operation, a parameter or the body, and a place in its schema."""


@pytest.fixture(scope="module")
def server(migrated_file: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Database]]:
    """A server on an embedded database of its own."""
    file = tmp_path_factory.mktemp("openapi") / "evalstop.db"
    file.write_bytes(migrated_file.read_bytes())
    database = Database(f"sqlite:///{file}", synchronous="NORMAL")
    with start_server(database) as url:
        yield url, database
    database.close()


@pytest.fixture(scope="module")
def document(server: tuple[str, Database]) -> Document:
    found: Document = httpx.get(f"{server[0]}/openapi.json", timeout=60, trust_env=False).raise_for_status().json()
    return found


@pytest.fixture(scope="module")
def keys(server: tuple[str, Database]) -> tuple[str, str]:
    """A key to the first project that may do everything, and a key to the installation."""
    tenant = api_keys.create_first_key(server[1], utc_now())
    assert tenant is not None
    return tenant, api_keys.create_named_key(server[1], None, "landlord", ("admin",), utc_now())[1]


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Connections that are kept: thousands of requests are sent."""
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.fixture(scope="module")
def ids(server: tuple[str, Database], keys: tuple[str, str]) -> dict[str, str]:
    """One of everything, to be asked for by its id."""
    headers = {"Authorization": f"Bearer {keys[0]}"}
    with httpx.Client(base_url=f"{server[0]}/api/v1", headers=headers, trust_env=False) as client:

        def made(path: str, body: Document) -> str:
            return str(client.post(path, json=body).raise_for_status().json().get("id"))

        found = {
            "endpoint_id": made("/endpoints", {"url": "http://127.0.0.1:9/", "event_types": ["*"]}),
            "project_id": client.get("/project").raise_for_status().json()["id"],
            "key_id": made("/keys", {"name": "k", "scopes": ["read"]}),
            "run_id": made("/runs", {"name": "r", "mode": "enforce", "policy": "paper"}),
            "backtest_id": made("/policies/backtests", {"policy": "paper"}),
        }
        made(f"/runs/{found['run_id']}/observations", {"observations": FALLING})
        found["decision_id"] = client.get("/decisions").json()["items"][0]["id"]
        found["delivery_id"] = client.get("/deliveries").json()["items"][0]["id"]
        return found


@pytest.fixture(scope="module")
def places() -> Counter[Place]:
    """How many values of wrong types were sent in each place of a request."""
    return Counter()


@pytest.fixture
def described(document: Document, request: pytest.FixtureRequest) -> Any:
    """The document as Schemathesis reads it."""
    request.node._nodeid = request.node.nodeid  # Schemathesis asks for it, and pytest 9.2 has none anymore
    return schemathesis.openapi.from_dict(without_keys(document))


def without_keys(document: Document) -> Document:
    """The document as if no key were asked for: what Schemathesis would do to it, the key that is sent would mend."""
    paths = {
        path: {method: {**operation, "security": []} for method, operation in methods.items()}
        for path, methods in document["paths"].items()
    }
    return {**document, "paths": paths}


schema = schemathesis.pytest.from_fixture("described")  # the cases are made when the test runs, not by each process


@schemathesis.serializer("application/x-ndjson")
def lines(_context: object, document: Any) -> bytes:
    """The items of an array as lines of JSON, and whatever else as one."""
    return b"".join(
        json.dumps(item).encode() + b"\n" for item in (document if isinstance(document, list) else [document])
    )


REPEATABLE = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.timeout(900)
@schema.parametrize()
@settings(REPEATABLE, max_examples=4)
def test_conforms(
    case: Any,
    server: tuple[str, Database],
    session: requests.Session,
    keys: tuple[str, str],
    ids: dict[str, str],
    places: Counter[Place],
) -> None:
    """All checks of Schemathesis hold: what the document allows is taken, what it does not allow is refused, and every
    answer is one that it describes."""
    if not is_repetition(case, places):
        check_case(case, server[0], session, keys, ids)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@schema.parametrize()
@settings(REPEATABLE, max_examples=24)
def test_conforms_at_length(
    case: Any, server: tuple[str, Database], session: requests.Session, keys: tuple[str, str], ids: dict[str, str]
) -> None:
    """The same with all values of wrong types, and with many more requests drawn at random for each operation."""
    check_case(case, server[0], session, keys, ids)


def check_case(case: Any, url: str, session: requests.Session, keys: tuple[str, str], ids: dict[str, str]) -> None:
    """Send a request and hold the answer to the document."""
    for name, value in case.path_parameters.items():
        if name in ids and is_uuid(value):
            case.path_parameters[name] = ids[name]
    key = keys[case.path.startswith("/api/v1/projects")]
    headers = {"Authorization": f"Bearer {key}"}
    response = case.call(base_url=url, session=session, headers=headers, timeout=30)
    excluded = [ignored_auth]  # two more requests for each; test_keys_and_tenants asks every route without a key
    if response.status_code == 422 and all(map(is_beyond_schema, reasons(response.json()))):
        excluded.append(positive_data_acceptance)
    if case.operation.definition.raw["operationId"] == "stream_observations":
        # A wrong line costs itself alone: 200 tells of it.
        excluded.append(negative_data_rejection)
    elif any(mutation.parameter == "Authorization" for mutation in case.meta.phase.data.mutations):
        excluded.append(negative_data_rejection)  # the key that is sent here has mended what was wrong
    case.validate_response(response, headers=headers, excluded_checks=excluded)


def is_repetition(case: Any, places: Counter[Place]) -> bool:
    """Whether two values of wrong types were sent in this place already, or another method that no path has."""
    data = case.meta.phase.data
    scenario = getattr(data, "scenario", None)
    if scenario is CoverageScenario.UNSPECIFIED_HTTP_METHOD:
        return case.method in ("OPTIONS", "QUERY")  # and not TRACE
    if scenario is not CoverageScenario.INCORRECT_TYPE:
        return False
    place = case.operation.label, data.parameter, data.location
    places[place] += 1
    return places[place] > 2


def reasons(problem: Document) -> list[str]:
    """All that a refusal says is wrong."""
    found = [f"{item['pointer']}: {item['detail']}" for item in problem.get("errors", [])]
    return found or [f"{problem['title']}: {problem['detail']}"]


def is_beyond_schema(reason: str) -> bool:
    return any(re.search(pattern, reason) for pattern in BEYOND_SCHEMA)


def is_uuid(text: object) -> bool:
    try:
        UUID(str(text))
    except ValueError:
        return False
    return True


def operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def resolved(document: Document, schema: Document) -> Document:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def test_every_operation_is_described(document: Document) -> None:
    """Every operation has a summary, a description and a tag, and says what problems it may answer."""
    for method, path, operation in operations(document):
        assert operation["summary"], (method, path)
        assert len(operation["description"]) > 10, (method, path)
        assert operation["tags"], (method, path)
        for status in ("4XX", "5XX"):
            assert list(operation["responses"][status]["content"]) == ["application/problem+json"], (method, path)


def test_every_body_has_an_example(document: Document) -> None:
    """Every request body, and every answer that has a body, has a whole example."""
    for method, path, operation in operations(document):
        answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        for part in [operation.get("requestBody", {}), *answers]:
            for content in part.get("content", {}).values():
                whole = resolved(document, content["schema"])
                assert whole.get("examples"), (method, path, content["schema"])


def test_examples_are_true(document: Document) -> None:
    """Every example is valid by the schema that it stands beside."""
    for name, schema in document["components"]["schemas"].items():
        whole = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        for example in schema.get("examples", []):
            jsonschema_rs.validate(whole, example, validate_formats=True)


KEYWORDS = {
    *("$ref", "const", "default", "deprecated", "description", "enum", "examples", "format", "title", "type"),
    *("allOf", "anyOf", "discriminator", "if", "not", "oneOf", "then"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "maxLength", "minLength", "pattern"),
    *("items", "maxItems", "minItems", "prefixItems", "uniqueItems"),
    *("additionalProperties", "maxProperties", "minProperties", "properties", "propertyNames", "required"),
}
"""The words of JSON Schema that the document is written in."""


def subschemas(schema: Any) -> Iterator[Document]:
    """A schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in ("additionalProperties", "if", "items", "not", "propertyNames", "then"):
        yield from subschemas(schema.get(key))
    parts = [*schema.get("properties", {}).values()]
    for part in parts + [part for key in ("allOf", "anyOf", "oneOf", "prefixItems") for part in schema.get(key, [])]:
        yield from subschemas(part)


def test_bounds_are_words_of_json_schema(document: Document) -> None:
    """Every keyword of every schema is one of JSON Schema's: `minimum`, not `ge`."""
    whole = list(document["components"]["schemas"].values())
    for _, _, operation in operations(document):
        whole += [parameter["schema"] for parameter in operation.get("parameters", [])]
    found = {key for schema in whole for part in subschemas(schema) for key in part}
    assert found <= KEYWORDS, found - KEYWORDS
    step = document["components"]["schemas"]["ObservationIn"]["properties"]["step"]
    assert (step["minimum"], step["maximum"]) == (0, 2**53 - 1)


VERBS = {
    *(
        "add",
        "answer",
        "change",
        "check",
        "claim",
        "confirm",
        "correct",
        "create",
        "delete",
        "demote",
        "end",
        "export",
        "finish",
        "get",
        "label",
    ),
    *("list", "open", "pause", "post", "record", "refuse", "register", "release", "remove", "replay", "report"),
    *("resume", "retry", "revoke", "rotate", "set", "settle", "stop", "stream", "test", "undo", "veto"),
}
"""What the names of operations begin with."""


def test_operations_are_named_by_verbs(document: Document) -> None:
    """The ids of operations are distinct, a verb and its object as in `open_run`, and their tags are declared."""
    described = [operation for _, _, operation in operations(document)]
    names = [operation["operationId"] for operation in described]
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[a-z]+(_[a-z]+)+", name)] == []
    assert {name.split("_")[0] for name in names} <= VERBS
    declared = {tag["name"] for tag in document["tags"] if tag["description"]}
    assert {tag for operation in described for tag in operation["tags"]} == declared


def test_every_property_is_described(document: Document) -> None:
    """Every property and every parameter says what it means, in other words than its name."""
    described = {
        (schema, name): part.get("description", "")
        for schema, whole in document["components"]["schemas"].items()
        for name, part in whole.get("properties", {}).items()
    } | {
        (operation["operationId"], parameter["name"]): parameter.get("description", "")
        for _, _, operation in operations(document)
        for parameter in operation.get("parameters", [])
    }
    assert len(described) > 700
    silent = [key for key, text in described.items() if not text or _words(text) <= _words(key[1])]
    assert silent == []


def _words(text: str) -> set[str]:
    """Its words, but for articles."""
    return set(re.findall("[a-z]+", text.lower())) - {"a", "an", "of", "the"}


def test_keys_are_asked_for(document: Document) -> None:
    """The document names the security scheme, and every operation below /api/v1 asks for it."""
    schemes = document["components"]["securitySchemes"]
    assert [(scheme["type"], scheme["scheme"]) for scheme in schemes.values()] == [("http", "bearer")]
    for method, path, operation in operations(document):
        asked = [name for requirement in operation.get("security", []) for name in requirement]
        assert asked == (list(schemes) if path.startswith("/api/v1/") else []), (method, path)
