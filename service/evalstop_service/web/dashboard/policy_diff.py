"""The differences between two policies: by field, with members matched by id, and as text. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evalstop_detectors.policy.policy import member_ids

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A field that differs; None: it is missing on that side."""

    field: str
    before: str | None
    after: str | None


def compare_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The fields that differ, in the order of the first document."""
    old, new = dict(_flatten(before)), dict(_flatten(after))
    return [
        Change(field, _text(old.get(field, _ABSENT)), _text(new.get(field, _ABSENT)))
        for field in dict.fromkeys([*old, *new])
        if old.get(field, _ABSENT) != new.get(field, _ABSENT)
    ]


def compare_lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The unified diff of two documents: the sign (`-`, `+`, ` ` or `@`) of each line, and the line."""
    texts = (format_document(before).splitlines(), format_document(after).splitlines())
    diff = list(difflib.unified_diff(*texts, lineterm="", n=3))[2:]
    return [("@" if line.startswith("@@") else line[:1], line) for line in diff]


def format_document(document: Mapping[str, Any]) -> str:
    """A document as indented JSON."""
    return json.dumps(document, indent=2, ensure_ascii=False)


def name_members(document: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The members with their ids."""
    members = document["members"]
    ids = member_ids([(member.get("id"), member["detector"]) for member in members])
    return list(zip(ids, members, strict=True))


def _flatten(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if name == "members":
            for member_id, member in name_members(document):
                yield from _flatten_field(member_id, {key: item for key, item in member.items() if key != "id"})
        else:
            yield from _flatten_field(name, value)


def _flatten_field(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flatten_field(f"{field} · {name}", item)
    else:
        yield field, value


def _text(value: Any) -> str | None:
    if value is _ABSENT:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
