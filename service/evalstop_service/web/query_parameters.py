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
    accepted = _list_parameters(request.scope["route"].dependant)
    errors = []
    for name in (name for name in dict.fromkeys(request.query_params) if name not in accepted):
        suggestions = difflib.get_close_matches(name, accepted, n=1)
        hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
        errors.append({"pointer": f"query {name}", "detail": f"there is no such parameter{hint}"})
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
        if isinstance(model, type) and issubclass(model, BaseModel):
            names += model.model_fields
        else:
            names.append(field.alias)
    return names + below
