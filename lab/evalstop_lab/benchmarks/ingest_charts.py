"""The plots of `make bench-ingest`: rates and latencies by load, and growth, as PNG and HTML."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
from plotly import graph_objects
from plotly.subplots import make_subplots

from evalstop_lab.benchmarks.rounds import CLIENTS

matplotlib.use("Agg")  # a file, never a window

from matplotlib import pyplot as plt

Lines = dict[str, list[tuple[float, float]]]

COLORS = tuple(matplotlib.colors.to_hex(matplotlib.colormaps["tab20"](index)) for index in range(20))


def draw(folder: Path, report: dict[str, Any]) -> None:
    """Write ingest.png and ingest.html, and growth.png and growth.html where growth was measured."""
    panels = _loads(report)
    if panels:
        _draw(folder / "ingest", panels, "observations a request")
    panels = _growth(report)
    if panels:
        _draw(folder / "growth", panels, "")


def _loads(report: dict[str, Any]) -> dict[str, Lines]:
    panels: dict[str, Lines] = {}
    for field, title in (("per_second", "observations a second"), ("p99_ms", "p99 of a request, ms")):
        for clients in CLIENTS:
            lines: Lines = {}
            for row in report["cells"]:
                if row["clients"] == clients and not row["asking"]:
                    lines.setdefault(row["contender"], []).append((row["batch"], row[field]))
            if lines:
                panels[f"{title}, {clients} client{'s' if clients > 1 else ''}"] = lines
    return panels


def _growth(report: dict[str, Any]) -> dict[str, Lines]:
    panels: dict[str, Lines] = {}
    if "live_runs" in report:
        rows = [row for row in report["live_runs"] if row["remembers_all"]]
        panels["µs an observation by live runs"] = {
            "new to the process": [(row["live_runs"], row["microseconds_first"]) for row in rows],
            "seen before": [(row["live_runs"], row["microseconds"]) for row in rows],
        }
        panels["bytes a live run"] = {"memory": [(row["live_runs"], max(row["bytes_a_run"], 1)) for row in rows]}
    if "points" in report:
        rows = report["points"]
        panels["µs an observation by points in the run"] = {
            "seen before": [(row["points"], row["microseconds"]) for row in rows]
        }
        panels["ms to the first verdict on a cold run, by its points"] = {
            "rebuilt": [(row["points"], row["first_ms"]) for row in rows]
        }
    return panels


def _draw(path: Path, panels: dict[str, Lines], x_title: str) -> None:
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(itertools.chain.from_iterable(panels.values())))
    colors = dict(zip(names, itertools.cycle(COLORS)))
    figure, axes = plt.subplots(
        rows, columns, figsize=(5 * columns, 4 * rows), dpi=130, layout="constrained", squeeze=False
    )
    page = make_subplots(rows, columns, subplot_titles=list(panels))
    shown: dict[str, Any] = {}
    for place, (title, lines) in enumerate(panels.items()):
        axis = axes.flat[place]
        for name, points in lines.items():
            x, y = zip(*sorted(points), strict=True)
            (line,) = axis.plot(x, y, "o-", color=colors[name], markersize=3, linewidth=1.2)
            page.add_trace(
                graph_objects.Scatter(
                    x=x, y=y, name=name, legendgroup=name, showlegend=name not in shown, line={"color": colors[name]}
                ),
                row=place // columns + 1,
                col=place % columns + 1,
            )
            shown.setdefault(name, line)
        axis.set(xscale="log", yscale="log", title=title, xlabel=x_title)
        axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.legend(list(shown.values()), list(shown), loc="outside right upper", fontsize=8)
    figure.savefig(path.with_suffix(".png"))
    plt.close(figure)
    page.update_xaxes(type="log", title=x_title)
    page.update_yaxes(type="log")
    page.write_html(path.with_suffix(".html"), include_plotlyjs=True)
