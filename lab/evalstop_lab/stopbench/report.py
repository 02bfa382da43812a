"""The table and the plots of StopBench."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from evalstop_lab.report import format_figure, format_number, format_percent, new_table, save_figure, show_percent
from evalstop_lab.worlds import World

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


def draw_runs(path: Path, worlds: Sequence[World], stops: Sequence[Mapping[str, int | None]]) -> None:
    """Plot runs, one panel each: evals, truth and proxy; `stops` are the steps at which each rule stops each run."""
    columns = min(3, len(worlds))
    rows = -(-len(worlds) // columns)
    with save_figure(path, (4.6 * columns, 3.1 * rows + 0.4), rows, columns) as axes:
        for axis in axes.flat[len(worlds) :]:
            axis.set_axis_off()
        for axis, world, by_rule in zip(axes.flat, worlds, stops, strict=False):
            proxy = axis.twinx()
            proxy.plot(world.steps, world.proxy, color="0.7", linewidth=1.0)
            proxy.set_yticks([])
            axis.set_zorder(1)  # above the proxy
            axis.patch.set_visible(False)
            axis.errorbar(
                world.steps, world.eval_scores, world.eval_stderr, fmt=".", color="C0", alpha=0.5, label="eval"
            )
            axis.plot(world.steps, world.truth.eval_scores, color="C0", label="true score")
            axis.plot([], [], color="0.7", label="proxy (own scale)")
            for index, (rule, stop) in enumerate(by_rule.items()):
                dashes = (5 * index, (5, 5 * max(1, len(by_rule) - 1)))  # stops at the same step show in turns
                axis.axvline(math.nan if stop is None else stop, color=f"C{index + 1}", linestyle=dashes, label=rule)
            axis.set_title(f"{world.name}: {world.truth.label}", fontsize=9)
            axis.set_xlabel("step", fontsize=8)
            axis.tick_params(labelsize=8)
        axes[0][0].figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6)


def _compute_errors(figure: Mapping[str, float]) -> list[list[float]]:
    """The distances from the value to both ends of its interval."""
    below, above = figure["value"] - figure["low"], figure["high"] - figure["value"]
    return [[max(0.0, below)], [max(0.0, above)]]
