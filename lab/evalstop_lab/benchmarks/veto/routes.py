"""The costliest request that each route allows: of the API, of MLflow and of the pages.

A GET requests the largest page. What a route does not have in `COSTLIEST` gets the example of its body, or none: it
costs a look-up. `LEFT_OUT` says why no flood of a route makes sense.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from secrets import token_urlsafe
from typing import Any, NamedTuple

from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.routing import Mount

API, MLFLOW = "/api/v1", "/mlflow/api/2.0/mlflow"


class Flood(NamedTuple):
    """A request. `@count@` in it is its number, `@csrf@` the token of a form, `@2000 evals@` are new evals, and
    `{run_id}` is a run of 8,000 evals."""

    method: str
    path: str
    body: str = ""


_LABELS = {f"label-{index}": "v" * 200 for index in range(100)}
_MEMBERS = [{"detector": "posterior", "stop_at": 0.9, "id": f"m{index}"} for index in range(32)]
_FILTER = " AND ".join(["metrics.eval < 1e9"] * 20)
_POINTS = [{"key": f"m{index}", "value": 0.5, "timestamp": 1, "step": "@number@"} for index in range(900)]

COSTLIEST: dict[str, Any] = {
    f"POST {API}/runs": {"name": "r@count@", "labels": _LABELS, "params": _LABELS},
    f"POST {API}/runs/{{run_id}}/observations": '{"observations": [@2000 evals@]}',
    f"POST {API}/observations": '{"runs": [{"run_id": "{run_id}", "observations": [@2000 evals@]}]}',
    f"POST {API}/runs/{{run_id}}/eval-changes": {"step": 3, "reason": "another grader"},
    f"POST {API}/runs/{{run_id}}/checkpoints": {"step": 1, "uri": "file:///@count@"},
    f"POST {API}/policies": {"name": "p@count@", "members": _MEMBERS},
    f"POST {API}/policies/backtests": {"policy": "paper", "runs": 500},
    f"POST {API}/endpoints": {"url": "http://127.0.0.1:9/", "event_types": ["run.lost"]},
    f"POST {MLFLOW}/experiments/create": {"name": "x@count@", "tags": [{"key": "t", "value": "a" * 2000}]},
    f"POST {MLFLOW}/experiments/search": {"max_results": 1000},
    f"POST {MLFLOW}/runs/create": {"experiment_id": "0", "run_name": "m@count@"},
    f"POST {MLFLOW}/runs/search": {"experiment_ids": ["0"], "max_results": 1000, "filter": _FILTER},
    f"POST {MLFLOW}/runs/log-batch": {"run_id": "{run_hex}", "metrics": _POINTS},
    f"POST {MLFLOW}/runs/log-inputs": {
        "run_id": "{run_hex}",
        "datasets": [{"x": [1.5] * 900 + [index]} for index in range(500)],
    },
    f"POST {MLFLOW}/runs/set-tag": {"run_id": "{run_hex}", "key": "t@count@", "value": "a" * 2000},
    f"POST {MLFLOW}/logged-models": {"experiment_id": "0", "name": "checkpoint-@count@"},
    "PUT /mlflow/api/2.0/mlflow-artifacts/artifacts/{path:path}": "x" * 2**20,
    "POST /policies/{name}/edit/try": "document=" + json.dumps({"members": _MEMBERS}),
}
"""Bodies: JSON, or a text as it is."""

QUERIES = {
    "GET /runs/compare": "run={run_id}&run={run_id}",
    "GET /runs/compare/series.json": "run={run_id}&run={run_id}&metric=eval",
    "GET /runs/{run_id}/what-if.json": "policy=default",
}
MLFLOW_QUERY = "run_id={run_hex}&experiment_id=0&metric_key=eval&experiment_name=x&max_results=1000"

LEFT_OUT = {
    "needs a key to the installation": ("/projects",),
    "ends the flood's own key, session, endpoint or run": ("/finish", "/logout", "/revoke", "/end", "/delete"),
    "needs an OpenID provider": ("/openid/start", "/openid/callback"),
}
"""Why no flood is measured of routes whose paths end like this, nor of any DELETE."""


def list_floods() -> Iterator[Flood]:
    """The costliest request of each route; of MLflow's API those below one of its prefixes, as the others are equal."""
    app = create_app(Settings(), Database("sqlite:///nowhere.db"), session_secret=token_urlsafe())  # never queried
    mlflow = next(route.app for route in app.routes if isinstance(route, Mount) and route.path == "/mlflow")
    assert isinstance(mlflow, FastAPI)
    for part, prefix in ((app, ""), (mlflow, "/mlflow")):
        for context in iter_route_contexts(part.routes):
            path = f"{prefix}{context.path}"
            if not isinstance(context.original_route, APIRoute) or (prefix and not path.startswith(MLFLOW)):
                continue
            for method in sorted(context.methods or ()):
                if method != "DELETE" and not path.endswith(tuple(sum(LEFT_OUT.values(), ()))):
                    yield _build_flood(method, path)


def _build_flood(method: str, path: str) -> Flood:
    name = f"{method} {path}"
    body = COSTLIEST.get(name, "")
    if not path.startswith(("/api/", "/mlflow")) and method == "POST":
        body = "&".join(part for part in (body, "csrf=@csrf@") if part)
    text = body if isinstance(body, str) else json.dumps(body).replace('"@number@"', "@count@")
    query = QUERIES.get(name, MLFLOW_QUERY if method == "GET" and path.startswith("/mlflow") else "")
    filled = path.replace("{path:path}", "1/1/artifacts/f@count@" if method == "PUT" else "x")
    return Flood(method, f"{filled}?{query}" if query else filled, text)
