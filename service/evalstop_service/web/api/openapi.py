"""Completes the OpenAPI document with the schemas of policies, group rules and problems, and shows it at /docs."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from typing import Any

import msgspec
from evalstop_detectors import GroupRule, describe_document
from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from evalstop_service.web.problems import ProblemDetails

REFERENCE = "#/components/schemas/{name}"

TAGS = {
    "projects": "Tenants, which own runs, keys, policies and endpoints: settings, and pausing all stops.",
    "keys": "Credentials of trainers, receivers and people.",
    "policies": "Detectors with thresholds, by name and version; backtests on past runs; rollout stages.",
    "runs": "Watched training jobs: open, resume, finish, stop, label.",
    "groups": "Groups of runs with a rule, which compares them: members, descent, decisions.",
    "observations": "Values of metrics: post them in batches or reports; read them by step.",
    "eval requests": "Evaluations of the best checkpoint and the current one, requested on suspicion.",
    "checkpoints": "Saved checkpoints of a run, the best of which is to be shipped.",
    "decisions": "Recorded `stop` verdicts: veto, release, undo, receivers' reports, labels.",
    "webhooks": "Endpoints that receive events, deliveries, and events that a receiver fetches.",
    "audit": "Who changed what.",
    "precision": "How often stops were right, and the cases behind these figures.",
    "health": "Probes of the process.",
}
"""The tags that group operations, in the order of the document."""


def complete_openapi(document: dict[str, Any]) -> dict[str, Any]:
    """Complete the document that FastAPI generates; repeating this is harmless."""
    problem = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    schemas = document["components"]["schemas"]
    (_, parts) = msgspec.json.schema_components([GroupRule], ref_template=REFERENCE)
    described: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(parts))
    schemas |= {"RuleDocument": described.pop("GroupRule")} | described
    schemas |= describe_document(REFERENCE) | problem.pop("$defs") | {"ProblemDetails": problem}
    for schema in schemas.values():
        _name_properties(schema)
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

_DARK = """<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.onchange = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.onchange();
"""
_PRINTED = """<meta name="color-scheme" content="light dark"><style media="print">
.auth-wrapper, .try-out, .copy-to-clipboard, .opblock-control-arrow { display: none !important; }
.opblock { break-inside: avoid; }
</style>"""


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

    page = HTMLResponse(bytes(page.body).decode().replace("<head>", f"<head>{_PRINTED}").replace("<script>", _DARK, 1))
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
