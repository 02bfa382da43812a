"""Formats the output of commands: tables, percentages, changes with their intervals, and JSON."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evalstop_lab.worlds.scoring import Figure


def new_table(title: str | None, *headings: str, left: int = 1, caption: str | None = None) -> Table:
    """A table without rows; the first `left` columns are left-aligned text, the others right-aligned numbers."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right")
    return table


def format_percent(share: float, digits: int = 1, *, sign: bool = False) -> str:
    """Format a share as a percentage, with `sign` also if positive: 0.4704 is `47.0 %`, NaN is `-`."""
    return "-" if math.isnan(share) else f"{share * 100:{'+' if sign else ''}.{digits}f} %"


def format_number(value: float, digits: int) -> str:
    """Format a number with this many decimals; NaN and the infinities are `-`."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def format_interval(low: float, high: float, digits: int = 1, *, sign: bool = False) -> str:
    """Format an interval of shares, to follow a percentage: `[4.5, 5.3]`."""
    ends = (format_percent(end, digits, sign=sign).removesuffix(" %") for end in (low, high))
    return f"[{', '.join(ends)}]"


def format_figure(figure: Figure | Mapping[str, float], digits: int = 1, *, sign: bool = False) -> str:
    """Format a share or a relative change with its interval, in percent: `47.0 % [44.8, 49.3]`; NaN is `-`."""
    values = vars(figure) if isinstance(figure, Figure) else figure
    if math.isnan(values["value"]):
        return "-"
    interval = format_interval(values["low"], values["high"], digits, sign=sign)
    return f"{format_percent(values['value'], digits, sign=sign)} {interval}"


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


def print_suite(console: Console, name: str, result: Mapping[str, Any]) -> None:
    """Print a table with one row per rule; intervals are 95 %."""
    runs = next(iter(result.values()))["runs"]
    table = new_table(
        f"{name}: {runs} runs",
        *("rule", "recall", "cliffs", "false stops", "premature", "delay", "delay / bound", "saved", "eval lost"),
        caption="cliffs: sudden falls after which it stopped within six evals; eval lost: of the gain\n"
        "saved: share of the evals after the peaks, minus those lost by wrong stops",
    )
    by_saved = sorted(
        result.items(), key=lambda item: np.nan_to_num(item[1]["saved"]["value"], nan=-math.inf), reverse=True
    )
    for rule, figures in by_saved:
        table.add_row(
            rule,
            format_figure(figures["recall"]),
            format_figure(figures["cliffs"]),
            format_figure(figures["false_stops"]),
            format_percent(figures["premature"]["value"]),
            format_number(figures["delay"]["value"], 0),
            format_number(figures["delay_to_bound"]["value"], 1),
            format_figure(figures["saved"]),
            format_percent(figures["eval_lost"]["value"]),
        )
    console.print(table)
