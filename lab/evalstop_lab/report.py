"""What commands print: tables of figures, changes with their intervals, and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from evalstop_lab.worlds.scoring import Figure


def new_table(title: str, *headings: str, left: int = 1, caption: str | None = None) -> Table:
    """A table without rows, of which the first `left` columns hold text and the others numbers."""
    table = Table(title=title, caption=caption)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right")
    return table


def format_percent(share: float, digits: int = 1, *, sign: bool = False) -> str:
    """A share of 1 as a percentage, with its sign if asked for: 0.4704 is `47.0 %`."""
    return f"{share * 100:{'+' if sign else ''}.{digits}f} %"


def format_change(change: Figure | Mapping[str, float]) -> str:
    """A relative change with its interval, in percent and with its sign."""
    found = vars(change) if isinstance(change, Figure) else change
    value, low, high = (format_percent(found[name], sign=True) for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def to_json_values(value: Any) -> Any:
    """The same with null for NaN and the infinities, which JSON does not have, and with text for keys."""
    if isinstance(value, Mapping):
        return {str(key): to_json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
