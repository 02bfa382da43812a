"""Describes what a type allows, for error messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from msgspec import inspect


def allowed_at(struct: type[Any], path: Sequence[str | int]) -> str:
    """The values allowed at this location of a document of the struct; for an unknown key, the known keys."""
    kind: inspect.Type = inspect.type_info(struct)
    for step in path:
        if isinstance(kind, inspect.UnionType):
            kind = next((item for item in kind.types if isinstance(item, inspect.StructType)), kind)
        if isinstance(kind, inspect.ListType) and isinstance(step, int):
            kind = kind.item_type
        elif isinstance(kind, inspect.StructType):
            field = next((field for field in kind.fields if field.encode_name == step), None)
            if field is None:
                break
            kind = _without_description(field.type)
    return _keys(kind) if isinstance(kind, inspect.StructType) else _words(kind)


def _keys(kind: inspect.StructType) -> str:
    return ", ".join(f"{field.encode_name} ({_words(field.type)})" for field in kind.fields)


def _words(kind: inspect.Type) -> str:
    match _without_description(kind):
        case inspect.IntType(ge=ge, le=le):
            return f"whole number from {ge} to {le}"
        case inspect.FloatType(gt=gt, ge=ge, lt=lt, le=le):
            low = f"number > {gt:g}" if gt is not None else "number" if ge is None else f"number >= {ge:g}"
            high = f" and < {lt:g}" if lt is not None else f" and <= {le:g}" if le is not None else ""
            return low if le == sys.float_info.max else low + high
        case inspect.EnumType(cls=cls):
            return "one of " + ", ".join(cls)
        case inspect.LiteralType(values=values):
            return " or ".join(f'"{value}"' for value in values)
        case inspect.UnionType(types=types):
            return " or ".join(_words(item) for item in types)
        case inspect.ListType(item_type=inspect.StructType() as item):
            return f"list of objects of {_keys(item)}"
        case inspect.ListType(item_type=item):
            return f"list of {_words(item)}"
        case inspect.StructType() as struct:
            return f"object of {_keys(struct)}"
        case inspect.StrType(pattern=str(pattern)):
            return f"text that matches {pattern}"
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "null"
        case inspect.DictType():
            return "object"
        case _:
            return "text"


def _without_description(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind
