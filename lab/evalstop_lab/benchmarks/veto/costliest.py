"""The costliest request that each route allows: of the API, of MLflow and of the pages.

A GET asks for as much as it may; what its query needs is in `QUERY`. Every other route stands in `BODIES` (JSON),
`FORMS`, or, if no flood of it makes sense, in `REASONS`; a test checks that none is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from secrets import token_urlsafe
from typing import Any
from urllib.parse import urlencode

from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.routing import Mount

from evalstop_lab.benchmarks.veto.flood import BATCH, COUNT

Route = tuple[str, str]
"""A method, and the template of a path."""

API, MLFLOW = "/api/v1", "/mlflow/api/2.0/mlflow"

_WHO = {"actor": "dana", "reason": "r" * 1900}
_LABELS = {f"label-{index}": "v" * 200 for index in range(100)}
_MEMBERS = [{"detector": "bocpd", "params": {"run_lengths": 500}, "stop_at": 0.9, "id": f"m{i}"} for i in range(3)]
_EVENTS = ["run.stop_requested", "run.stop_failed", "run.lost"]
_OUTCOME = {"outcome": "right", "note": "n" * 1900, "turn_step": 1, "actor": "dana"}

BODIES: dict[Route, Any] = {
    ("POST", f"{API}/project/pause"): _WHO,
    ("POST", f"{API}/project/resume"): {"actor": "dana"},
    ("PATCH", f"{API}/project"): {"veto_window_seconds": 3600.0, "stops_per_hour": 10},
    ("PUT", f"{API}/project/role-patterns"): {
        "role_patterns": [{"pattern": f"val-{index}/*/mean@*", "role": "kl"} for index in range(50)]
    },
    ("POST", f"{API}/keys"): {"name": COUNT, "scopes": ["report"]},
    ("POST", f"{API}/keys/{{key_id}}/rotate"): {"overlap_seconds": 60.0},
    ("POST", f"{API}/policies"): {"name": f"p{COUNT}", "members": _MEMBERS},
    ("PUT", f"{API}/policies/{{name}}/rollout-stage"): {"required_precision": 0.9, "canary_share": 0.25},
    ("POST", f"{API}/policies/{{name}}/rollout-stage/demote"): {"reason": "r" * 1900},
    ("POST", f"{API}/policies/backtests"): {"policy": "paper", "runs": 1000},
    ("POST", f"{API}/runs"): {"name": f"r{COUNT}", "labels": _LABELS, "params": _LABELS, "total_steps": 1000},
    ("PATCH", f"{API}/runs/{{run_id}}"): {"notes": "n" * 5000, "tags": [f"tag-{index}" for index in range(20)]},
    ("POST", f"{API}/runs/{{run_id}}/resume"): {"step": 1},
    ("POST", f"{API}/runs/{{run_id}}/eval-changes"): {"step": 3, "reason": "another grader"},
    ("POST", f"{API}/runs/{{run_id}}/heartbeat"): None,
    ("POST", f"{API}/runs/{{run_id}}/stop"): _WHO,
    ("POST", f"{API}/runs/{{run_id}}/outcome"): _OUTCOME,
    ("PATCH", f"{API}/runs/{{run_id}}/metrics"): {"metrics": {"eval": {"role": "eval", "direction": "maximize"}}},
    ("POST", f"{API}/runs/{{run_id}}/observations"): {"observations": BATCH},
    ("POST", f"{API}/observations"): {"runs": [{"run_id": "{run_id}", "observations": BATCH}]},
    ("POST", f"{API}/kubeflow/{{name}}"): {
        "trainerStatus": {
            "metrics": [{"name": "total_steps", "value": COUNT}, {"name": "eval", "value": f"0.{COUNT}"}],
        }
    },
    ("POST", f"{API}/runs/{{run_id}}/eval-requests/{{request_id}}/answer"): {"difference": -0.1, "stderr": 0.1},
    ("POST", f"{API}/runs/{{run_id}}/checkpoints"): {"step": 1, "uri": f"file:///{COUNT}"},
    ("POST", f"{API}/decisions/{{decision_id}}/veto"): _WHO,
    ("POST", f"{API}/decisions/{{decision_id}}/release"): _WHO,
    ("POST", f"{API}/decisions/{{decision_id}}/undo"): _WHO,
    ("POST", f"{API}/decisions/{{decision_id}}/report"): {"state": "acknowledged", "details": {"a": "x" * 50_000}},
    ("POST", f"{API}/decisions/{{decision_id}}/outcome"): _OUTCOME,
    ("POST", f"{API}/endpoints"): {"url": "http://127.0.0.1:9/", "event_types": _EVENTS},
    ("PATCH", f"{API}/endpoints/{{endpoint_id}}"): {"enabled": True},
    ("POST", f"{API}/endpoints/{{endpoint_id}}/rotate-secret"): {},
    ("POST", f"{API}/endpoints/{{endpoint_id}}/replay"): {"since": "2020-01-01T00:00:00Z"},
    ("POST", f"{API}/endpoints/{{endpoint_id}}/test"): None,
    ("POST", f"{API}/deliveries/{{delivery_id}}/retry"): None,
    ("POST", f"{API}/deliveries/{{delivery_id}}/replay"): None,
    ("POST", f"{API}/pull/endpoints"): {"name": COUNT, "event_types": _EVENTS},
    ("POST", f"{API}/pull/endpoints/{{endpoint_id}}/claim"): {"wait_seconds": 0.0, "limit": 100},
    ("POST", f"{API}/pull/endpoints/{{endpoint_id}}/settle"): {
        "delivery_id": "01900000-0000-7000-8000-000000000000",
        "attempt": 1,
        "status": 200,
    },
    ("POST", f"{API}/proposals/{{proposal_id}}/confirm"): None,
    ("POST", f"{API}/proposals/{{proposal_id}}/refuse"): None,
    ("POST", f"{MLFLOW}/experiments/create"): {"name": f"x{COUNT}", "tags": [{"key": "t", "value": "a" * 2000}]},
    ("POST", f"{MLFLOW}/experiments/search"): {
        "max_results": 1000,
        "filter": " AND ".join(["tags.t NOT LIKE '%" + "a" * 450 + "b'"] * 5),
    },
    ("POST", f"{MLFLOW}/experiments/update"): {"experiment_id": "0", "new_name": f"y{COUNT}"},
    ("POST", f"{MLFLOW}/experiments/delete"): {"experiment_id": "999"},
    ("POST", f"{MLFLOW}/experiments/restore"): {"experiment_id": "999"},
    ("POST", f"{MLFLOW}/experiments/set-experiment-tag"): {"experiment_id": "0", "key": "t", "value": "a" * 2000},
    ("POST", f"{MLFLOW}/experiments/delete-experiment-tag"): {"experiment_id": "0", "key": "t"},
    ("POST", f"{MLFLOW}/runs/create"): {"experiment_id": "0", "run_name": f"m{COUNT}"},
    ("POST", f"{MLFLOW}/runs/update"): {"run_id": "{run_hex}", "status": "RUNNING"},
    ("POST", f"{MLFLOW}/runs/delete"): {"run_id": "{run_hex}"},
    ("POST", f"{MLFLOW}/runs/restore"): {"run_id": "{run_hex}"},
    ("POST", f"{MLFLOW}/runs/search"): {
        "experiment_ids": ["0"],
        "max_results": 1000,
        "filter": " AND ".join(["tags.t NOT LIKE '%" + "a" * 450 + "b'"] * 5),
    },
    ("POST", f"{MLFLOW}/runs/log-metric"): {
        "run_id": "{run_hex}",
        "key": "eval",
        "value": 0.5,
        "timestamp": 1,
        "step": COUNT,
    },
    ("POST", f"{MLFLOW}/runs/log-batch"): {
        "run_id": "{run_hex}",
        "metrics": [{"key": f"m{index}", "value": 0.5, "timestamp": 1, "step": COUNT} for index in range(900)],
    },
    ("POST", f"{MLFLOW}/runs/log-inputs"): {
        "run_id": "{run_hex}",
        "datasets": [{"x": [1.5] * 900 + [index]} for index in range(500)],
    },
    ("POST", f"{MLFLOW}/runs/outputs"): {"run_id": "{run_hex}", "models": [{"model_id": "m-1", "step": 1}]},
    ("POST", f"{MLFLOW}/runs/set-tag"): {"run_id": "{run_hex}", "key": f"t{COUNT}", "value": "a" * 2000},
    ("POST", f"{MLFLOW}/runs/delete-tag"): {"run_id": "{run_hex}", "key": "t"},
    ("POST", f"{MLFLOW}/runs/log-parameter"): {"run_id": "{run_hex}", "key": f"p{COUNT}", "value": "a" * 2000},
    ("POST", f"{MLFLOW}/runs/log-model"): {"run_id": "{run_hex}", "model_json": "{}"},
    ("POST", f"{MLFLOW}/logged-models"): {"experiment_id": "0", "name": f"checkpoint-{COUNT}"},
    ("POST", f"{MLFLOW}/logged-models/search"): {"experiment_ids": ["0"], "max_results": 100},
}
"""The bodies of routes that take JSON; None: without a body."""

FORMS: dict[Route, Mapping[str, str]] = {
    ("POST", "/login"): {"key": "esk_wrong"},
    ("POST", "/act/{delivery_id}/{token}/veto"): {"reason": "r" * 1900},
    ("POST", "/act/{delivery_id}/{token}/wait"): {"until": "1h"},
    ("POST", "/settings/pause"): {"reason": "r" * 1900},
    ("POST", "/settings/resume"): {},
    ("POST", "/settings"): {"veto_window_seconds": "3600"},
    ("POST", "/settings/role-patterns"): {"patterns": "\n".join(f"val-{index}/* kl" for index in range(50))},
    ("POST", "/settings/keys"): {"name": COUNT, "scopes": "report"},
    ("POST", "/decisions/{decision_id}/veto"): {"reason": "r" * 1900},
    ("POST", "/decisions/{decision_id}/release"): {"reason": "r" * 1900},
    ("POST", "/decisions/{decision_id}/undo"): {"reason": "r" * 1900},
    ("POST", "/decisions/{decision_id}/outcome"): {"outcome": "right", "note": "n" * 1900},
    ("POST", "/runs/{run_id}/stop"): {"reason": "r" * 1900},
    ("POST", "/runs/{run_id}/outcome"): {"outcome": "right", "note": "n" * 1900},
    ("POST", "/runs/{run_id}/description"): {"notes": "n" * 5000},
    ("POST", "/runs/{run_id}/metrics"): {"eval": "eval"},
    ("POST", "/precision/label/{run_id}"): {"run_outcome": "turned"},
    ("POST", "/policies/{name}/edit"): {"document": json.dumps({"members": _MEMBERS})},
    ("POST", "/policies/{name}/edit/try"): {"document": json.dumps({"members": _MEMBERS})},
    ("POST", "/policies/{name}/stage"): {"required_percent": "90", "canary_percent": "25"},
    ("POST", "/policies/{name}/stage/lower"): {"reason": "r" * 1900},
    ("POST", "/proposals/{proposal_id}/confirm"): {"reason": "r" * 1900},
    ("POST", "/proposals/{proposal_id}/refuse"): {},
    ("POST", "/projects"): {"project": "beta"},
    ("POST", "/webhooks/endpoints"): {"url": "http://127.0.0.1:9/", "preset": "slack"},
    ("POST", "/webhooks/endpoints/{endpoint_id}/enabled"): {"enabled": "true"},
    ("POST", "/webhooks/endpoints/{endpoint_id}/rotate-secret"): {},
    ("POST", "/webhooks/endpoints/{endpoint_id}/test"): {},
    ("POST", "/webhooks/endpoints/{endpoint_id}/replay"): {"since": "2020-01-01"},
    ("POST", "/webhooks/deliveries/{delivery_id}/retry"): {},
    ("POST", "/webhooks/deliveries/{delivery_id}/replay"): {},
}
"""The fields of forms."""

TEXTS: dict[Route, str] = {
    ("POST", f"{API}/runs/{{run_id}}/openmetrics"): "\n".join(f"m{index} 0.5" for index in range(2000)) + "\n",
    ("PUT", "/mlflow/api/2.0/mlflow-artifacts/artifacts/{path:path}"): "x" * 2**20,
}
"""Other bodies."""

QUERY: dict[Route, str] = {
    ("GET", f"{API}/runs/{{run_id}}/series"): "metric=eval&max_points=10000",
    ("POST", f"{API}/runs/{{run_id}}/openmetrics"): f"step={COUNT}",
    ("GET", "/runs/compare"): "run={run_id}&run={other_run_id}",
    ("GET", "/runs/compare/series.json"): "run={run_id}&run={other_run_id}&metric=eval",
    ("GET", "/runs/{run_id}/what-if.json"): "policy=default",
}
MLFLOW_QUERY = "run_id={run_hex}&experiment_id=0&metric_key=eval&experiment_name=x&max_results=1000"

ONE_OFF = "does its work once; a flood of it is answered 404 or 409 after the same lookup as its neighbors"
INSTALLATION = "needs a key to the installation, which no project has"
OWN_MEANS = "ends the flood's own key, session, endpoint or run"

REASONS: dict[Route, str] = {
    **dict.fromkeys(
        [
            ("POST", f"{API}/projects"),
            ("GET", f"{API}/projects"),
            ("POST", f"{API}/projects/{{project_id}}/keys"),
            ("PUT", f"{API}/projects/{{project_id}}/quotas"),
        ],
        INSTALLATION,
    ),
    **dict.fromkeys(
        [
            ("DELETE", f"{API}/keys/{{key_id}}"),
            ("DELETE", f"{API}/sessions/{{session_id}}"),
            ("DELETE", f"{API}/endpoints/{{endpoint_id}}"),
            ("DELETE", f"{API}/policies/{{name}}/rollout-stage"),
            ("POST", f"{API}/runs/{{run_id}}/finish"),
            ("POST", "/logout"),
            ("POST", "/settings/keys/{key_id}/revoke"),
            ("POST", "/settings/sessions/{session_id}/end"),
            ("POST", "/webhooks/endpoints/{endpoint_id}/delete"),
        ],
        OWN_MEANS,
    ),
    **dict.fromkeys(
        [
            ("PATCH", f"{MLFLOW}/logged-models/{{model_id}}"),
            ("DELETE", f"{MLFLOW}/logged-models/{{model_id}}"),
            ("POST", f"{MLFLOW}/logged-models/{{model_id}}/params"),
            ("PATCH", f"{MLFLOW}/logged-models/{{model_id}}/tags"),
            ("DELETE", f"{MLFLOW}/logged-models/{{model_id}}/tags/{{tag_key:path}}"),
        ],
        ONE_OFF,
    ),
    ("GET", "/openid/start"): "needs an OpenID provider",
    ("GET", "/openid/callback"): "needs an OpenID provider",
}


def list_routes() -> Iterator[Route]:
    """All routes of the app: of MLflow's API those below one of its prefixes, since the others are the same."""
    app = create_app(Settings(), Database("sqlite:///nowhere.db"), session_secret=token_urlsafe())  # never queried
    yield from _list_routes(app, "")
    mlflow = next(route.app for route in app.routes if isinstance(route, Mount) and route.path == "/mlflow")
    assert isinstance(mlflow, FastAPI)
    for method, path in _list_routes(mlflow, "/mlflow"):
        if path.startswith("/mlflow/api/2.0/mlflow"):
            yield method, path


