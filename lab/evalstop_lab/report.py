"""Formats the output of commands: tables, percentages, changes with their intervals, and JSON."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from evalstop_lab.worlds.scoring import Figure


def new_table(title: str | None, *headings: str, left: int = 1, caption: str | None = None) -> Table:
    """A table without rows; the first `left` columns are left-aligned text, the others right-aligned numbers."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right")
    return table


def format_percent(share: float, digits: int = 1) -> str:
    """Format a share as a percentage: 0.4704 is `47.0 %`, NaN is `-`."""
    return "-" if math.isnan(share) else f"{share * 100:.{digits}f} %"


def format_number(value: float, digits: int) -> str:
    """Format a number with this many decimals; NaN and the infinities are `-`."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def format_figure(figure: Figure | Mapping[str, float], digits: int = 1) -> str:
    """Format a share or a relative change with its interval, in percent: `47.0 % [44.8, 49.3]`; NaN is `-`."""
    values = vars(figure) if isinstance(figure, Figure) else figure
    value, low, high = (format_percent(values[name], digits) for name in ("value", "low", "high"))
    return value if value == "-" else f"{value} [{low.removesuffix(' %')}, {high.removesuffix(' %')}]"


def list_versions() -> dict[str, str]:
    """The versions of packages on which a figure may depend."""
    names = ("evalstop-detectors", "evalstop-lab", "numpy", "river")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def to_json_values(value: Any) -> Any:
    """Convert to values that JSON has: NaN and the infinities to null, keys to strings."""
    if isinstance(value, Mapping):
        return {str(key): to_json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
