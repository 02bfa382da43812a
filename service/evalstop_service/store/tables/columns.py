"""Builds the tables from the records that their rows are read as: a column is declared once, as a field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)


class UtcTime(sa.TypeDecorator[datetime]):
    """A moment in UTC; SQLite drops the time zone, so it is restored."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def moment_text(moment: datetime) -> str:
    """A moment in the text form that SQLite stores."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


class EnumText(sa.TypeDecorator[Any]):
    """A text column with the values of an enum."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__()
        self.kind = kind

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        return None if value is None else self.kind(value)


class StructJson(sa.TypeDecorator[Any]):
    """A value as a JSON document; None is NULL. Unknown fields of structs are skipped."""

    impl = sa.JSON
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__(none_as_null=True)
        self.kind = kind

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        """A value compared with a part of the document is not itself such a document."""
        return self.impl_instance.coerce_compared_value(op, value)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        return msgspec.to_builtins(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        return None if value is None else msgspec.convert(value, self.kind)


class Real(sa.TypeDecorator[float]):
    """A double that may be NaN. SQLite turns NaN into NULL, so NULL stands for NaN in both databases."""

    impl = sa.Double
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: sa.Dialect) -> float | None:
        return None if value is None or math.isnan(value) else value

    def process_result_value(self, value: float | None, dialect: sa.Dialect) -> float:
        return math.nan if value is None else value


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> sa.Index:
    """An index of the rows that meet a condition, in both databases."""
    condition = sa.text(where)
    return sa.Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def of_run() -> sa.Column[Any]:
    """The id of the run that a row belongs to."""
    return sa.Column("run_id", sa.Uuid, sa.ForeignKey("runs.id"))


def part_of(parent: str, column: str) -> tuple[sa.schema.SchemaItem, ...]:
    """The ids of the run and of the row of `parent` that a row belongs to, the latter as `column`."""
    return (
        sa.Column("run_id", sa.Uuid),
        sa.Column(column, sa.Uuid, nullable=False),
        sa.ForeignKeyConstraint(["run_id", column], [f"{parent}.run_id", f"{parent}.id"]),
    )


def make_table(
    name: str,
    record: type,
    *more: sa.schema.SchemaItem,
    key: str = "id",
    without: str = "",
    refers: str = "",
    defaults: Mapping[str, str] | None = None,
    **options: Any,
) -> sa.Table:
    """A table with a column for each field of the record that its rows are read as.

    `more`: indexes, constraints, columns that the record does not have, and those of another type than its field.
    `key`: the columns of the primary key, in order. `without`: fields that are read from other tables. `refers`: the
    columns with ids of rows elsewhere, such as `project_id`. `defaults`: those of the database.
    """
    own = {item.name for item in more if isinstance(item, sa.Column)}
    columns = [
        sa.Column(
            field,
            _find_type(field, hint),
            *([sa.ForeignKey(_PARENTS[field])] if field in refers.split() else []),
            nullable=NoneType in get_args(hint),
            server_default=(defaults or {}).get(field),
        )
        for field, hint in get_type_hints(record).items()
        if field not in own and field not in without.split()
    ]
    return sa.Table(name, metadata, *columns, *more, sa.PrimaryKeyConstraint(*key.split()), **options)


def columns_of(table: sa.Table, record: type) -> list[sa.Column[Any]]:
    """The columns of a table that a record has as fields, in the order of these."""
    return [table.c[field] for field in get_type_hints(record) if field in table.c]


_PARENTS = {
    "project_id": "projects.id",
    "policy_id": "policies.id",
    "run_id": "runs.id",
    "experiment_id": "experiments.id",
}

_TYPES: dict[Any, Any] = {
    **{UUID: sa.Uuid, str: sa.Text, bool: sa.Boolean, float: sa.Double, datetime: UtcTime},
    **{dict[str, Any]: sa.JSON(none_as_null=True)},
}


def _find_type(field: str, hint: Any) -> Any:
    """The type of the column for a field."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if hint is int:  # a trainer's steps may be any number; what the service counts is small
        return sa.BigInteger if field.endswith(("step", "steps")) else sa.Integer
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return EnumText(hint)
    return _TYPES.get(hint) or StructJson(hint)


def prepare_structs() -> None:
    """Let msgspec build what it needs to decode each struct that has been defined so far.

    Otherwise it does so when a struct is decoded first, and if two threads do that at the same time, the process ends
    with a segmentation fault (msgspec 0.22): one of them uses what the other has not finished. All structs take 20 ms.
    """
    for struct in iterate_structs():
        with suppress(TypeError):  # it has a field that cannot be decoded, so nobody decodes it
            msgspec.json.Decoder(struct)


def iterate_structs(base: type[msgspec.Struct] = msgspec.Struct) -> Iterator[type[msgspec.Struct]]:
    """All structs that have been defined so far."""
    for struct in base.__subclasses__():
        yield struct
        yield from iterate_structs(struct)
