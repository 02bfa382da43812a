"""Which runs a filter of MLflow's selects, as far as it is understood here. Pure.

Understood are comparisons by `=` and `!=` of tags, params and the attributes `run_name`, `run_id` and `status` with
texts, joined by `and`. Anything else is refused: a filter that is passed over in silence would select too much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from evalstop_service.web.mlflow.errors import invalid

_CLAUSE = re.compile(
    r"\s*(?P<kind>tags?|params?|parameters?|attributes?|attr|run)\s*\."
    r"\s*(?P<key>`[^`]+`|\"[^\"]+\"|[\w.\-/]+)\s*(?P<sign>=|!=)\s*(?P<value>'[^']*'|\"[^\"]*\")\s*",
    re.IGNORECASE,
)
_AND = re.compile(r"and\b", re.IGNORECASE)
_ATTRIBUTES = {"run_name": "run_name", "run_id": "run_id", "status": "status"}
_NEWEST_FIRST = re.compile(r"\s*(?:(?:attributes?|run)\.)?(?:start_time|created)\s+desc\s*", re.IGNORECASE)


class Clause(NamedTuple):
    """`key` of the `kind` (tags, params, info) is `value` or, where not `equal`, another."""

    kind: str
    key: str
    equal: bool
    value: str


def clauses(text: str) -> list[Clause]:
    """The clauses of a filter. Raises Failure for what is not understood."""
    found: list[Clause] = []
    text, at = text.strip(), 0
    while at < len(text):
        if found:
            joined = _AND.match(text, at)
            if joined is None:
                raise _not_understood(text)
            at = joined.end()
        match = _CLAUSE.match(text, at)
        if match is None:
            raise _not_understood(text)
        kind, key = match["kind"].lower(), match["key"].strip('`"')
        kind = "tags" if kind.startswith("tag") else "params" if kind.startswith("param") else "info"
        if kind == "info" and key not in _ATTRIBUTES:
            raise _not_understood(text)
        found.append(Clause(kind, key, match["sign"] == "=", match["value"][1:-1]))
        at = match.end()
    return found


def newest_first(order_by: Sequence[str]) -> None:
    """Raise Failure unless the order that is asked for is the one in which runs are answered."""
    for order in order_by:
        if not _NEWEST_FIRST.fullmatch(order):
            raise invalid(f"order_by {order!r}: runs are answered newest first, which is `attributes.start_time DESC`")


def selects(wanted: Sequence[Clause]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a run, as it is answered, fits all clauses."""

    def fits(document: Mapping[str, Any]) -> bool:
        values = {kind: {item["key"]: item["value"] for item in document["data"][kind]} for kind in ("tags", "params")}
        values["info"] = document["info"]
        # As in MLflow a run without the key fits neither sign.
        return all(
            clause.key in values[clause.kind] and (values[clause.kind][clause.key] == clause.value) is clause.equal
            for clause in wanted
        )

    return fits


def _not_understood(text: str) -> Exception:
    return invalid(
        f"filter {text!r:.300} is not understood: join comparisons such as tags.key = 'value', params.key != 'value' "
        "or attributes.run_name = 'value' (run_id, status) by `and`; metrics cannot be compared here"
    )
