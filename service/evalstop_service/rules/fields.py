"""Field types that request bodies and project settings share. Pure."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from evalstop_service.rules import decision_lifecycle
from evalstop_service.rules.statuses import DecisionOutcome


def check_text(text: str) -> str:
    """The text; raises ValueError when it holds characters that cannot be displayed or stored."""
    if any(unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t" for character in text):
        raise ValueError("it may hold no control characters and no half surrogate pairs")
    return text


def _integral(value: Any) -> Any:
    # In JSON 120.0 and 120 are the same number.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Plain = AfterValidator(check_text)
Name = Annotated[str, Field(min_length=1, max_length=256), Plain]
Line = Annotated[str, Field(max_length=2000), Plain]
Whole = Annotated[int, BeforeValidator(_integral)]
Mode = Annotated[decision_lifecycle.Mode, Field(strict=False)]  # a word in JSON
Outcome = Annotated[DecisionOutcome, Field(strict=False)]


class Body(BaseModel):
    """A document that a user sends: strict types, unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Role(Body):
    """The role a metric plays for a run."""

    role: Literal["eval", "proxy", "kl", "loss"]
    direction: Literal["maximize", "minimize"] | None = Field(
        None, description="what is better; by default eval and proxy are maximized, kl and loss minimized"
    )
