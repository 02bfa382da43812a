"""Converts errors to HTTP responses, RFC 9457 problem details, in this one place; refuses unknown query parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from enum import Enum
from http import HTTPStatus
from itertools import islice
from typing import Any

import sqlalchemy as sa
from evalstop_detectors import InvalidPolicy
from fastapi import FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from evalstop_service.errors import (
    Conflict,
    Invalid,
    NotFound,
    OtherProject,
    Overloaded,
    QuotaReached,
    TooOften,
)
from evalstop_service.observability import logs
from evalstop_service.security.address_policy import AddressRefused
from evalstop_service.security.encryption import UnreadableSecret
from evalstop_service.store.faults import Fault, find_fault

MEDIA_TYPE = "application/problem+json"

CHOICES = frozenset({"~one", "~other"})
"""Tags of pydantic's discriminated unions; they appear in the location of an error, but in no document."""

MOST_ERRORS = 100

PLAIN_TEXTS = {
    "model_attributes_type": "this should be an object",
    "uuid_parsing": "this should be an id, as lists show it; GET /api/v1/runs?name= finds a run by its name",
}
"""Replacements for pydantic's messages that use Python's terms, by type of error."""

_log = logging.getLogger(__name__)

PATH = "/problems"
"""Path of the page that explains them."""

_SMALLER = "Send it in smaller parts. Nothing was stored."
_JSON = "Send JSON with the header `Content-Type: application/json`, compressed only where `detail` names encodings."
_AGAIN = "Send it again after `Retry-After` seconds; what was stored is not counted twice."


class ProblemKind(Enum):
    """A kind of problem: its title and what to do about it. Programs rely on its `code`, which never changes."""

    INVALID_REQUEST = (
        "The request is not valid",
        "`errors` names each fault by a JSON pointer or a parameter, or `detail` the only one. Nothing was stored.",
    )
    INVALID_JSON = ("The body is not valid JSON", "`detail` says where parsing or decompressing failed.")
    NOT_JSON = ("The body is not JSON", _JSON)
    BODY_TOO_LARGE = ("The body is too large", _SMALLER)
    NO_KEY = (
        "No valid key",
        "Send `Authorization: Bearer esk_...` with a valid key; `evalstop key create` creates one.",
    )
    SCOPE_MISSING = ("The key may not do this", "Use a key with the scope, or of the kind, that `detail` names.")
    NOT_FOUND = ("Not found", "Nothing in the key's project has this id, or there is no such path: see `/docs`.")
    WRONG_METHOD = ("Wrong method", "`Allow` names the methods of this path.")
    CONFLICT = (
        "Conflict with what is recorded",
        "`detail` names both; the recorded value stands. Leave out what differs.",
    )
    OTHER_PROJECT = (
        "The run belongs to another project",
        "`key_hash` is that of a key of another project: open the run with a key of that project.",
    )
    TOO_MANY_REQUESTS = ("Too many requests", _AGAIN)
    QUOTA_REACHED = (
        "A quota of the project is reached",
        "`detail` names the quota. With 429, send it again after `Retry-After` seconds; with 409, remove something or "
        "have the quota raised.",
    )
    OVERLOADED = ("The service is overloaded", _AGAIN)
    DATABASE_AWAY = ("The database cannot be used now", _AGAIN)
    DATABASE_REFUSES = (
        "The database refuses this",
        "Free space on its disk, or grant the service's role what the log names; then send it again.",
    )
    SCHEMA_TOO_OLD = (
        "The schema is missing or too old",
        "Run `evalstop migrate`. If nothing was missing, this is a bug: look for the `request_id` in the log.",
    )
    UNREADABLE_SECRET = ("A secret cannot be read", "Set `EVALSTOP_SECRET_KEYS` to the keys that encrypted it.")
    FAULT = ("The service failed", "This is a bug: look for the `request_id` in the log.")
    OTHER = ("Other", "See `title` and `detail`.")  # refused by the web server itself

    def __init__(self, title: str, advice: str) -> None:
        self.title = title
        self.advice = advice

    @property
    def code(self) -> str:
        """The stable name for programs."""
        return self.name.lower()

    @property
    def uri(self) -> str:
        """The URI of its explanation: the `type` of RFC 9457."""
        return f"{PATH}#{self.code}"


