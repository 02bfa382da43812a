"""MLflow's filter expressions. Pure.

Supported: `=` and `!=` between a string and a tag, a param, or the attribute `run_name`, `run_id` or `status`, joined
by `and`. Anything else is an error, because ignoring it would select too many runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from evalstop_service.web.mlflow.errors import invalid_parameter

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


def parse_filter(text: str) -> list[Clause]:
    """The clauses of a filter; raises MlflowError."""
    clauses: list[Clause] = []
    text, at = text.strip(), 0
    while at < len(text):
        if clauses:
            joined = _AND.match(text, at)
            if joined is None:
                raise _unsupported_filter(text)
            at = joined.end()
        match = _CLAUSE.match(text, at)
        if match is None:
            raise _unsupported_filter(text)
        kind, key = match["kind"].lower(), match["key"].strip('`"')
        kind = "tags" if kind.startswith("tag") else "params" if kind.startswith("param") else "info"
        if kind == "info" and key not in _ATTRIBUTES:
            raise _unsupported_filter(text)
        clauses.append(Clause(kind, key, match["sign"] == "=", match["value"][1:-1]))
        at = match.end()
    return clauses


def check_order(order_by: Sequence[str]) -> None:
    """Raise MlflowError unless runs are requested newest first."""
    for order in order_by:
        if not _NEWEST_FIRST.fullmatch(order):
            raise invalid_parameter(f"order_by {order!r} is not supported, only `attributes.start_time DESC`")


def build_predicate(clauses: Sequence[Clause]) -> Callable[[Mapping[str, Any]], bool]:
    """A predicate on run documents that holds when all clauses do."""

    def matches(document: Mapping[str, Any]) -> bool:
        values = {kind: {item["key"]: item["value"] for item in document["data"][kind]} for kind in ("tags", "params")}
        values["info"] = document["info"]
        # As in MLflow, a run without the key matches neither `=` nor `!=`.
        return all(
            clause.key in values[clause.kind] and (values[clause.kind][clause.key] == clause.value) is clause.equal
            for clause in clauses
        )

    return matches


def _unsupported_filter(text: str) -> Exception:
    return invalid_parameter(
        f"filter {text!r:.300} is not supported: join comparisons such as tags.key = 'value', params.key != 'value' "
        "or attributes.run_name = 'value' (run_id, status) by `and`; metrics cannot be compared"
    )
