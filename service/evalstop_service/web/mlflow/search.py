"""MLflow's filter expressions and orders of runs. Pure; `store.mlflow` runs them in SQL.

    metrics.accuracy > 0.8 AND params.optimizer = 'adam' AND status = 'FINISHED'

Comparisons joined by AND. Unknown syntax is an error, because ignoring it would select too much.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from evalstop_service.store.mlflow import Clause, Order
from evalstop_service.web.mlflow.protocol import invalid_parameter

MAX_CLAUSES, MAX_ORDERS = 20, 5
"""Comparisons in a filter, and sort keys: each is computed for every run."""

_CLAUSE = re.compile(
    r"\s*(?:(?P<kind>[a-z_]+)\s*\.\s*)?(?P<key>`[^`]+`|\"[^\"]+\"|[\w.\-/]+)\s*(?P<sign><=|>=|!=|=|<|>)\s*"
    r"(?P<value>'[^']*'|\"[^\"]*\"|-?[0-9][0-9.eE+\-]*)\s*",
    re.IGNORECASE,
)
_AND = re.compile(r"and\b", re.IGNORECASE)
_ORDER = re.compile(
    r"(?:(?P<kind>[a-z_]+)\s*\.\s*)?(?P<key>`[^`]+`|\"[^\"]+\"|[\w.\-/]+(?: +[\w.\-/]+)*?)"
    r"(?:\s+(?P<direction>asc|desc))?",
    re.IGNORECASE,
)
_KEY = re.compile(r"[^\"`\\]+")
"""What a key may consist of: others could end the path by which SQLite finds a member of a document."""

_KINDS = {
    **dict.fromkeys(("attribute", "attributes", "attr", "run"), "attributes"),
    **dict.fromkeys(("tag", "tags"), "tags"),
    **dict.fromkeys(("param", "params", "parameter", "parameters"), "params"),
    **dict.fromkeys(("metric", "metrics"), "metrics"),
}
_ATTRIBUTES = {
    **{name: name for name in ("run_id", "run_name", "status", "start_time", "end_time", "user_id")},
    **{name: name for name in ("experiment_id", "lifecycle_stage")},
    **dict.fromkeys(("run name", "Run name", "Run Name", "name"), "run_name"),
    **dict.fromkeys(("created", "Created"), "start_time"),
}
"""Each spelling of an attribute."""


def parse_filter(text: str) -> list[Clause]:
    """The clauses of a filter; raises MlflowError."""
    if clean_text(text) != text:
        raise _refuse_filter(text)
    clauses: list[Clause] = []
    text, at = text.strip(), 0
    while at < len(text):
        if clauses:
            joined = _AND.match(text, at)
            if joined is None:
                raise _refuse_filter(text)
            at = joined.end()
        match = _CLAUSE.match(text, at)
        if match is None:
            raise _refuse_filter(text)
        kind, key = _parse_key(match["kind"], match["key"])
        clauses.append(Clause(kind, key, match["sign"], _parse_value(text, kind, key, match["sign"], match["value"])))
        at = match.end()
    if len(clauses) > MAX_CLAUSES:
        raise invalid_parameter(f"a filter may have {MAX_CLAUSES} comparisons; this one has {len(clauses)}")
    return clauses


def parse_orders(texts: Iterable[str]) -> list[Order]:
    """The sort keys, most significant first; raises MlflowError."""
    orders: list[Order] = []
    for text in texts:
        match = _ORDER.fullmatch(text.strip())
        if match is None:
            raise invalid_parameter(f"Invalid order_by clause {text!r:.100}: write for example `metrics.loss ASC`")
        kind, key = _parse_key(match["kind"], match["key"])
        orders.append(Order(kind, key, (match["direction"] or "asc").lower() == "desc"))
    if len(orders) > MAX_ORDERS:
        raise invalid_parameter(f"order_by may have {MAX_ORDERS} keys; this one has {len(orders)}")
    return orders


def _parse_key(kind: str | None, key: str) -> tuple[str, str]:
    key = key.strip().strip('`"')
    if not _KEY.fullmatch(key) or clean_text(key) != key:
        raise invalid_parameter(f"Invalid key {key!r:.100}: a key has no quotes, backslashes or control characters")
    kind_name = "attributes" if kind is None else _KINDS.get(kind.lower())
    if kind_name is None:
        raise invalid_parameter(f"Invalid entity type {kind!r:.50}: one of {', '.join(sorted(_KINDS))}")
    if kind_name != "attributes":
        return kind_name, key
    if key not in _ATTRIBUTES:
        raise invalid_parameter(f"Invalid attribute key {key!r:.50}: one of {', '.join(sorted(_ATTRIBUTES))}")
    return kind_name, _ATTRIBUTES[key]


def _parse_value(text: str, kind: str, key: str, sign: str, value: str) -> float | str:
    """Parse the value of a comparison by the type of its key: a number or a text."""
    quoted = value[0] in "'\""
    if kind == "metrics" or (kind == "attributes" and key in ("start_time", "end_time")):
        if quoted:
            raise invalid_parameter(
                f"{kind}.{key} is a number: compare it with = != < <= > >= to a number, in {text!r:.300}"
            )
        try:
            return float(value)
        except ValueError:
            raise _refuse_filter(text) from None
    if not quoted or sign not in ("=", "!="):
        raise invalid_parameter(f"{kind}.{key} is a text: compare it with = != to a quoted text, in {text!r:.300}")
    return value[1:-1]


def _refuse_filter(text: str) -> Exception:
    return invalid_parameter(
        f"Invalid filter string {text!r:.300}: join comparisons such as tags.key = 'value', metrics.key > 0.5 or "
        "attributes.status = 'FINISHED' by AND"
    )


def clean_text(text: str) -> str:
    """The text without control characters and lone surrogates, which cannot be stored."""
    if text.isprintable():
        return text
    return "".join(
        character for character in text if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
    )
