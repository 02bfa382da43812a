"""The table and the plots of StopBench."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from evalstop_lab.report import format_figure, format_number, format_percent, new_table, save_figure, show_percent

MARKERS = "osD^vP*X<>h"

Results = Mapping[str, Mapping[str, Any]]


def print_suite(console: Console, name: str, result: Mapping[str, Any]) -> None:
    """Print a table with one row per rule; intervals are 95 %."""
    runs = next(iter(result.values()))["runs"]
    table = new_table(
        f"{name}: {runs} runs",
        *("rule", "recall", "false stops", "premature", "delay", "delay / bound", "saved", "eval lost"),
        caption="saved: share of the evals after the peaks, minus those lost by wrong stops; eval lost: of the gain",
    )
    by_saved = sorted(result.items(), key=lambda item: np.nan_to_num(-item[1]["saved"]["value"], nan=math.inf))
    for rule, figures in by_saved:
        table.add_row(
            rule,
            format_figure(figures["recall"]),
            format_figure(figures["false_stops"]),
            format_percent(figures["premature"]["value"]),
            format_number(figures["delay"]["value"], 0),
            format_number(figures["delay_to_bound"]["value"], 1),
            format_figure(figures["saved"]),
            format_percent(figures["eval_lost"]["value"]),
        )
    console.print(table)


def draw_scatter(path: Path, results: Results) -> None:
    """Plot recall and the saved share against false stops, one column per suite."""
    with save_figure(path, (5 * len(results) + 3, 8), 2, len(results), sharex=True, sharey="row") as axes:
        for column, (suite, result) in enumerate(results.items()):
            for row, (field, label) in enumerate((("recall", "recall"), ("saved", "share of an oracle's saving"))):
                axis = axes[row][column]
                for (rule, figures), marker in zip(result.items(), itertools.cycle(MARKERS)):
                    x, y = figures["false_stops"], figures[field]
                    if math.isnan(x["value"]) or math.isnan(y["value"]):
                        continue
                    axis.errorbar(
                        x["value"],
                        y["value"],
                        _compute_errors(y),
                        _compute_errors(x),
                        marker,
                        label=rule,
                        elinewidth=0.7,
                    )
                show_percent(axis.xaxis, axis.yaxis)
                axis.set_title(suite if row == 0 else "")
                axis.grid(alpha=0.3)
                if column == 0:
                    axis.set_ylabel(label)
            axes[1][column].set_xlabel("healthy runs stopped")
        axes[1][0].set_ylim(bottom=-1)
        axes[0][0].figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)


def _compute_errors(figure: Mapping[str, float]) -> list[list[float]]:
    """The distances from the value to both ends of its interval."""
    below, above = figure["value"] - figure["low"], figure["high"] - figure["value"]
    return [[max(0.0, below)], [max(0.0, above)]]
