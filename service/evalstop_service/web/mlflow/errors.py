"""Our problems as MLflow's errors: a code that its clients know, and a status that says whether to try again.

A client tries 408, 429, 500, 502, 503 and 504 again, by itself and for minutes, and raises all others at once in the
training loop. So 503 is what passes, and everything else is what no second try would mend.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from evalstop_service.errors import ServiceError
from evalstop_service.web import problems
from evalstop_service.web.problems import Problem

MOST_SAID = 3

_CODES = {
    400: "INVALID_PARAMETER_VALUE",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    409: "RESOURCE_CONFLICT",
    500: "INTERNAL_ERROR",
    501: "NOT_IMPLEMENTED",
    503: "TEMPORARILY_UNAVAILABLE",
}


class Failure(Exception):
    """A request that is answered with an error of MLflow's own."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status, self.code, self.message = status, code, message


def invalid(message: str) -> Failure:
    """A parameter that cannot be taken; the message says which, and what it may be."""
    return Failure(400, "INVALID_PARAMETER_VALUE", message)


def missing(message: str) -> Failure:
    """Something that is not on record."""
    return Failure(404, "RESOURCE_DOES_NOT_EXIST", message)


def exists(message: str) -> Failure:
    """Something that is on record already."""
    return Failure(400, "RESOURCE_ALREADY_EXISTS", message)


_EXPECTED = (
    *(Failure, Problem, ServiceError, HTTPException, RequestValidationError),
    *(sa.exc.OperationalError, sa.exc.TimeoutError),
)


def install(app: FastAPI) -> None:
    """Answer every error of the app as MLflow would."""
    # By name, and not as an Exception: that is for bugs, which are raised again once they are answered, so that the
    # server logs them and closes the connection.
    for error_type in (*_EXPECTED, Exception):
        app.add_exception_handler(error_type, _handle)


def refusal(problem: Problem) -> JSONResponse:
    """The answer to a request that cannot be answered as asked."""
    return _answer(failure_of(problem), problem.headers)


def _handle(_request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, Failure):
        return _answer(error)
    if isinstance(error, HTTPException):
        return _answer(Failure(error.status_code, "BAD_REQUEST", str(error.detail)))
    return refusal(problems.problem_of(error))


def failure_of(problem: Problem) -> Failure:
    """What a problem is called in MLflow."""
    status = 400 if problem.status in (413, 415, 422) else problem.status
    message = f"{problem.title}: {problem.detail}"
    for item in (problem.errors or [])[:MOST_SAID]:
        message += f". {item['pointer']}: {item['detail']}"
    return Failure(status, _CODES.get(status, "BAD_REQUEST"), message)


def _answer(failure: Failure, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error_code": failure.code, "message": failure.message}, failure.status, headers)
