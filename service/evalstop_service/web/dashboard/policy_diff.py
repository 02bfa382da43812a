"""How two policies differ: field by field, members by their ids, and as text. Pure."""

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
    """A field that reads otherwise; None: it is only on the other side."""

    field: str
    before: str | None
    after: str | None


def fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Each field in which two documents differ, in the order of the first."""
    old, new = dict(_flat(before)), dict(_flat(after))
    return [
        Change(field, _text(old.get(field, _ABSENT)), _text(new.get(field, _ABSENT)))
        for field in dict.fromkeys([*old, *new])
        if old.get(field, _ABSENT) != new.get(field, _ABSENT)
    ]


def lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The documents as text, line by line: what is removed (`-`), added (`+`) and near to it (` `)."""
    texts = (pretty(before).splitlines(), pretty(after).splitlines())
    found = list(difflib.unified_diff(*texts, lineterm="", n=3))[2:]
    return [("@" if line.startswith("@@") else line[:1], line) for line in found]


def pretty(document: Mapping[str, Any]) -> str:
    """A document as one reads it."""
    return json.dumps(document, indent=2, ensure_ascii=False)


def named_members(document: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each member by what the policy calls it."""
    members = document["members"]
    ids = member_ids([(member.get("id"), member["detector"]) for member in members])
    return list(zip(ids, members, strict=True))


def _flat(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if name == "members":
            for called, member in named_members(document):
                yield from _within(called, {key: item for key, item in member.items() if key != "id"})
        else:
            yield from _within(name, value)


def _within(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _within(f"{field} · {name}", item)
    else:
        yield field, value


def _text(value: Any) -> str | None:
    if value is _ABSENT:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
