"""Field types that request bodies and project settings share. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from evalstop_service.domain import decision_lifecycle
from evalstop_service.domain.statuses import DecisionOutcome


def doc(description: str) -> Meta:
    """The description of a record's field, from which answers and event schemas take it."""
    return Meta(description=description)


@dataclass(frozen=True, eq=False)
class Rule:
    """A check with its own error message, and the JSON Schema keywords that state it; used as type metadata."""

    check: Callable[[Any], Any]
    keywords: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), **self.keywords}


def remove_controls(text: str, kept: str = "") -> str:
    """The text without lone surrogates and control characters other than those kept: databases refuse some of them."""
    if text.isprintable():
        return text
    return "".join(sign for sign in text if sign in kept or unicodedata.category(sign) not in ("Cc", "Cs"))


def check_text(text: str) -> str:
    """The text; raises ValueError when it holds characters that cannot be displayed or stored."""
    if remove_controls(text, "\n\t") != text:
        raise ValueError("it must not contain control characters or unpaired surrogates")
    return text


def _integral(value: Any) -> Any:
    # In JSON, 120.0 and 120 are the same number.
    return int(value) if isinstance(value, float) and value.is_integer() else value


PLAIN = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$"
"""Text without control characters other than line feed and tab. JSON Schema cannot express unpaired surrogates, which
are not characters."""


def check_name(text: str) -> str:
    """The text as a name; raises ValueError if it is not a single line."""
    if "\n" in text or "\t" in text:
        raise ValueError("a name must be a single line without tabs")
    return check_text(text)


ON_ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Text without control characters."""

Plain = Rule(check_text, {"pattern": PLAIN})
Name = Annotated[str, Field(min_length=1, max_length=256), Rule(check_name, {"pattern": ON_ONE_LINE})]
Line = Annotated[str, Field(max_length=2000), Plain]
Integral = BeforeValidator(_integral)
"""Placed after an integer's bounds; accepts integers written with a decimal point."""
Mode = Annotated[decision_lifecycle.Mode, Field(strict=False)]  # a string in JSON
Outcome = Annotated[DecisionOutcome, Field(strict=False)]


MOST_UNKNOWN = 100
"""Unknown fields of an object that are refused one by one."""


class Body(BaseModel):
    """A request document: strict types, unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _name_fields(cls, document: Any) -> Any:
        """Refuse unknown fields in words that say which there are."""
        if not isinstance(document, dict) or document.keys() <= cls.__pydantic_fields__.keys():
            return document
        fault = PydanticCustomError(
            "extra_forbidden",
            "there is no such field; the fields are {fields}",
            {"fields": ", ".join(cls.model_fields)},
        )
        unknown = [name for name in document if name not in cls.model_fields][:MOST_UNKNOWN]
        errors = [InitErrorDetails(type=fault, loc=(name,), input=None) for name in unknown]
        raise ValidationError.from_exception_data(cls.__name__, errors)
