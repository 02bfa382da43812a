"""MLflow's filter expressions and orders, over runs, experiments and models. Pure.

    metrics.accuracy > 0.8 AND params.optimizer LIKE 'ada%' AND status IN ('RUNNING', 'FINISHED')

Comparisons joined by AND. Unknown syntax is an error, because ignoring it would select too much.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from evalstop_service.web.mlflow.errors import invalid_parameter

Fields = Mapping[str, Mapping[str, Any]]
"""The comparable fields of an item, by kind (attributes, tags, params, metrics) and name."""

T = TypeVar("T")

LONGEST_PATTERN, LONGEST_COMPARED = 500, 8000
"""Characters of a LIKE pattern, and those at the start of a value that are compared with it. A comparison takes up to
their product, and a regular expression lets no other thread compute meanwhile."""

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
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "like": lambda value, pattern: pattern.fullmatch(value[:LONGEST_COMPARED]) is not None,
    "ilike": lambda value, pattern: pattern.fullmatch(value[:LONGEST_COMPARED]) is not None,
    "not like": lambda value, pattern: pattern.fullmatch(value[:LONGEST_COMPARED]) is None,
    "not ilike": lambda value, pattern: pattern.fullmatch(value[:LONGEST_COMPARED]) is None,
    "in": lambda value, values: value in values,
    "not in": lambda value, values: value not in values,
}


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
        **{name: name for name in ("artifact_uri", "experiment_id", "lifecycle_stage")},
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

MODELS = Language(
    attributes={
        **{name: name for name in ("name", "model_id", "model_type", "status", "source_run_id")},
        **{name: name for name in ("creation_timestamp", "last_updated_timestamp", "artifact_location")},
        "creation_time": "creation_timestamp",
    },
    numbers=frozenset({"creation_timestamp", "last_updated_timestamp"}),
    kinds={**_KINDS, **dict.fromkeys(("param", "params"), "params"), **dict.fromkeys(("metric", "metrics"), "metrics")},
)


class Clause(NamedTuple):
    """Compares `key` of `kind` to `value` with the operator `sign`."""

    kind: str
    key: str
    sign: str
    value: Any


class Order(NamedTuple):
    """Sort by `key` of the `kind`."""

    kind: str
    key: str
    descending: bool


def parse_filter(text: str, language: Language) -> list[Clause]:
    """The clauses of a filter; raises MlflowError."""
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
    return clauses


def parse_orders(texts: Iterable[str], language: Language) -> list[Order]:
    """The sort keys, most significant first; raises MlflowError."""
    orders = []
    for text in texts:
        match = _ORDER.fullmatch(text.strip())
        if match is None:
            raise invalid_parameter(f"Invalid order_by clause {text!r:.100}: write for example `metrics.loss ASC`")
        kind, key = _parse_key(match["kind"], match["key"], language)
        orders.append(Order(kind, key, (match["direction"] or "asc").lower() == "desc"))
    return orders


def matches(clauses: Sequence[Clause], fields: Fields) -> bool:
    """Whether all clauses hold. As in MLflow, an item without a key matches no comparison with it."""
    return all(_clause_holds(clause, fields.get(clause.kind, {}).get(clause.key)) for clause in clauses)


def sort(items: list[T], orders: Sequence[Order], fields_of: Callable[[T], Fields]) -> list[T]:
    """Sort the items; those without a value come last, after NaN."""
    for kind, key, descending in reversed(orders):
        valued: list[tuple[Any, T]] = [(fields_of(item).get(kind, {}).get(key), item) for item in items]
        present = [(value, item) for value, item in valued if value is not None and value == value]
        present.sort(key=lambda pair: pair[0], reverse=descending)
        nans = [item for value, item in valued if value != value]
        items = [item for _, item in present] + nans + [item for value, item in valued if value is None]
    return items


def names_metrics(clauses: Sequence[Clause], orders: Sequence[Order]) -> bool:
    """Whether metrics have to be loaded."""
    return any(kind == "metrics" for kind, *_ in (*clauses, *orders))


def _clause_holds(clause: Clause, value: Any) -> bool:
    if clause.sign == "null":
        return value is None
    if clause.sign == "not null":
        return value is not None
    return value is not None and _COMPARISONS[clause.sign](value, clause.value)


def _parse_key(kind: str | None, key: str, language: Language) -> tuple[str, str]:
    key = key.strip().strip('`"')
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
        return frozenset(part[1:-1] for part in re.findall(_TEXT, value))
    if not quoted or sign in ("<", "<=", ">", ">="):
        raise invalid_parameter(
            f"{kind}.{key} is a text: compare it with = != LIKE ILIKE IN to a quoted text, in {text!r:.300}"
        )
    return _parse_pattern(value[1:-1], sign) if "like" in sign else value[1:-1]


def _parse_float(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise _refuse_filter(text) from None


def _parse_pattern(value: str, sign: str) -> re.Pattern[str]:
    """A LIKE pattern: `%` matches any text, `_` any character."""
    if len(value) > LONGEST_PATTERN:
        raise invalid_parameter(f"A LIKE pattern may have {LONGEST_PATTERN} characters; this one has {len(value)}")
    wildcards = {"%": "*", "_": "?", "*": "[*]", "?": "[?]", "[": "[[]"}
    # In fnmatch's regular expressions the number of wildcards does not matter.
    expression = fnmatch.translate("".join(wildcards.get(character, character) for character in value))
    return re.compile(expression, re.IGNORECASE if "ilike" in sign else re.NOFLAG)


def _refuse_filter(text: str) -> Exception:
    return invalid_parameter(
        f"Invalid filter string {text!r:.300}: join comparisons such as tags.key = 'value', params.key LIKE 'a%', "
        "metrics.key > 0.5 or attributes.status IN ('RUNNING', 'FINISHED') by AND"
    )
