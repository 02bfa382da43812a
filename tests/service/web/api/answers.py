"""Checks the API's answers by its OpenAPI document."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database


@cache
def load_document() -> dict[str, Any]:
    """The OpenAPI document."""
    return create_app(Settings(), Database("sqlite:///unused.db"), session_secret="none").openapi()


def check_answer(response: httpx.Response) -> None:
    """Fail unless the document has the status of the answer for its operation, and its content is valid by it."""
    found = find_operation(response.request.method.lower(), response.request.url.path)
    if found is None:
        return
    validators = load_validators(*found)
    assert response.status_code in validators, (found, response.status_code)
    media_type = response.headers.get("content-type", "").partition(";")[0]
    validator = validators[response.status_code].get(media_type)
    assert validator is not None, (found, media_type)
    errors = [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(response.json())]
    assert errors == [], (found, errors[:3])


def find_operation(method: str, path: str) -> tuple[str, str] | None:
    """The path template and the method of an operation, or None for an address outside of the API."""
    for pattern, template in list_patterns():
        if pattern.fullmatch(path) and method in load_document()["paths"][template]:
            return template, method
    return None


@cache
def list_patterns() -> list[tuple[re.Pattern[str], str]]:
    """Each path of the document as a pattern; those without parameters come first."""
    templates = sorted(load_document()["paths"], key=lambda template: template.count("{"))
    return [(re.compile(re.sub(r"\{\w+\}", "[^/]+", template)), template) for template in templates]


@cache
def load_validators(template: str, method: str) -> dict[int, dict[str, Any]]:
    """The validators of an operation's successful answers, by status and media type."""
    document = load_document()
    answers = document["paths"][template][method]["responses"]
    return {
        int(status): {
            media_type: jsonschema_rs.validator_for(
                {**content["schema"], "components": document["components"]}, validate_formats=True
            )
            for media_type, content in answer.get("content", {}).items()
            if "schema" in content
        }
        for status, answer in answers.items()
        if status.isdecimal()
    }
