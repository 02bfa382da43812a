"""MLflow's filter expressions and orders, over runs and experiments. Pure; `store.mlflow` runs them in SQL.

    metrics.accuracy > 0.8 AND params.optimizer LIKE 'ada%' AND status IN ('RUNNING', 'FINISHED')

Comparisons joined by AND. Unknown syntax is an error, because ignoring it would select too much.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evalstop_service.store.mlflow import Clause, Order
from evalstop_service.web.mlflow.protocol import invalid_parameter

LONGEST_PATTERN = 500
"""Characters of a LIKE pattern."""
MAX_CLAUSES, MAX_PATTERNS, MAX_ORDERS = 20, 5, 5
"""Comparisons in a filter, those of them that are LIKE or ILIKE, and sort keys: each is computed for every run."""

_CLAUSE = re.compile(
    r"\s*(?:(?P<kind>[a-z_]+)\s*\.\s*)?(?P<key>`[^`]+`|\"[^\"]+\"|[\w.\-/]+?)\s*"
    r"(?:(?P<sign><=|>=|!=|=|<|>)\s*|\s(?P<word>(?:not\s+)?(?:i?like|in))\s*)"
    r"(?P<value>'[^']*'|\"[^\"]*\"|-?[0-9][0-9.eE+\-]*|\([^()]*\))\s*"
    r"|\s*(?:(?P<null_kind>[a-z_]+)\s*\.\s*)?(?P<null_key>`[^`]+`|\"[^\"]+\"|[\w.\-/]+?)\s+is\s+(?P<null>(?:not\s+)?null)\s*",
    re.IGNORECASE,
)
_AND = re.compile(r"and\b", re.IGNORECASE)
_TEXT = r"(?:'[^']*'|\"[^\"]*\")"
_LIST = re.compile(rf"\(\s*{_TEXT}\s*(?:,\s*{_TEXT}\s*)*(?:,\s*)?\)")
_ORDER = re.compile(
    r"(?:(?P<kind>[a-z_]+)\s*\.\s*)?(?P<key>`[^`]+`|\"[^\"]+\"|[\w.\-/]+(?: +[\w.\-/]+)*?)"
    r"(?:\s+(?P<direction>asc|desc))?",
    re.IGNORECASE,
)
_KEY = re.compile(r"[^\"`\\]+")
"""What a key may consist of: others could end the path by which SQLite finds a member of a document."""


@dataclass(frozen=True)
class Language:
    """The names allowed in a filter. `attributes`: each spelling and its attribute; `numbers`: the numeric ones."""

    attributes: Mapping[str, str]
    numbers: frozenset[str]
    kinds: Mapping[str, str] = field(default_factory=dict)


_KINDS = {**dict.fromkeys(("attribute", "attributes", "attr"), "attributes"), **dict.fromkeys(("tag", "tags"), "tags")}

RUNS = Language(
    attributes={
        **{name: name for name in ("run_id", "run_name", "status", "start_time", "end_time", "user_id")},
        **{name: name for name in ("experiment_id", "lifecycle_stage")},
        **dict.fromkeys(("run name", "Run name", "Run Name", "name"), "run_name"),
        **dict.fromkeys(("created", "Created"), "start_time"),
    },
    numbers=frozenset({"start_time", "end_time"}),
    kinds={
        **_KINDS,
        "run": "attributes",
        **dict.fromkeys(("param", "params", "parameter", "parameters"), "params"),
        **dict.fromkeys(("metric", "metrics"), "metrics"),
    },
)

EXPERIMENTS = Language(
    attributes={name: name for name in ("name", "experiment_id", "creation_time", "last_update_time")},
    numbers=frozenset({"creation_time", "last_update_time"}),
    kinds=_KINDS,
)


def parse_filter(text: str, language: Language) -> list[Clause]:
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
        kind, key = _parse_key(match["kind"] or match["null_kind"], match["key"] or match["null_key"], language)
        if match["null"]:
            clauses.append(Clause(kind, key, " ".join(match["null"].lower().split()), None))
        else:
            sign = " ".join((match["sign"] or match["word"]).lower().split())
            clauses.append(Clause(kind, key, sign, _parse_value(text, kind, key, sign, match["value"], language)))
        at = match.end()
    patterns = sum(clause.sign.endswith("like") for clause in clauses)
    if len(clauses) > MAX_CLAUSES or patterns > MAX_PATTERNS:
        raise invalid_parameter(
            f"a filter may have {MAX_CLAUSES} comparisons, {MAX_PATTERNS} of them LIKE or ILIKE; "
            f"this one has {len(clauses)}, {patterns} of them LIKE or ILIKE"
        )
    return clauses


def parse_orders(texts: Iterable[str], language: Language) -> list[Order]:
    """The sort keys, most significant first; raises MlflowError."""
    orders: list[Order] = []
    for text in texts:
        match = _ORDER.fullmatch(text.strip())
        if match is None:
            raise invalid_parameter(f"Invalid order_by clause {text!r:.100}: write for example `metrics.loss ASC`")
        kind, key = _parse_key(match["kind"], match["key"], language)
        orders.append(Order(kind, key, (match["direction"] or "asc").lower() == "desc"))
    if len(orders) > MAX_ORDERS:
        raise invalid_parameter(f"order_by may have {MAX_ORDERS} keys; this one has {len(orders)}")
    return orders


def _parse_key(kind: str | None, key: str, language: Language) -> tuple[str, str]:
    key = key.strip().strip('`"')
    if not _KEY.fullmatch(key) or clean_text(key) != key:
        raise invalid_parameter(f"Invalid key {key!r:.100}: a key has no quotes, backslashes or control characters")
    kind_name = "attributes" if kind is None else language.kinds.get(kind.lower())
    if kind_name is None:
        raise invalid_parameter(f"Invalid entity type {kind!r:.50}: one of {', '.join(sorted(language.kinds))}")
    if kind_name != "attributes":
        return kind_name, key
    if key not in language.attributes:
        raise invalid_parameter(f"Invalid attribute key {key!r:.50}: one of {', '.join(sorted(language.attributes))}")
    return kind_name, language.attributes[key]


def _parse_value(text: str, kind: str, key: str, sign: str, value: str, language: Language) -> Any:
    """Parse the value of a comparison by the type of its key: a number, a text, a pattern or a list of texts."""
    number = kind == "metrics" or (kind == "attributes" and key in language.numbers)
    quoted = value[0] in "'\""
    if number:
        if quoted or value[0] == "(" or sign not in ("=", "!=", "<", "<=", ">", ">="):
            raise invalid_parameter(
                f"{kind}.{key} is a number: compare it with = != < <= > >= to a number, in {text!r:.300}"
            )
        return _parse_float(value, text)
    if sign in ("in", "not in"):
        if not _LIST.fullmatch(value):
            raise _refuse_filter(text)
        return [part[1:-1] for part in re.findall(_TEXT, value)]
    if not quoted or sign in ("<", "<=", ">", ">="):
        raise invalid_parameter(
            f"{kind}.{key} is a text: compare it with = != LIKE ILIKE IN to a quoted text, in {text!r:.300}"
        )
    if "like" in sign and len(value) - 2 > LONGEST_PATTERN:
        raise invalid_parameter(f"A LIKE pattern may have {LONGEST_PATTERN} characters; this one has {len(value) - 2}")
    return value[1:-1]


def _parse_float(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise _refuse_filter(text) from None


def _refuse_filter(text: str) -> Exception:
    return invalid_parameter(
        f"Invalid filter string {text!r:.300}: join comparisons such as tags.key = 'value', params.key LIKE 'a%', "
        "metrics.key > 0.5 or attributes.status IN ('RUNNING', 'FINISHED') by AND"
    )


def clean_text(text: str) -> str:
    """The text without control characters and lone surrogates, which cannot be stored."""
    if text.isprintable():
        return text
    return "".join(
        character for character in text if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
    )