class Problem(Exception):
    """The request cannot be fulfilled. `title`: None uses that of its kind."""

    def __init__(
        self,
        status: int,
        kind: ProblemKind,
        detail: str,
        *,
        title: str | None = None,
        errors: list[dict[str, str]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.kind, self.title, self.detail = status, kind, title or kind.title, detail
        super().__init__(f"{self.title}: {detail}")
        self.errors, self.headers = errors, headers


class FieldError(BaseModel):
    """One fault in the request."""

    pointer: str = Field(description="JSON pointer into the body, or the name of the parameter")
    detail: str = Field(description="what is wrong, and what is valid")


class ProblemDetails(BaseModel):
    """RFC 9457 problem details."""

    type: str = Field(description="URI of the explanation of the code")
    code: str = Field(description="kind of problem, for programs; it never changes")
    title: str = Field(description="kind of problem, for people")
    status: int = Field(description="HTTP status")
    detail: str = Field(description="what is wrong with this request, and what to do about it")
    instance: str = Field(description="the path of the request")
    request_id: str | None = Field(None, description="as in the header X-Request-Id and in the service's log")
    errors: list[FieldError] | None = Field(None, description=f"the faults and where they are, at most {MOST_ERRORS}")


_CONTENT = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "400 not JSON, 401 no valid key, 403 scope missing, 404 not in this project, 409 conflict "
        "with what is recorded, 413 too large, 415 not application/json, 422 invalid, 429 too many; nothing was stored",
        "content": _CONTENT,
    },
    "5XX": {
        "description": "503 the database is unavailable or the service overloaded, send the same again; 500 a bug",
        "content": _CONTENT,
    },
}
"""Responses that every route may return."""


