"""Our errors as HTTP answers: RFC 9457 problem details, made here and nowhere else."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import sqlalchemy as sa
from evalstop_detectors import InvalidPolicy
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from evalstop_service.errors import Behind, Closed, Conflict, Invalid, NotFound, Overloaded
from evalstop_service.observability import logs
from evalstop_service.security.address_policy import AddressRefused
from evalstop_service.security.encryption import UnreadableSecret
from evalstop_service.store.database import is_disk_full

MEDIA_TYPE = "application/problem+json"

MOST_ERRORS = 100

_log = logging.getLogger(__name__)


class Problem(Exception):
    """The request cannot be answered as asked."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        *,
        errors: list[dict[str, str]] | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{title}: {detail}")
        self.status, self.title, self.detail = status, title, detail
        self.errors, self.headers, self.more = errors, headers, more


class FieldError(BaseModel):
    """One thing that was wrong with the request."""

    pointer: str = Field(description="JSON pointer into the body, or the name of the parameter")
    detail: str


class ProblemDetails(BaseModel):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    request_id: str | None = Field(None, description="as in the header X-Request-Id; the service's log has it, too")
    errors: list[FieldError] | None = Field(None, description=f"what was wrong where, at most {MOST_ERRORS} of them")


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": ProblemDetails,
        "description": "400 no JSON, 401 no valid key, 403 a key that may not, 404 not in this project, 409 against "
        "what is on record, 413 too large, 415 not application/json, 422 not valid; nothing was stored",
    },
    "5XX": {
        "model": ProblemDetails,
        "description": "503 the database is away or too much waits, send the same again; 500 a fault",
    },
}
"""What every route may answer besides."""


def answer(problem: Problem, path: str) -> JSONResponse:
    """The problem as a response to a request for `path`."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "instance": path,
    }
    if (request_id := logs.request_id()) is not None:
        body["request_id"] = request_id
    if problem.errors is not None:
        body["errors"] = problem.errors
    if problem.more is not None:
        body |= problem.more
    return JSONResponse(body, problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of the app as a problem."""
    for error_type in _PROBLEMS:
        app.add_exception_handler(error_type, _handle)
    app.add_exception_handler(HTTPException, _no_route)


def problem_of(error: Exception) -> Problem:
    """What an error is called over HTTP."""
    problem: Problem = next(to_problem(error) for kind, to_problem in _PROBLEMS.items() if isinstance(error, kind))
    return problem


def _handle(request: Request, error: Exception) -> JSONResponse:
    return answer(problem_of(error), request.url.path)


def _invalid_request(error: RequestValidationError) -> Problem:
    found = error.errors()
    errors = [
        {"pointer": _pointer(item["loc"]), "detail": item["msg"].removeprefix("Value error, ")}
        for item in found[:MOST_ERRORS]
    ]
    detail = f"{len(found)} thing{'s' if len(found) != 1 else ''} wrong with the request; nothing of it was stored"
    return Problem(422, "The request is not valid", detail, errors=errors)


def _pointer(location: tuple[int | str, ...]) -> str:
    if location and location[0] == "body":
        return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location[1:])
    return " ".join(str(part) for part in location)


def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    if status == 404:
        problem = Problem(404, "Not found", "there is nothing at this path; /docs shows what there is")
    elif status == 405:
        methods = _methods(request) or set((error.headers or {}).get("Allow", "").split(", "))
        allowed = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
        detail = f"this path takes {allowed}, not {request.method}; /docs shows what there is"
        problem = Problem(405, "Wrong method", detail, headers={"Allow": allowed})
    else:
        problem = Problem(status, HTTPStatus(status).phrase, str(error.detail), headers=error.headers)
    return answer(problem, path)


def _methods(request: Request) -> set[str]:
    """All methods of a path; the router itself names those of the first route alone."""
    for template, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), request.url.path):
            return {method.upper() for method in operations}
    return set()


def _database_away(error: Exception) -> Problem:
    if isinstance(error, sa.exc.DBAPIError) and is_disk_full(error):
        _log.error("the database's disk is full: %s", error.orig)
        detail = "the disk is full; nothing was stored, make room and send the same again"
        return Problem(503, "The database's disk is full", detail, headers={"Retry-After": "10"})
    _log.error("the database does not answer: %s", error)
    return Problem(
        503,
        "The database does not answer",
        "this may not have been stored; send the same again, which is harmless if it was",
        headers={"Retry-After": "1"},
    )


def _bug(error: Exception) -> Problem:
    _log.error("a request failed", exc_info=error)
    return Problem(500, "The service failed", "this is a fault of the service; its log says more")


def _ask_again(title: str, seconds: int) -> Callable[[Exception], Problem]:
    return lambda error: Problem(503, title, str(error), headers={"Retry-After": str(seconds)})


def _refused(error: Exception) -> Problem:
    return Problem(
        422,
        "Webhooks may not go there",
        "nothing was changed; deliveries are held to the same rule at every connection",
        errors=[{"pointer": "/url", "detail": str(error)}],
    )


_PROBLEMS: dict[type[Exception], Any] = {  # the first that fits
    Problem: lambda error: error,
    NotFound: lambda error: Problem(404, "Not found", str(error)),
    Conflict: lambda error: Problem(409, "Conflict with what is on record", str(error)),
    Invalid: lambda error: Problem(422, "The request is not valid", str(error)),
    Overloaded: _ask_again("The service cannot take more just now", 1),
    Behind: _ask_again("The service is older than its database", 60),
    Closed: _ask_again("The service cannot take more just now", 1),
    UnreadableSecret: _ask_again("A secret cannot be read", 60),
    AddressRefused: _refused,
    InvalidPolicy: lambda error: Problem(422, "The policy is not valid", str(error)),
    RequestValidationError: _invalid_request,
    sa.exc.OperationalError: _database_away,
    sa.exc.TimeoutError: _database_away,
    Exception: _bug,
}
