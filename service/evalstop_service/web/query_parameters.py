"""Refuses unknown query parameters: a mistyped filter would silently list everything."""

from __future__ import annotations

import difflib

from fastapi import Request
from fastapi.dependencies.models import Dependant
from pydantic import BaseModel

from evalstop_service.web.problem_kinds import ProblemKind
from evalstop_service.web.problems import Problem


def refuse_unknown_parameters(request: Request) -> None:
    """Raise Problem for an unknown query parameter, with a suggestion."""
    if not request.query_params:
        return
    known = _list_parameters(request.scope["route"].dependant)
    errors = []
    for name in (name for name in dict.fromkeys(request.query_params) if name not in known):
        meant = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {meant[0]!r}?" if meant else ""
        errors.append({"pointer": f"query {name}", "detail": f"there is no such parameter{hint}"})
    if errors:
        detail = f"this path accepts the parameters {', '.join(known)}" if known else "this path accepts no parameters"
        raise Problem(422, ProblemKind.INVALID_REQUEST, detail, errors=errors)


def _list_parameters(dependant: Dependant) -> list[str]:
    below = [name for inner in dependant.dependencies for name in _list_parameters(inner)]
    own: list[str] = []
    for field in dependant.query_params:
        model: object = field.field_info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            own += model.model_fields
        else:
            own.append(field.alias)
    return own + below
