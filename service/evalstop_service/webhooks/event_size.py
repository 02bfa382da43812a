"""Limits events to the size that receivers accept: drops the longest labels, and truncates long texts. Pure."""

from __future__ import annotations

import json
from typing import Any

MOST_EVENT_BYTES = 64 * 1024

_ENVELOPE_BYTES = 1024
"""Reserved for the type and the time of an event."""

_LABEL_BYTES = 48 * 1024
"""Reserved for labels, whatever else an event holds."""

_ALWAYS_WHOLE = 60
"""Characters of a text that is never truncated: all ids and times are shorter."""


def fit_data(data: dict[str, Any]) -> dict[str, Any]:
    """Shorten the data of an event, given as JSON values, so that the event is smaller than `MOST_EVENT_BYTES`.

    Short labels identify a job: 500 of 60 characters always stay. The report of a receiver, which may be nested without
    limit, is left out if it is still too long.
    """
    most = MOST_EVENT_BYTES - _ENVELOPE_BYTES
    if _count_bytes(data) <= most:
        return data
    labels: dict[str, str] = data.get("run", {}).get("labels", {})
    if labels:
        data = data | {"run": data["run"] | {"labels": {}}}
    longest = 2000
    while _count_bytes(data) > most - _LABEL_BYTES and longest > _ALWAYS_WHOLE:
        data, longest = _truncate(data, longest), longest // 2
    if "report" in data and _count_bytes(data) > most - _LABEL_BYTES:
        data = data | {"report": {}}
    if labels:
        data["run"]["labels"] = _select_shortest(labels, most - _count_bytes(data))
    return data


def _select_shortest(labels: dict[str, str], most: int) -> dict[str, str]:
    """The shortest labels that fit, in their original order."""
    selected: set[str] = set()
    for name in sorted(labels, key=lambda name: _count_bytes({name: labels[name]})):
        most -= _count_bytes({name: labels[name]})  # its braces stand for the comma
        if most < 0:
            break
        selected.add(name)
    return {name: value for name, value in labels.items() if name in selected}


def _truncate(value: Any, longest: int) -> Any:
    """Truncate texts to `longest` characters, and lists and objects to about a twentieth as many entries."""
    if isinstance(value, str):
        return value if len(value) <= longest else value[: longest - 1] + "\u2026"
    if isinstance(value, list):
        return [_truncate(item, longest) for item in value[: longest // 20 + 1]]
    if isinstance(value, dict):
        entries = list(value.items())[: max(20, longest // 20)]
        return {name: _truncate(item, longest) for name, item in entries}
    return value


def _count_bytes(document: Any) -> int:
    return len(json.dumps(document, separators=(",", ":")))
