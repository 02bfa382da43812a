"""The differences between two policies: by detector and field, with members matched by id, and as text. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evalstop_detectors.policy.policy import member_ids

from evalstop_service.web.dashboard.formatting import format_json

POLICY = "policy"
"""The group of fields that belong to no member."""

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A field that differs; None: it is missing on that side. `group`: the id of its member, or `POLICY`."""

    group: str
    field: str
    before: str | None
    after: str | None


def compare_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The fields that differ, grouped by member, in the order of the first document."""
    old, new = dict(_flatten(before)), dict(_flatten(after))
    fields = list(dict.fromkeys([*old, *new]))
    groups = list(dict.fromkeys(group for group, _ in fields))
    return [
        Change(*field, *_format_pair(old.get(field, _ABSENT), new.get(field, _ABSENT)))
        for field in sorted(fields, key=lambda field: groups.index(field[0]))
        if old.get(field, _ABSENT) != new.get(field, _ABSENT)
    ]


def compare_lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The unified diff of two documents: the sign (`-`, `+`, ` ` or `@`) of each line, and the line."""
    texts = (format_json(before).splitlines(), format_json(after).splitlines())
    diff = list(difflib.unified_diff(*texts, lineterm="", n=3))[2:]
    return [("@" if line.startswith("@@") else line[:1], line) for line in diff]


def name_members(document: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The members with their ids."""
    members = document["members"]
    ids = member_ids([(member.get("id"), member["detector"]) for member in members])
    return list(zip(ids, members, strict=True))


def _flatten(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in document.items():
        if name == "members":
            for member_id, member in name_members(document):
                for field, item in member.items():
                    if field != "id":
                        yield from _flatten_field(member_id, field, item)
        else:
            yield from _flatten_field(POLICY, name, value)


def _flatten_field(group: str, field: str, value: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flatten_field(group, f"{field} · {name}", item)
    else:
        yield (group, field), value


def _format_pair(before: Any, after: Any) -> tuple[str | None, str | None]:
    """Both values; numbers with three digits, or with all digits if they would look the same."""
    rounded = _format(before, _round), _format(after, _round)
    return rounded if rounded[0] != rounded[1] else (_format(before, repr), _format(after, repr))


def _format(value: Any, write_number: Callable[[float], str]) -> str | None:
    if value is _ABSENT:
        return None
    if isinstance(value, float):
        return write_number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _round(number: float) -> str:
    return f"{number:.0f}" if 1000 <= abs(number) < 1e15 else f"{number:.3g}"
