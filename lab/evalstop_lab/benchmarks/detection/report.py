"""The tables and the plot of `make bench-detection`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from evalstop_lab.report import format_number, save_figure
from evalstop_lab.worlds import LEVELS

Curves = dict[str, dict[str, list[tuple[float, float]]]]
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]

LEAST_DRAWN = 1e-3
_OWN_POINTS = 2  # a contender with at most this many points is plotted without a line
_COLORS = tuple(matplotlib.colors.to_hex(matplotlib.colormaps["tab20"](index)) for index in range(20))


def print_tables(console: Console, report: dict[str, Any]) -> None:
    rows, setting = report["rows"], report["setting"]
    console.print(_build_summary_table(f"{setting['runs']} runs, half of them hacking", rows))
    console.print(_build_noise_table(rows))
    for title, part in (
        ("unknown length: the same runs without planned lengths", "unplanned"),
        ("second suite: runs by an author who knew neither detectors nor families", "second_suite"),
    ):
        columns = (*_SHARES, *_number_columns(premature=3, delay=0, delay_to_bound=2))
        console.print(_build_table(title, [row | row[part] for row in rows if row[part]], columns))
    console.print(_build_checkpoints_table(report["checkpoints"]))
    if setting["recorded_runs"]:
        title = f"{setting['recorded_runs']} recorded runs, without ambiguous ones"
        columns = (*_SHARES, *_number_columns(precision=2, premature=2, delay=0, eval_lost=3))
        console.print(_build_table(title, [row | row["recorded"] for row in rows], columns))


def _build_summary_table(title: str, rows: Sequence[Row]) -> Table:
    columns = (
        *_SHARES,
        _share_column("false_stops_held_out", "in held-out families"),
        *_number_columns(precision=2, premature=3, delay=0, delay_p90=0, delay_to_bound=2, eval_lost=3),
    )
    return _build_table(title, rows, columns)


def _build_noise_table(rows: Sequence[Row]) -> Table:
    columns = [(f"{level:g}", lambda row, key=f"{level:g}": _format_noise(row["by_noise"][key])) for level in LEVELS]
    table = _build_table("by noise as a share of the gain", rows, columns)
    table.caption = "recall, median delay in evals (90th percentile) / median lower bound"
    return table


def _build_table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """One row per contender and operating point."""
    table = Table("", "at", title=title)
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["contender"], row["at"], *(write(row) for _, write in columns))
    return table


def _build_checkpoints_table(losses: dict[str, dict[str, Any]]) -> Table:
    table = Table("", title="loss of the chosen checkpoint, as a share of the gain, by noise")
    for level in LEVELS:
        table.add_column(f"{level:g}", justify="right")
    for name, by_noise in losses.items():
        table.add_row(name, *(format_number(by_noise[f"{level:g}"]["value"], 4) for level in LEVELS))
    return table


def _number_columns(**digits: int) -> list[Column]:
    """A column for each field, with this number of digits."""
    return [_number_column(field, count) for field, count in digits.items()]


def _number_column(field: str, digits: int) -> Column:
    return field.replace("_", " "), lambda row: format_number(row[field]["value"], digits)


def _share_column(field: str, heading: str | None = None) -> Column:
    def write(row: Row) -> str:
        share = row[field]
        return f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}]" if share["n"] else "-"

    return heading or field.replace("_", " "), write


_SHARES = (_share_column("recall"), _share_column("false_stops"))


def _format_noise(cell: dict[str, Any]) -> str:
    delay, p90, bound = (format_number(cell[field]["value"], 0) for field in ("delay", "delay_p90", "bound"))
    return f"{format_number(cell['recall']['value'], 2)}  {delay} ({p90}) / {bound}"


def draw_roc(path: Path, curves: Curves) -> None:
    """Plot recall against false stops, one panel per level of noise."""
    with save_figure(path, (14, 8.5), 2, 3, sharex=True, sharey=True) as axes:
        for axis, level in zip(axes.flat, LEVELS, strict=True):
            for (name, by_noise), color in zip(curves.items(), itertools.cycle(_COLORS)):
                x, y = zip(*by_noise[f"{level:g}"], strict=True)
                line = "-" if len(x) > _OWN_POINTS else "o"
                axis.plot([max(item, LEAST_DRAWN) for item in x], y, line, color=color, label=name, markersize=6)
            axis.set(xscale="log", title=f"noise {level:g} of the gain")
            axis.axvline(0.01, color="#999999", linewidth=0.8)
        for axis in axes[-1]:
            axis.set_xlabel(f"false stops per healthy run (none: at {LEAST_DRAWN})")
        for axis in axes[:, 0]:
            axis.set_ylabel("recall")
        axes[0, 0].figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