def answer(problem: Problem, path: str) -> JSONResponse:
    """The response to a request for `path`."""
    body = {
        "type": problem.kind.uri,
        "code": problem.kind.code,
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "instance": path,
        "request_id": logs.request_id(),
        "errors": problem.errors,
    }
    body = {name: value for name, value in body.items() if value is not None}
    return JSONResponse(body, problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Convert every error of the app to a problem."""
    for error_type in _PROBLEMS:
        app.add_exception_handler(error_type, _handle_error)
    app.add_exception_handler(HTTPException, _no_route)


def count_refusal(request: Request, error: Exception) -> None:
    """Count a request that was refused by a quota."""
    if isinstance(error, QuotaReached):
        request.app.state.context.limits.count_refused(f"quota {error.quota}")


def problem_of(error: Exception) -> Problem:
    """The problem that an error becomes."""
    problem: Problem = next(to_problem(error) for kind, to_problem in _PROBLEMS.items() if isinstance(error, kind))
    return problem


async def _handle_error(request: Request, error: Exception) -> JSONResponse:
    count_refusal(request, error)
    return answer(problem_of(error), request.url.path)


def _invalid_request(error: RequestValidationError) -> Problem:
    details = error.errors()
    errors = [
        {"pointer": _format_pointer(item["loc"]), "detail": describe_fault(item)} for item in details[:MOST_ERRORS]
    ]
    detail = f"the request has {len(details)} error{'s' if len(details) != 1 else ''}; nothing was stored"
    return Problem(422, ProblemKind.INVALID_REQUEST, detail, errors=errors)


def _format_pointer(location: tuple[int | str, ...]) -> str:
    if location and location[0] == "body":
        parts = [str(part) for part in location[1:] if part not in CHOICES]
        return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)
    return " ".join(str(part) for part in location)


def describe_fault(item: Mapping[str, Any]) -> str:
    """What one of pydantic's errors says, without Python's terms."""
    return PLAIN_TEXTS.get(item["type"]) or str(item["msg"]).removeprefix("Value error, ")


def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    if status == 404 and path.startswith(("/api/2.0/", "/ajax-api/2.0/")):
        detail = "MLflow's API is below /mlflow: the URI ends in /mlflow, such as http://HOST:8787/mlflow"
        problem = Problem(404, ProblemKind.NOT_FOUND, detail)
    elif status == 404:
        problem = Problem(404, ProblemKind.NOT_FOUND, "there is nothing at this path; /docs lists all paths")
    elif status == 405:
        methods = _list_methods(request, path) or set((error.headers or {}).get("Allow", "").split(", "))  # of a page
        allowed = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
        detail = f"this path accepts {allowed}, not {request.method}; see /docs"
        problem = Problem(405, ProblemKind.WRONG_METHOD, detail, headers={"Allow": allowed})
    else:
        problem = Problem(
            status, ProblemKind.OTHER, str(error.detail), title=HTTPStatus(status).phrase, headers=error.headers
        )
    return answer(problem, path)


def _list_methods(request: Request, path: str) -> set[str]:
    """All methods of the described routes at the address of the first one that matches a path."""
    routes = [route for route in request.app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    address = next((route.path for route in routes if route.path_regex.match(path)), None)
    return {method for route in routes if route.path == address for method in route.methods or ()}


def _explain_database_error(error: Exception) -> Problem:
    fault = find_fault(error)
    if fault is Fault.BUG:
        return _describe_bug(error)
    _log.error("%s: %s", fault.value, error)
    kind, detail, seconds = _DATABASE_PROBLEMS[Fault.AWAY if fault.is_transient else fault]
    return Problem(503, kind, detail, headers={"Retry-After": seconds})


_DATABASE_PROBLEMS = {
    Fault.AWAY: (
        ProblemKind.DATABASE_AWAY,
        "the request may not have been stored; send the same request again, which is harmless if it was",
        "1",
    ),
    Fault.DISK_FULL: (
        ProblemKind.DATABASE_REFUSES,
        "its disk is full; nothing was stored. Free space and send the same request again",
        "10",
    ),
    Fault.REFUSED: (ProblemKind.DATABASE_REFUSES, "nothing was stored; the service's log has the reason", "10"),
    Fault.NO_SCHEMA: (ProblemKind.SCHEMA_TOO_OLD, "nothing was stored; run `evalstop migrate`", "10"),
}


def _describe_bug(error: Exception) -> Problem:
    _log.error("a request failed", exc_info=error)
    return Problem(500, ProblemKind.FAULT, "this is a bug in the service; its log has the details")


def _ask_again(kind: ProblemKind, seconds: int) -> Callable[[Exception], Problem]:
    return lambda error: Problem(503, kind, str(error), headers={"Retry-After": str(seconds)})


def _quota_reached(error: QuotaReached) -> Problem:
    if error.seconds is None:
        return Problem(409, ProblemKind.QUOTA_REACHED, str(error))
    return Problem(429, ProblemKind.QUOTA_REACHED, str(error), headers={"Retry-After": str(math.ceil(error.seconds))})


_PROBLEMS: dict[type[Exception], Any] = {  # the first that fits
    Problem: lambda error: error,
    NotFound: lambda error: Problem(404, ProblemKind.NOT_FOUND, str(error)),
    Conflict: lambda error: Problem(409, ProblemKind.CONFLICT, str(error)),
    OtherProject: lambda error: Problem(409, ProblemKind.OTHER_PROJECT, str(error)),
    Invalid: lambda error: Problem(422, ProblemKind.INVALID_REQUEST, str(error)),
    TooOften: lambda error: Problem(
        429, ProblemKind.TOO_MANY_REQUESTS, str(error), headers={"Retry-After": str(math.ceil(error.seconds))}
    ),
    QuotaReached: _quota_reached,
    Overloaded: _ask_again(ProblemKind.OVERLOADED, 1),
    UnreadableSecret: _ask_again(ProblemKind.UNREADABLE_SECRET, 60),
    AddressRefused: lambda error: Problem(422, ProblemKind.INVALID_REQUEST, f"url: {error}"),
    InvalidPolicy: lambda error: Problem(422, ProblemKind.INVALID_REQUEST, f"the policy is not valid: {error}"),
    RequestValidationError: _invalid_request,
    sa.exc.DBAPIError: _explain_database_error,
    sa.exc.TimeoutError: _explain_database_error,
    Exception: _describe_bug,
}


def refuse_unknown_parameters(request: Request) -> None:
    """Raise Problem for an unknown query parameter."""
    if not request.query_params:
        return
    accepted = _list_parameters(request.scope["route"].dependant)
    unknown = (name for name in dict.fromkeys(request.query_params) if name not in accepted)
    errors = [
        {"pointer": f"query {name}", "detail": "there is no such parameter"} for name in islice(unknown, MOST_ERRORS)
    ]
    if errors:
        detail = (
            f"this path accepts the parameters {', '.join(accepted)}" if accepted else "this path accepts no parameters"
        )
        raise Problem(422, ProblemKind.INVALID_REQUEST, detail, errors=errors)


def _list_parameters(dependant: Dependant) -> list[str]:
    below = [name for inner in dependant.dependencies for name in _list_parameters(inner)]
    names: list[str] = []
    for field in dependant.query_params:
        model: object = field.field_info.annotation
        names += model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else [field.alias]
    return names + below