def _list_routes(app: FastAPI, prefix: str) -> Iterator[Route]:
    for context in iter_route_contexts(app.routes):
        if isinstance(context.original_route, APIRoute):
            for method in sorted(context.methods or ()):
                yield method, f"{prefix}{context.path}"


def is_listed(route: Route) -> bool:
    """Whether it is known what the costliest request to this route is, or why there is none."""
    return route[0] == "GET" or any(route in table for table in (BODIES, FORMS, TEXTS, REASONS))


def write_request(route: Route, ids: Mapping[str, str], form_token: str) -> tuple[str, str, str]:
    """The path with its query, the media type and the body of a request to a route."""
    method, template = route
    path = template.replace("{path:path}", f"1/1/artifacts/f{COUNT}" if method == "PUT" else "x")
    query = QUERY.get(route, MLFLOW_QUERY if method == "GET" and path.startswith("/mlflow") else "")
    media_type, body = "", ""
    if route in FORMS:
        media_type, body = "application/x-www-form-urlencoded", urlencode({**FORMS[route], "csrf": form_token})
    elif route in TEXTS:
        media_type, body = "text/plain", TEXTS[route]
    elif BODIES.get(route) is not None:
        media_type, body = "application/json", json.dumps(BODIES[route])
    for name, value in ids.items():
        path, query, body = (text.replace(f"{{{name}}}", value) for text in (path, query, body))
    return f"{path}?{query}" if query else path, media_type, body
