"""The API does what its OpenAPI document says, and the document says all of it: tried on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
import jsonschema_rs
import pytest
import schemathesis
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fixtures.serving import serving

pytestmark = pytest.mark.real

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

FALLING = [{"metric": "eval", "step": step, "value": value} for step, value in enumerate([0.5, 0.9, 0.8, 0.7, 0.6])]

Document = dict[str, Any]


@pytest.fixture(scope="module")
def server(migrated_file: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Database]]:
    """A server on an embedded database of its own."""
    file = tmp_path_factory.mktemp("openapi") / "evalstop.db"
    file.write_bytes(migrated_file.read_bytes())
    database = Database(f"sqlite:///{file}", synchronous="NORMAL")
    with serving(database) as url:
        yield url, database
    database.close()


@pytest.fixture(scope="module")
def document(server: tuple[str, Database]) -> Document:
    found: Document = httpx.get(f"{server[0]}/openapi.json", trust_env=False).raise_for_status().json()
    return found


@pytest.fixture(scope="module")
def keys(server: tuple[str, Database]) -> tuple[str, str]:
    """A key to the first project that may do everything, and a key to the installation."""
    tenant = api_keys.create_first_key(server[1], utc_now())
    assert tenant is not None
    return tenant, api_keys.create_named_key(server[1], None, "landlord", ("admin",), utc_now())[1]


@pytest.fixture(scope="module")
def ids(server: tuple[str, Database], keys: tuple[str, str]) -> dict[str, str]:
    """One of everything, to be asked for by its id."""
    headers = {"Authorization": f"Bearer {keys[0]}"}
    with httpx.Client(base_url=f"{server[0]}/api/v1", headers=headers, trust_env=False) as client:

        def made(path: str, body: Document) -> str:
            return str(client.post(path, json=body).raise_for_status().json().get("id"))

        found = {
            "endpoint_id": made("/endpoints", {"url": "http://127.0.0.1:9/", "event_types": ["*"]}),
            "key_id": made("/keys", {"name": "k", "scopes": ["read"]}),
            "run_id": made("/runs", {"name": "r", "mode": "enforce", "policy": "paper"}),
            "backtest_id": made("/policies/backtests", {"policy": "paper"}),
        }
        made(f"/runs/{found['run_id']}/observations", {"observations": FALLING})
        found["decision_id"] = client.get("/decisions").json()["items"][0]["id"]
        found["delivery_id"] = client.get("/deliveries").json()["items"][0]["id"]
        return found


DESCRIBED = create_app(Settings(), Database("sqlite:///never-asked.db"), session_secret="none").openapi()

schema = schemathesis.openapi.from_dict(DESCRIBED)


@schemathesis.serializer("application/x-ndjson")
def lines(_context: object, document: Any) -> bytes:
    """The items of an array as lines of JSON, and whatever else as one."""
    return b"".join(
        json.dumps(item).encode() + b"\n" for item in (document if isinstance(document, list) else [document])
    )


@schema.parametrize()
@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_conforms(case: Any, server: tuple[str, Database], keys: tuple[str, str], ids: dict[str, str]) -> None:
    """Whatever is sent, the answer is one that the document describes, in a type that it names, and never a fault."""
    for name, value in case.path_parameters.items():
        if name in ids and is_uuid(value):
            case.path_parameters[name] = ids[name]
    key = keys[case.path == "/api/v1/projects"]
    headers = {"Authorization": f"Bearer {key}"}
    case.call_and_validate(base_url=server[0], headers=headers, checks=CHECKS, timeout=30)


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


def test_is_what_is_served(document: Document) -> None:
    """The document that was tried is the one that the server hands out."""
    assert document == DESCRIBED


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


def test_keys_are_asked_for(document: Document) -> None:
    """The document names the security scheme, and every operation below /api/v1 asks for it."""
    schemes = document["components"]["securitySchemes"]
    assert [(scheme["type"], scheme["scheme"]) for scheme in schemes.values()] == [("http", "bearer")]
    for method, path, operation in operations(document):
        asked = [name for requirement in operation.get("security", []) for name in requirement]
        assert asked == (list(schemes) if path.startswith("/api/v1/") else []), (method, path)
