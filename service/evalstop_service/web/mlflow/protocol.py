"""How MLflow's clients authenticate, and the errors that they expect.

A key is sent as bearer token, or as the password of basic authentication. Clients retry 408, 429, 500, 502, 503 and 504
for minutes, and raise any other status immediately in the training loop. So temporary problems are 503, and problems
that a retry cannot solve have another status.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from evalstop_service.errors import ServiceError
from evalstop_service.store.keys import Key
from evalstop_service.web import problems
from evalstop_service.web.api.json_body import JsonRoute
from evalstop_service.web.context import Caller, Context, allowed, read_address, refuse_key
from evalstop_service.web.limits import LIMITS, hold_place, set_sender
from evalstop_service.web.problems import Problem

_UNAUTHENTICATED = refuse_key(
    "set MLFLOW_TRACKING_TOKEN to an active key, or MLFLOW_TRACKING_PASSWORD with any MLFLOW_TRACKING_USERNAME"
)


async def authenticate_request(request: Request) -> Key:
    """The key of a request; raises Problem unless it is valid."""
    context: Context = request.app.state.context
    secret = read_secret(request.headers.get("authorization", ""))
    key = None
    if secret is not None:
        threads = LIMITS.get().authentication
        key = await context.key_cache.authenticate_together(secret, read_address(request), threads=threads)
    if key is None:
        raise _UNAUTHENTICATED
    set_sender(key.id, key.project_id)
    return key


def read_secret(header: str) -> str | None:
    """The secret in an `Authorization` header, bearer or basic; None if there is none."""
    scheme, _, credentials = header.partition(" ")
    match scheme.lower():
        case "bearer":
            return credentials
        case "basic":
            try:
                name, colon, password = base64.b64decode(credentials, validate=True).decode().partition(":")
            except (binascii.Error, ValueError):
                return None
            return password if colon and name else None
    return None


class MlflowRoute(JsonRoute):
    """A route of MLflow's API; its body is read only after authentication."""

    insist = staticmethod(authenticate_request)


def _require_scope(*scopes: str) -> Callable[..., Awaitable[Caller]]:
    async def authorize(key: Annotated[Key, Depends(authenticate_request)], request: Request) -> Caller:
        granted = allowed(key, *scopes)
        hold_place(LIMITS.get().requests)
        return granted

    return authorize


Ingest = Annotated[Caller, Depends(_require_scope("ingest"))]
Read = Annotated[Caller, Depends(_require_scope("read"))]
ReadOrIngest = Annotated[Caller, Depends(_require_scope("read", "ingest"))]


MAX_DETAILS = 3
LONGEST_SHOWN = 300

_CODES = {
    400: "INVALID_PARAMETER_VALUE",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    409: "RESOURCE_CONFLICT",
    429: "REQUEST_LIMIT_EXCEEDED",
    500: "INTERNAL_ERROR",
    501: "NOT_IMPLEMENTED",
    503: "TEMPORARILY_UNAVAILABLE",
}


class MlflowError(Exception):
    """A request that is answered with an error in MLflow's format."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status, self.code, self.message = status, code, message


def invalid_parameter(message: str) -> MlflowError:
    """An invalid parameter; the message names it and what is allowed."""
    return MlflowError(400, "INVALID_PARAMETER_VALUE", message)


def not_found(message: str) -> MlflowError:
    """A resource that does not exist."""
    return MlflowError(404, "RESOURCE_DOES_NOT_EXIST", message)


def already_exists(message: str) -> MlflowError:
    """A resource that already exists."""
    return MlflowError(400, "RESOURCE_ALREADY_EXISTS", message)


_EXPECTED = (
    *(MlflowError, Problem, ServiceError, HTTPException, RequestValidationError),
    *(sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.TimeoutError),
)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of the app in MLflow's format."""
    # Expected errors are listed one by one: a handler for Exception answers and then raises again, so that the server
    # logs the bug and closes the connection.
    for error_type in (*_EXPECTED, Exception):
        app.add_exception_handler(error_type, _handle_error)


def problem_response(problem: Problem) -> JSONResponse:
    """A problem in MLflow's error format."""
    return _error_response(convert_problem(problem), problem.headers)


def _handle_error(request: Request, error: Exception) -> JSONResponse:
    problems.count_refusal(request, error)
    if isinstance(error, MlflowError):
        return _error_response(error)
    if isinstance(error, RequestValidationError):
        return _error_response(_convert_validation_error(error))
    if isinstance(error, HTTPException):
        return _error_response(MlflowError(error.status_code, "BAD_REQUEST", str(error.detail)))
    return problem_response(problems.problem_of(error))


def _convert_validation_error(error: RequestValidationError) -> MlflowError:
    """The first error with the message of MLflow's server, which clients and users look for."""
    first = error.errors()[0]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:]).lstrip(".")
    if first["type"] == "missing" or first.get("input") is None:
        return invalid_parameter(f"Missing value for required parameter '{name}'.")
    value = json.dumps(first["input"], default=str)
    shortened = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."
    return invalid_parameter(f"Invalid value {shortened} for parameter '{name}' supplied: {first['msg']}")


def convert_problem(problem: Problem) -> MlflowError:
    """The MLflow error of a problem."""
    status = 400 if problem.status in (413, 415, 422) else problem.status
    message = f"{problem.title}: {problem.detail}"
    for item in (problem.errors or [])[:MAX_DETAILS]:
        message += f". {item['pointer']}: {item['detail']}"
    return MlflowError(status, _CODES.get(status, "BAD_REQUEST"), message)


def _error_response(error: MlflowError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error_code": error.code, "message": error.message}, error.status, headers)
