"""The plots of `evalstop-lab cluster`, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib import pyplot as plt

SMALLEST = 1e-3

OURS, PAPERS = "#3b6fb6", "#b7791f"


def reproduce(folder: Path, report: dict[str, Any]) -> None:
    """Write reproduce.png: the change of the mean time of all, healthy and hacking jobs, by scheduler."""
    changes = report["changes"]["paper"]
    figure, axis = plt.subplots(figsize=(10, 4.6), dpi=130, layout="constrained")
    for offset, (what, color) in enumerate(
        (("mean time", OURS), ("of healthy jobs", "#5a9e6f"), ("of hacking jobs", "#c53030"))
    ):
        found = [changes[name][what]["change"] for name in changes]
        places = [place + 0.27 * (offset - 1) for place in range(len(found))]
        values = [item["value"] for item in found]
        errors = [[item["value"] - item["low"] for item in found], [item["high"] - item["value"] for item in found]]
        axis.bar(places, values, 0.25, color=color, label=what, yerr=errors, capsize=2, ecolor="#333333")
    axis.axhspan(-0.25, -0.09, color=PAPERS, alpha=0.12, label="the paper, all jobs: -9 to -25 %")
    axis.set_xticks(range(len(changes)), changes)
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axis.set_ylabel("change of the mean time to completion")
    axis.legend(fontsize=8)
    figure.savefig(folder / "reproduce.png")
    plt.close(figure)


def frontier(folder: Path, report: dict[str, Any]) -> None:
    """Write frontier.png: the share of the oracle's saving against false stops, a panel a world."""
    worlds = list(report["worlds"])
    columns = min(len(worlds), 4)
    rows = -(-len(worlds) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.4 * columns, 3.1 * rows), dpi=130, layout="constrained", squeeze=False, sharey=True
    )
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
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(folder / "frontier.png")
    plt.close(figure)


def cadence(folder: Path, report: dict[str, Any]) -> None:
    """Write cadence.png: GPU-hours that come back against the number of evals, a line a cost, a panel a policy."""
    policies = list(dict.fromkeys(net["policy"] for net in report["nets"]))
    costs = list(dict.fromkeys(net["eval_share"] for net in report["nets"]))
    figure, axes = plt.subplots(
        1, len(policies), figsize=(4 * len(policies), 3.6), dpi=130, layout="constrained", squeeze=False, sharey=True
    )
    for axis, policy in zip(axes.flat, policies, strict=True):
        for cost in costs:
            nets = [net for net in report["nets"] if (net["policy"], net["eval_share"]) == (policy, cost)]
            axis.plot(
                [net["evals"] for net in nets], [net["saved"]["value"] for net in nets], "o-", label=f"{cost:.2%}"
            )
        axis.axhline(0, color="#333333", linewidth=0.8)
        axis.set(xscale="log", title=policy, xlabel="evals a job", ylim=(-0.2, 0.2))
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes[0, 0].set_ylabel("GPU-hours that come back, of all")
    axes[0, 0].legend(title="an eval costs", fontsize=8)
    figure.savefig(folder / "cadence.png")
    plt.close(figure)


def cost(folder: Path, report: dict[str, Any]) -> None:
    """Write cost.png: what comes back by policy, and the dollars a month by how GPUs are paid for."""
    policies = report["policies"]
    figure, (shares, dollars) = plt.subplots(1, 2, figsize=(10, 3.8), dpi=130, layout="constrained")
    drawn = {
        "gpu_hours": "GPU-hours that come back",
        "time": "mean time",
        "time_at_equal_load": "mean time, equal load",
    }
    _bars(shares, {label: [found[key] for found in policies.values()] for key, label in drawn.items()})
    _named(shares, list(policies), "change beside no stops")
    ways = next(iter(policies.values()))["dollars_a_month"]
    _bars(dollars, {way: [{"value": of["dollars_a_month"][way]} for of in policies.values()] for way in ways})
    _named(dollars, list(policies), "dollars a month", percent=False)
    figure.savefig(folder / "cost.png")
    plt.close(figure)


def rollback(folder: Path, report: dict[str, Any]) -> None:
    """Write rollback.png: GPU-hours, mean time and the eval score kept, stopping beside rolling back, by policy."""
    outcomes = report["outcomes"]
    policies = list(dict.fromkeys(item["policy"] for item in outcomes))
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), dpi=130, layout="constrained")
    titles = {
        "gpu_hours": "GPU-hours, change",
        "time": "mean time, change",
        "eval_kept": "eval score kept, of what there was",
    }
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        series: dict[str, list[dict[str, float]]] = {}
        for item in outcomes:
            series.setdefault(item["action"], []).append(item[key])
        _bars(axis, series)
        _named(axis, policies, title)
    figure.savefig(folder / "rollback.png")
    plt.close(figure)


def population(folder: Path, report: dict[str, Any]) -> None:
    """Write population.png: the eval score of the kept checkpoint against GPU-hours, a mark a way to run the sweep."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), dpi=130, layout="constrained")
    for number, item in enumerate(report["outcomes"]):
        spent, kept = item["gpu_hours"], item["kept"]
        mark = {"marker": "o", "color": f"C{number}", "capsize": 2, "label": item["way"]}
        axis.errorbar([spent["value"]], [kept["value"]], xerr=_errors([spent]), yerr=_errors([kept]), **mark)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=1))
    axis.set(xlabel="GPU-hours, of all plans", ylabel="the eval score of the kept checkpoint, of the frontier's top")
    axis.legend(fontsize=8)
    figure.savefig(folder / "population.png")
    plt.close(figure)


def trace(folder: Path, report: dict[str, Any]) -> None:
    """Write trace.png: GPU-hours that come back and the change of the mean time by scheduler, a bar a rule."""
    results = report["results"]
    rules = next(iter(results.values()))
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), dpi=130, layout="constrained")
    titles = {"gpu_hours_saved": "GPU-hours that come back", "time": "mean time, change"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        _bars(axis, {rule: [of[rule][key] for of in results.values()] for rule in rules})
        _named(axis, list(results), title)
    figure.savefig(folder / "trace.png")
    plt.close(figure)


def _bars(axis: Any, series: dict[str, list[dict[str, float]]]) -> None:
    """Bars side by side at each place, one of each series, with intervals where they have some."""
    width = 0.8 / len(series)
    for number, (label, found) in enumerate(series.items()):
        places = [place + width * (number - (len(series) - 1) / 2) for place in range(len(found))]
        values = [item["value"] for item in found]
        axis.bar(places, values, 0.92 * width, label=label, yerr=_errors(found), capsize=2, ecolor="#333333")


def _errors(found: list[dict[str, float]]) -> list[list[float]]:
    below = [item["value"] - item.get("low", item["value"]) for item in found]
    return [below, [item.get("high", item["value"]) - item["value"] for item in found]]


def _named(axis: Any, places: list[str], title: str, *, percent: bool = True) -> None:
    axis.axhline(0, color="#333333", linewidth=0.8)
    axis.set_xticks(range(len(places)), places)
    axis.set_ylabel(title)
    if percent:
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axis.legend(fontsize=8)
