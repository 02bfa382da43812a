"""The plots of `make bench-detection`: ROC by noise, and delay against its lower bound, as PNG and HTML."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import matplotlib
from plotly import graph_objects
from plotly.subplots import make_subplots

from evalstop_lab.benchmarks.detection.contenders import STATED
from evalstop_lab.worlds import LEVELS

matplotlib.use("Agg")  # a file, never a window

from matplotlib import pyplot as plt

Curves = dict[str, dict[str, list[tuple[float, float]]]]

SMALLEST = 1e-3

_HALF = 0.5
_OWN_POINTS = 2  # who brings own points has no curve
_COLORS = tuple(matplotlib.colors.to_hex(matplotlib.colormaps["tab20"](index)) for index in range(20))


def draw(folder: Path, report: dict[str, Any], curves: Curves) -> None:
    """Write roc, delay and sooner into the folder, each as PNG and HTML."""
    _roc_png(folder / "roc.png", curves)
    _roc_html(folder / "roc.html", curves)
    delays = _delays(report)
    _delay_png(folder / "delay.png", delays)
    _delay_html(folder / "delay.html", delays)
    _sooner_png(folder / "sooner.png", report["delay_curves"])
    _sooner_html(folder / "sooner.html", report["delay_curves"])


def _panels() -> list[str]:
    return [f"{level:g}" for level in LEVELS]


def _roc_png(path: Path, curves: Curves) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(14, 8.5), dpi=130, layout="constrained", sharex=True, sharey=True)
    for axis, panel in zip(axes.flat, _panels(), strict=True):
        for (name, by_noise), color in zip(curves.items(), itertools.cycle(_COLORS)):
            x, y = zip(*by_noise[panel], strict=True)
            line = "-" if len(x) > _OWN_POINTS else "o"
            axis.plot([max(item, SMALLEST) for item in x], y, line, color=color, label=name, markersize=6)
        axis.set_xscale("log")
        axis.set_title(f"noise {panel} of the gain")
        axis.axvline(0.01, color="#999999", linewidth=0.8)
    for axis in axes[-1]:
        axis.set_xlabel(f"false stops per healthy run (none: at {SMALLEST})")
    for axis in axes[:, 0]:
        axis.set_ylabel("recall")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def _roc_html(path: Path, curves: Curves) -> None:
    figure = make_subplots(2, 3, subplot_titles=[f"noise {panel} of the gain" for panel in _panels()])
    for place, panel in enumerate(_panels()):
        for (name, by_noise), color in zip(curves.items(), itertools.cycle(_COLORS)):
            x, y = zip(*by_noise[panel], strict=True)
            figure.add_trace(
                graph_objects.Scatter(
                    x=[max(item, SMALLEST) for item in x],
                    y=y,
                    name=name,
                    legendgroup=name,
                    showlegend=place == 0,
                    mode="lines" if len(x) > _OWN_POINTS else "markers",
                    line={"color": color},
                    marker={"color": color},
                ),
                row=place // 3 + 1,
                col=place % 3 + 1,
            )
    figure.update_xaxes(type="log", title="false stops per healthy run")
    figure.update_yaxes(title="recall", range=[0, 1.02])
    figure.write_html(path, include_plotlyjs=True)


def _delays(report: dict[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """By contender: median bound, median delay and noise, where there is a delay and the bound is reached."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for row in report["rows"]:
        if row["at"] in ("5%", STATED):
            continue
        for panel in _panels():
            cell = row["by_noise"][panel]
            bound, evals = cell["bound"]["value"], cell["delay"]["value"]
            if math.isfinite(bound) and math.isfinite(evals):
                found.setdefault(f"{row['contender']} {row['at']}", []).append((bound, evals, panel))
    return found


def _delay_png(path: Path, delays: dict[str, list[tuple[float, float, str]]]) -> None:
    figure, axis = plt.subplots(figsize=(10, 7), dpi=130, layout="constrained")
    for index, (name, found) in enumerate(delays.items()):
        axis.plot(
            [b for b, _, _ in found], [max(d, 0.5) for _, d, _ in found], "o-", color=f"C{index % 10}", label=name
        )
    longest = max((bound for found in delays.values() for bound, _, _ in found), default=1.0)
    axis.plot([1, longest], [1, longest], "--", color="#555555", label="the bound itself")
    axis.set(xscale="log", yscale="log", xlabel="median lower bound, in evals", ylabel="median delay, in evals")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def _delay_html(path: Path, delays: dict[str, list[tuple[float, float, str]]]) -> None:
    figure = graph_objects.Figure()
    for name, found in delays.items():
        figure.add_trace(
            graph_objects.Scatter(
                x=[bound for bound, _, _ in found],
                y=[evals for _, evals, _ in found],
                text=[f"noise {panel}" for _, _, panel in found],
                name=name,
                mode="lines+markers",
            )
        )
    figure.update_xaxes(type="log", title="median lower bound, in evals")
    figure.update_yaxes(type="log", title="median delay, in evals")
    figure.write_html(path, include_plotlyjs=True)


def _sooner_png(path: Path, curves: dict[str, list[tuple[float, float, float]]]) -> None:
    """Delay to bound against false stops, over runs without dips; where fewer than half of the turns are found the line
    is dotted, because those found are the easy ones."""
    figure, axis = plt.subplots(figsize=(10, 7), dpi=130, layout="constrained")
    for (name, curve), color in zip(curves.items(), itertools.cycle(_COLORS)):
        label: str | None = name
        for most, line in ((True, "-"), (False, ":")):
            kept = [(max(false, SMALLEST), ratio) for false, ratio, recall in curve if (recall >= _HALF) is most]
            if kept:
                axis.plot(*zip(*kept, strict=True), line, marker=".", color=color, label=label)
                label = None
    axis.axhline(1.5, color="#999999", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="false stops per healthy run without dips")
    axis.set_ylabel("median of delay to its lower bound, right stops")
    axis.set_yticks([1.5, 2, 3, 4, 6], ["1.5", "2", "3", "4", "6"])
    axis.minorticks_off()
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def _sooner_html(path: Path, curves: dict[str, list[tuple[float, float, float]]]) -> None:
    figure = graph_objects.Figure()
    for name, curve in curves.items():
        figure.add_trace(
            graph_objects.Scatter(
                x=[max(false, SMALLEST) for false, _, _ in curve],
                y=[ratio for _, ratio, _ in curve],
                text=[f"recall {recall:.2f}" for _, _, recall in curve],
                name=name,
                mode="lines+markers",
            )
        )
    figure.update_xaxes(type="log", title="false stops per healthy run without dips")
    figure.update_yaxes(type="log", title="median of delay to its lower bound, right stops")
    figure.write_html(path, include_plotlyjs=True)
