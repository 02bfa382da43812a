"""Completes the OpenAPI document with problems and examples, all of one run, whose eval turned at step 120, and shows
it at /docs.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from typing import Any

import msgspec
from evalstop_detectors import describe_document
from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.staticfiles import StaticFiles

from evalstop_service.web.api.policies import POLICY_DOCUMENT
from evalstop_service.web.problems import MEDIA_TYPE, RESPONSES

_RUN_ID = "0199aa10-7c3e-7b51-9d3f-5a0d6f2c8e11"
_STARTED, _STOPPED = "2026-01-01T12:00:00Z", "2026-01-01T14:31:07.250000Z"
_REASON = "k_decline: 3 consecutive declines of eval, k = 3"
_URL = "https://receiver.example:9000/"
_EVENT_BODY = '{"type":"run.stop_requested","timestamp":"2026-01-01T14:31:07.250000Z","data":{}}'
_EVENT_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "run.stopped",
    "type": "object",
    "required": ["type", "timestamp", "data"],
}

SCHEMAS: dict[str, Any] = {"EventSchemas": {"run.stopped": _EVENT_SCHEMA}, "PolicyDocument": POLICY_DOCUMENT}
"""Whole examples of schemas, by name."""

FIELDS: dict[str, Any] = {
    "accepted": 2,
    "actor": "key operators",
    "at": _STOPPED,
    "attempt": 1,
    "body": _EVENT_BODY,
    "chosen_by": "raw_maximum",
    "created_at": _STARTED,
    "currency": "USD",
    "decision_id": "0199aa12-0b7d-7f0e-8a44-1d2c3b4a5f60",
    "default_policy": "default",
    "detector": "k_decline",
    "detectors": ["k_decline"],
    "endpoint_id": "0199aa0f-55aa-7c01-b1c2-0f1e2d3c4b5a",
    "event_type": "run.stop_requested",
    "event_types": ["run.stop_requested"],
    "headers": {"webhook-id": "0199aa12-5555-7b66-9c77-f0e0d0c0b0a0"},
    "id": "0199aa13-2222-7a33-8b44-5c6d7e8f9a0b",
    "instance": f"/api/v1/runs/{_RUN_ID}/observations",
    "labels": {"slurm_job_id": "4711"},
    "last_step": 150,
    "metric": "reward/eval",
    "name": "ppo-7b-seed3",
    "note": "3 consecutive declines of eval, k = 3",
    "policy_name": "default",
    "reason": _REASON,
    "request_id": "0199aa14-3333-7c44-8d55-6e7f8a9b0c1d",
    "run_id": _RUN_ID,
    "run_name": "ppo-7b-seed3",
    "secret": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
    "state": "requested",
    "stderr": 0.02,
    "step": 150,
    "time": _STOPPED,
    "turn_step": 120,
    "types": ["run.stopped"],
    "uri": "s3://runs/ppo-7b-seed3/step-120",
    "url": _URL,
    "value": 0.52,
    "version": 1,
    "AuditEntryOut.details": {"run": "ppo-7b-seed3", "reason": "the eval set was broken this morning"},
    "BacktestRunOut.status": "completed",
    "CheckpointIn.step": 120,
    "EndpointChange.enabled": False,
    "FindingOut.kind": "count",
    "FindingOut.value": 3.0,
    "NewKeyOut.key": "esk_kZ3Yw0m9V1x2Qf4n6b8C0d1E2f3G4h5J6k7L8m9N0pQ1PnYAl",
    "KeyIn.expires_at": "2126-04-01T00:00:00.000000Z",
    "KeyIn.networks": ["10.1.0.0/16"],
    "KeyIn.endpoint_ids": [],
    "GroupOut.cases": {
        "observed": {"right": "/api/v1/cases?policy=default&version=1&treatment=observed&outcome=right"}
    },
    "PolicyOut.name": "patient",
    "ProblemDetails.status": 422,
    "ProblemDetails.detail": "the request has 1 error; nothing was stored",
    "ProblemDetails.type": "/problems#invalid_request",
    "ProblemDetails.code": "invalid_request",
    "ReportIn.reason": "the process group is gone",
    "ReportIn.state": "confirmed",
    "ResumeIn.step": 120,
    "DeclaredRole.version": "gsm8k-v1",
    "EvalChangeIn.version": "gsm8k-v2",
    "EvalChangeOut.version": "gsm8k-v2",
    "EvalRequests.at": 0.3,
    "Level.rate": 0.01,
    "Risk.risk": 0.01,
    "RunOut.metrics": {"reward/eval": {"role": "eval", "direction": "maximize"}},
    "SettleIn.error": "",
}
"""Example values by field name, or by schema and field name for a value that only one schema has."""


def add_examples(components: dict[str, Any]) -> None:
    """Add to every schema an example composed of the values of its fields."""
    for name, schema in components.items():
        schema["examples"] = [_build_example(schema, components, name)]


def _build_example(schema: dict[str, Any], components: dict[str, Any], name: str, field: str = "") -> Any:
    """An example of a schema: its own, one from the table above, its first choice, or built from its parts."""
    if field and "examples" in schema:
        return schema["examples"][0]
    for key in (f"{name}.{field}", field):
        if field and key in FIELDS and not _refers(schema):
            return FIELDS[key]
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return _build_example(components[name], components, name)
    if name in SCHEMAS and not field:
        return SCHEMAS[name]
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if options:
            is_unset = {"type": "null"} in options and not _refers(schema)
            return None if is_unset else _build_example(options[0], components, name, field)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object":
            required = schema.get("required", ())
            return {
                key: _build_example(part, components, name, key)
                for key, part in schema.get("properties", {}).items()
                if key in required or key in FIELDS or f"{name}.{key}" in FIELDS
            }
        case "array":
            return [_build_example(schema["items"], components, name, f"{field}[]")]
        case "string":
            if schema.get("format") == "uuid":
                return _RUN_ID
            return _STOPPED if field.endswith(("_at", "_until", "since", "until")) else schema.get("default", "text")
        case "integer" | "number":
            return schema.get("default", max(schema.get("minimum", 0), schema.get("exclusiveMinimum", -1) + 1))
        case "boolean":
            return schema.get("default", False)
    return None


def _refers(schema: dict[str, Any]) -> bool:
    """Whether a schema is another one, or null."""
    return "$ref" in schema or any("$ref" in option for option in schema.get("anyOf", ()))


REFERENCE = "#/components/schemas/{name}"

TAGS = {
    "projects": "Tenants, which own runs, keys, policies and endpoints: settings, and pausing all stops.",
    "keys": "Credentials of trainers, receivers and people.",
    "policies": "Detectors with thresholds, by name and version; backtests on past runs; rollout stages.",
    "runs": "Watched training jobs: open, resume, finish, stop, label.",
    "observations": "Values of metrics: post them in batches, scrapes or reports; read them by step.",
    "eval requests": "Evaluations of the best checkpoint and the current one, requested on suspicion.",
    "checkpoints": "Saved checkpoints of a run, the best of which is to be shipped.",
    "decisions": "Recorded `stop` verdicts: veto, release, undo, receivers' reports, labels.",
    "webhooks": "Endpoints that receive events, deliveries, and events that a receiver fetches.",
    "audit": "Who changed what.",
    "precision": "How often stops were right, and the cases behind these figures.",
    "health": "Probes of the process.",
}
"""The tags that group operations, in the order of the document."""


def name_operation(route: APIRoute) -> str:
    """The id of an operation: the name of its function, a verb and its object, as in `open_run`."""
    return route.name


def complete_openapi(document: dict[str, Any]) -> dict[str, Any]:
    """Complete the document that FastAPI generates; repeating this is harmless."""
    document["components"]["schemas"] |= describe_document(REFERENCE)
    for schema in document["components"]["schemas"].values():
        _name_properties(schema)
    add_examples(document["components"]["schemas"])
    for path in document["paths"].values():
        for operation in path.values():
            for status in RESPONSES:
                content = operation["responses"][status]["content"]
                if "application/json" in content:
                    content[MEDIA_TYPE] = content.pop("application/json")
    return document


def _name_properties(schema: Any) -> None:
    """Require in objects with arbitrary names that the names match: `patternProperties` leaves other names
    unrestricted."""
    if isinstance(schema, list):
        for part in schema:
            _name_properties(part)
    if isinstance(schema, dict):
        for part in schema.values():
            _name_properties(part)
        if isinstance(schema.get("patternProperties"), dict):
            ((pattern, values),) = schema.pop("patternProperties").items()
            schema["additionalProperties"] = values
            schema["propertyNames"] = {**schema.get("propertyNames", {}), "pattern": pattern}


FILES, DOCUMENT = "/docs-files", "/openapi.json"


def install(app: FastAPI) -> None:
    """Add the OpenAPI document and the API reference to an app: Swagger UI with local files, without a CDN."""
    app.mount(FILES, StaticFiles(packages=[("fastapi_offline", "static")]))
    page = get_swagger_ui_html(
        openapi_url=DOCUMENT,
        title=f"{app.title} API",
        swagger_js_url=f"{FILES}/swagger-ui-bundle.js",
        swagger_css_url=f"{FILES}/swagger-ui.css",
        swagger_favicon_url=f"{FILES}/favicon.png",
    )

    # Swagger UI sets inline styles, and one inline script starts it.
    script = re.search(r"<script>(.*?)</script>", bytes(page.body).decode(), re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    page.headers["Content-Security-Policy"] = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @cache
    def encode_document() -> bytes:  # anyone may ask for it, and encoding it takes milliseconds
        return msgspec.json.encode(app.openapi())

    @app.get(DOCUMENT, include_in_schema=False)
    def show_document() -> Response:
        return Response(encode_document(), media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return page
