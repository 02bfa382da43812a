"""A request to the fake API server, parsed, what its patch and its selector mean, and the resources that it serves."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from tests.clients.receivers.kubernetes.fake_storage import Json, StatusError

JOB_FIELDS = frozenset(
    {
        "parallelism",
        "completions",
        "backoffLimit",
        "activeDeadlineSeconds",
        "selector",
        "template",
        "ttlSecondsAfterFinished",
    }
)
SINCE_1_21 = frozenset({"suspend", "completionMode"})


@dataclass
class Resource:
    """A resource of the API. `fields`: the known fields of spec, others are dropped; None for any."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = True
    is_custom: bool = False
    fields: frozenset[str] | None = None

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


@dataclass
class Request:
    """A parsed request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    raw: bytes
    user: str = ""
    resource: Resource | None = None
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    def body(self) -> Json:
        try:
            body = json.loads(self.raw or b"{}")
        except ValueError as error:
            raise StatusError(400, "BadRequest", f"the object provided is unrecognized: {error}") from None
        if not isinstance(body, dict):
            raise StatusError(400, "BadRequest", "the object provided is not an object")
        return body


def apply_merge_patch(before: Any, change: Any) -> Any:
    """A merge patch of RFC 7386."""
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    after = dict(before) if isinstance(before, dict) else {}
    for name, value in change.items():
        if value is None:
            after.pop(name, None)
        else:
            after[name] = apply_merge_patch(after.get(name), value)
    return after


def matches_fields(item: Json, selector: str) -> bool:
    """Whether an object has the fields that a field selector requires; an absent one is empty."""
    for path, _, value in [part.partition("=") for part in selector.split(",") if part]:
        found: Any = item
        for name in path.split("."):
            found = found.get(name, "") if isinstance(found, dict) else ""
        if found != value:
            return False
    return True


def matches_selector(item: Json, selector: str) -> bool:
    """Whether an object has the labels that a selector requires."""
    labels = item["metadata"].get("labels", {})
    wanted = [part.partition("=") for part in selector.split(",") if part]
    return all(labels.get(name) == value for name, _, value in wanted)
