"""Draws the plots of `evalstop-lab cluster` as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalstop_lab.figure import save_figure, show_percent

SMALLEST = 1e-3

OURS, PAPERS = "#3b6fb6", "#b7791f"


def plot_reproduce(folder: Path, report: dict[str, Any]) -> None:
    """Write reproduce.png: the change of the mean time of all, healthy and hacking jobs, by scheduler."""
    changes = report["changes"]
    with save_figure(folder / "reproduce.png", (10, 4.6)) as axes:
        axis = axes[0, 0]
        for offset, (quantity, color) in enumerate(
            (("mean time", OURS), ("of healthy jobs", "#5a9e6f"), ("of hacking jobs", "#c53030"))
        ):
            bars = [changes[name][quantity]["change"] for name in changes]
            places = [place + 0.27 * (offset - 1) for place in range(len(bars))]
            values, errors = [item["value"] for item in bars], _compute_errors(bars)
            axis.bar(places, values, 0.25, color=color, label=quantity, yerr=errors, capsize=2, ecolor="#333333")
        axis.axhspan(-0.25, -0.09, color=PAPERS, alpha=0.12, label="the paper, all jobs: -9 to -25 %")
        axis.set_xticks(range(len(changes)), changes)
        show_percent(axis.yaxis)
        axis.set_ylabel("change of the mean time to completion")
        axis.legend(fontsize=8)


def plot_frontier(folder: Path, report: dict[str, Any]) -> None:
    """Write frontier.png: the share of the oracle's saving against false stops, one panel per world."""
    worlds = list(report["worlds"])
    columns = min(len(worlds), 4)
    rows = -(-len(worlds) // columns)
    with save_figure(folder / "frontier.png", (3.4 * columns, 3.1 * rows), rows, columns, sharey=True) as axes:
        for axis, world in zip(axes.flat, worlds, strict=False):
            points = [item for item in report["points"] if item["world"] == world]
            for number, item in enumerate(points):
                shipped = item["threshold"] is None
                saved, false = item["saved"], max(item["false_stops"]["value"], SMALLEST)
                error = [[saved["value"] - saved["low"]], [saved["high"] - saved["value"]]]
                mark = {"marker": "s" if shipped else "o", "markersize": 6, "color": f"C{number % 10}", "capsize": 2}
                axis.errorbar([false], [max(saved["value"], 0.0)], yerr=error, linestyle="", label=item["rule"], **mark)
            axis.axvline(report["rate"], color="#999999", linewidth=0.8)
            axis.set(xscale="log", title=world, ylim=(-0.03, 1.0))
        for axis in axes[-1]:
            axis.set_xlabel("false stops per healthy job")
        for axis in axes[:, 0]:
            axis.set_ylabel("share of the oracle's saving")
        axes[0, 0].figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)


def plot_actions(folder: Path, report: dict[str, Any]) -> None:
    """Write actions.png: contended GPU-hours returned against healthy jobs lost, one mark per rule and scheduler."""
    rules = list(dict.fromkeys(item["rule"] for item in report["outcomes"]))
    with save_figure(folder / "actions.png", (7.4, 4.2)) as axes:
        axis = axes[0, 0]
        for number, rule in enumerate(rules):
            points = [item for item in report["outcomes"] if item["rule"] == rule]
            places = [[item[name]["value"] for item in points] for name in ("lost", "returned")]
            marker = "o" if "stop" in rule else "s"
            axis.plot(*places, marker, color=f"C{number}", markersize=6, alpha=0.8, label=rule)
        axis.set(xlabel="healthy jobs lost", ylabel="contended GPU-hours returned, of the oracle's")
        show_percent(axis.xaxis)
        show_percent(axis.yaxis)
        axis.figure.legend(loc="outside right upper", fontsize=8)


def _compute_errors(figures: list[dict[str, float]]) -> list[list[float]]:
    return [[item["value"] - item["low"] for item in figures], [item["high"] - item["value"] for item in figures]]
