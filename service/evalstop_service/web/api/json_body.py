"""Parses request bodies as strict JSON, with error messages for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from evalstop_service.web.context import authenticate_request
from evalstop_service.web.limits import in_thread, to_coroutine
from evalstop_service.web.problems import RESPONSES, Problem, ProblemKind

API = "/api/v1"

MOST_NAMES_IN_ONE, MOST_NAMES = 1000, 100_000
"""The most names in an object and in a body: no request needs as many, and each wrong one is an error of its own."""

PROMPT_BYTES = 4096
"""Longer bodies are parsed in a thread: one of 30 KiB may take 0.1 s."""


def create_router(*tags: str, prefix: str = API) -> APIRouter:
    """A router of whole routes, to be added to the app as they are: FastAPI builds routes of included routers twice."""
    return APIRouter(
        prefix=prefix,
        tags=[*tags],
        route_class=JsonRoute,
        responses=RESPONSES,
        generate_unique_id_function=name_operation,
    )


def name_operation(route: APIRoute) -> str:
    """The id of an operation: the name of its function, a verb and its object, as in `open_run`."""
    return route.name


class JsonRoute(APIRoute):
    """A route whose body, if any, is JSON: 401 without a key, 415 for another media type, 400 for invalid JSON."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        # FastAPI would call a function in a thread, and take another one to check what it returned.
        super().__init__(path, to_coroutine(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def strict(request: Request) -> Response:
            await authenticate_request(request)
            content_type = request.headers.get("content-type", "")
            if content_type.partition(";")[0].strip().lower() != "application/json":
                raise Problem(415, ProblemKind.NOT_JSON, "send it with the header `Content-Type: application/json`")
            body = await request.body()
            if len(body) <= PROMPT_BYTES:
                return await handle(_Parsed(request, parse(body)))
            return await handle(_Parsed(request, await in_thread(self._validate)(body)))

        return strict

    def _validate(self, body: bytes) -> Any:
        """The model that a body contains, which FastAPI takes as it is. Raises Problem, RequestValidationError."""
        assert self.body_field is not None, "the route has a body"
        document = parse(body)
        model, errors = self.body_field.validate(document, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=document)
        return model


class _Parsed(Request):
    """A request with a body that was already read."""

    def __init__(self, request: Request, document: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._document = document

    async def body(self) -> bytes:
        return b"read"

    async def json(self) -> Any:
        return self._document


def parse(body: bytes) -> Any:
    """Parse a body; raises Problem with the place where it is not JSON."""
    try:
        return load(body)
    except ValueError as error:
        raise Problem(400, ProblemKind.INVALID_JSON, f"{error}. Nothing was stored") from error


def load(text: bytes) -> Any:
    """Parse a text; raises ValueError with the place where it is not JSON. Of two equal names the last one counts."""
    try:
        document = json.loads(text.decode(), parse_constant=_refuse_constant)
        names = _count_names(document)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if names > MOST_NAMES:
        raise ValueError(f"its objects have {names} names, more than {MOST_NAMES}")
    return document


def _refuse_constant(name: str) -> Any:
    raise ValueError(f'{name} is not JSON; send it as the string "{name}"')


def _count_names(value: Any) -> int:
    """The number of names in all objects of a document; raises ValueError if one has too many."""
    if isinstance(value, dict):
        if len(value) > MOST_NAMES_IN_ONE:
            raise ValueError(f"an object has {len(value)} names, more than {MOST_NAMES_IN_ONE}")
        return len(value) + sum(map(_count_names, value.values()))
    return sum(map(_count_names, value)) if isinstance(value, list) else 0
