"""The errors that MLflow's clients expect.

Clients retry 408, 429, 500, 502, 503 and 504 for minutes, and raise any other status immediately in the training loop.
So temporary problems are 503, and problems that a retry cannot solve have another status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy as sa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from evalstop_service.errors import ServiceError
from evalstop_service.web import problems
from evalstop_service.web.problems import Problem

API = "/api/2.0"
"""Prefix of all of MLflow's routes."""

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


_EXPECTED = (
    *(MlflowError, Problem, ServiceError, HTTPException, RequestValidationError),
    *(sa.exc.DBAPIError, sa.exc.TimeoutError),
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
