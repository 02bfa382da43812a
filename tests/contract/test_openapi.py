"""The OpenAPI document is complete, and a client can be generated of it; tests of the API check their answers by it."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import utc_now
from evalstop_service.projects import api_keys
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database

from tests.fixtures.http_server import start_server
from tests.service.web.api.api_calls import load_document

Document = dict[str, Any]


@pytest.fixture
def document() -> Document:
    return load_document()


def list_operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_every_operation_is_described(document: Document) -> None:
    """Every operation has a summary, a description, a tag and problem documents for 4XX and 5XX."""
    for method, path, operation in list_operations(document):
        assert operation["summary"], (method, path)
        assert len(operation["description"]) > 10, (method, path)
        assert operation["tags"], (method, path)
        for status in ("4XX", "5XX"):
            assert list(operation["responses"][status]["content"]) == ["application/problem+json"], (method, path)


def test_examples_are_valid(document: Document) -> None:
    """Every example of a property is valid by its schema."""
    parts = [part for schema in document["components"]["schemas"].values() for part in iterate_subschemas(schema)]
    examples = [(part, example) for part in parts for example in part.get("examples", ())]
    assert len(examples) > 50
    for part, example in examples:
        jsonschema_rs.validate({**part, "components": document["components"]}, example, validate_formats=True)


KEYWORDS = {
    *("$ref", "const", "default", "deprecated", "description", "enum", "examples", "format", "title", "type"),
    *("allOf", "anyOf", "discriminator", "if", "not", "oneOf", "then"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "maxLength", "minLength", "pattern"),
    *("items", "maxItems", "minItems", "prefixItems", "uniqueItems"),
    *("additionalProperties", "maxProperties", "minProperties", "properties", "propertyNames", "required"),
}
"""The keywords of JSON Schema that the document uses."""


def iterate_subschemas(schema: Any) -> Iterator[Document]:
    """A schema and all schemas nested in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in ("additionalProperties", "if", "items", "not", "propertyNames", "then"):
        yield from iterate_subschemas(schema.get(key))
    parts = [*schema.get("properties", {}).values()]
    for part in parts + [part for key in ("allOf", "anyOf", "oneOf", "prefixItems") for part in schema.get(key, [])]:
        yield from iterate_subschemas(part)


def test_schemas_use_json_schema_keywords(document: Document) -> None:
    """Every keyword is one of JSON Schema, for instance `minimum` and not `ge`."""
    schemas = list(document["components"]["schemas"].values())
    for _, _, operation in list_operations(document):
        schemas += [parameter["schema"] for parameter in operation.get("parameters", [])]
    used = {key for schema in schemas for part in iterate_subschemas(schema) for key in part}
    assert used <= KEYWORDS, used - KEYWORDS
    step = document["components"]["schemas"]["ObservationIn"]["properties"]["step"]
    assert (step["minimum"], step["maximum"]) == (0, 2**53 - 1)


OPERATION_VERBS = {
    *("add", "answer", "change", "check", "claim", "confirm", "correct", "create", "delete", "demote", "end"),
    *("export", "finish", "get", "label", "list", "open", "pause", "post", "record", "refuse", "register", "release"),
    *("remove", "replay", "report", "resume", "retry", "revoke", "rotate", "set", "settle", "stop", "stream", "test"),
    *("undo", "veto"),
}
"""The verbs with which operation ids begin."""


def test_operations_are_named_by_verbs(document: Document) -> None:
    """Operation ids are unique, a verb and its object such as `open_run`, and all tags are declared."""
    operations = [operation for _, _, operation in list_operations(document)]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[a-z]+(_[a-z]+)+", name)] == []
    assert {name.split("_")[0] for name in names} <= OPERATION_VERBS
    declared = {tag["name"] for tag in document["tags"] if tag["description"]}
    assert {tag for operation in operations for tag in operation["tags"]} == declared


def test_no_two_models_share_a_name(document: Document) -> None:
    """The name of a schema has no module in it, as those of two models of one name would: generators drop them."""
    assert [name for name in document["components"]["schemas"] if "__" in name] == []


def test_every_property_is_described(document: Document) -> None:
    """Every property and parameter has a description that says more than its name."""
    described = {
        (schema, name): part.get("description", "")
        for schema, definition in document["components"]["schemas"].items()
        for name, part in definition.get("properties", {}).items()
    } | {
        (operation["operationId"], parameter["name"]): parameter.get("description", "")
        for _, _, operation in list_operations(document)
        for parameter in operation.get("parameters", [])
    }
    assert len(described) > 700
    undescribed = [key for key, text in described.items() if not text or _words(text) <= _words(key[1])]
    assert undescribed == []


def _words(text: str) -> set[str]:
    """The words of a text without articles and `of`."""
    return set(re.findall("[a-z]+", text.lower())) - {"a", "an", "of", "the"}


def test_operations_require_a_key(document: Document) -> None:
    """Every operation below /api/v1 requires the bearer scheme, and no other operation does."""
    schemes = document["components"]["securitySchemes"]
    assert [(scheme["type"], scheme["scheme"]) for scheme in schemes.values()] == [("http", "bearer")]
    for method, path, operation in list_operations(document):
        required = [name for requirement in operation.get("security", []) for name in requirement]
        assert required == (list(schemes) if path.startswith("/api/v1/") else []), (method, path)


# The generator does not support these content types; it treats them as bytes.
CONFIG = {
    "content_type_overrides": {
        "application/x-ndjson": "application/octet-stream",
        "text/plain": "application/octet-stream",
    }
}


@pytest.mark.real
@pytest.mark.nightly
def test_generated_client_works(embedded_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """openapi-python-client generates a module for each operation without a warning; two of them are called."""
    document = create_app(Settings(), embedded_database, session_secret="none").openapi()
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json", "--meta", "none"]
    command += ["--output-path", "generated_evalstop", "--config", "config.json", "--fail-on-warning"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the generator calls ruff
    completed = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module("generated_evalstop")
    modules = [item.name for item in pkgutil.walk_packages(package.__path__, "generated_evalstop.")]
    loaded = [importlib.import_module(name) for name in modules]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert sum(hasattr(module, "sync_detailed") for module in loaded) == len(operations) > 60

    key = api_keys.create_first_key(embedded_database, utc_now())
    open_run = importlib.import_module("generated_evalstop.api.runs.open_run")
    list_runs = importlib.import_module("generated_evalstop.api.runs.list_runs")
    body = importlib.import_module("generated_evalstop.models").RunIn(name="ppo-7b-seed3")
    with (
        start_server(embedded_database) as url,
        package.AuthenticatedClient(base_url=url, token=key, httpx_args={"trust_env": False}) as client,
    ):
        opened = open_run.sync(client=client, body=body)
        assert [run.id for run in list_runs.sync(client=client).items] == [opened.id]
