"""Draws the plots of `evalstop-lab cluster` as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalstop_lab.figure import save_figure, show_percent
from evalstop_lab.report import format_percent

SMALLEST = 1e-3

OURS, PAPERS = "#3b6fb6", "#b7791f"


def plot_reproduce(folder: Path, report: dict[str, Any]) -> None:
    """Write reproduce.png: the change of the mean time of all, healthy and hacking jobs, by scheduler."""
    changes = report["changes"]["paper"]
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


def plot_cadence(folder: Path, report: dict[str, Any]) -> None:
    """Write cadence.png: GPU-hours saved against the number of evals, one line per cost, one panel per policy."""
    policies = list(dict.fromkeys(net["policy"] for net in report["nets"]))
    costs = list(dict.fromkeys(net["eval_share"] for net in report["nets"]))
    with save_figure(folder / "cadence.png", (4 * len(policies), 3.6), 1, len(policies), sharey=True) as axes:
        for axis, policy in zip(axes.flat, policies, strict=True):
            for cost in costs:
                nets = [net for net in report["nets"] if (net["policy"], net["eval_share"]) == (policy, cost)]
                axis.plot(
                    [net["evals"] for net in nets],
                    [net["saved"]["value"] for net in nets],
                    "o-",
                    label=format_percent(cost, 2),
                )
            axis.axhline(0, color="#333333", linewidth=0.8)
            axis.set(xscale="log", title=policy, xlabel="evals per job", ylim=(-0.2, 0.2))
            show_percent(axis.yaxis)
        axes[0, 0].set_ylabel("share of all GPU-hours saved")
        axes[0, 0].legend(title="cost per eval", fontsize=8)


def plot_cost(folder: Path, report: dict[str, Any]) -> None:
    """Write cost.png: the savings by policy, and the dollars per month by payment model."""
    policies = report["policies"]
    with save_figure(folder / "cost.png", (10, 3.8), 1, 2) as axes:
        shares, dollars = axes[0]
        drawn = {
            "gpu_hours": "GPU-hours saved",
            "time": "mean time",
            "time_at_equal_load": "mean time, equal load",
        }
        _draw_bars(shares, {label: [figures[key] for figures in policies.values()] for key, label in drawn.items()})
        _label_axis(shares, list(policies), "change relative to no stops")
        amounts = [figures["dollars_a_month"] for figures in policies.values()]
        _draw_bars(dollars, {model: [{"value": of_policy[model]} for of_policy in amounts] for model in amounts[0]})
        _label_axis(dollars, list(policies), "dollars per month", percent=False)


def plot_rollback(folder: Path, report: dict[str, Any]) -> None:
    """Write rollback.png: GPU-hours, mean time and kept eval score of stopping and of rolling back, by policy."""
    outcomes = report["outcomes"]
    policies = list(dict.fromkeys(item["policy"] for item in outcomes))
    with save_figure(folder / "rollback.png", (11, 3.6), 1, 3) as axes:
        titles = {
            "gpu_hours": "GPU-hours, change",
            "time": "mean time, change",
            "eval_kept": "kept eval score, of the best",
        }
        for axis, (key, title) in zip(axes[0], titles.items(), strict=True):
            series: dict[str, list[dict[str, float]]] = {}
            for item in outcomes:
                series.setdefault(item["action"], []).append(item[key])
            _draw_bars(axis, series)
            _label_axis(axis, policies, title)


def plot_population(folder: Path, report: dict[str, Any]) -> None:
    """Write population.png: the eval score of the kept checkpoint against GPU-hours, one mark per strategy."""
    with save_figure(folder / "population.png", (6.4, 4.2)) as axes:
        axis = axes[0, 0]
        for number, item in enumerate(report["outcomes"]):
            spent, kept = item["gpu_hours"], item["kept"]
            mark = {"marker": "o", "color": f"C{number}", "capsize": 2, "label": item["strategy"]}
            axis.errorbar(
                [spent["value"]], [kept["value"]], xerr=_compute_errors([spent]), yerr=_compute_errors([kept]), **mark
            )
        show_percent(axis.xaxis, axis.yaxis, decimals=1)
        axis.set(xlabel="GPU-hours, of all plans", ylabel="eval score of the kept checkpoint, of the maximum")
        axis.legend(fontsize=8)


def plot_trace(folder: Path, report: dict[str, Any]) -> None:
    """Write trace.png: GPU-hours saved and the change of the mean time by scheduler, one bar per rule."""
    results = report["results"]
    rules = next(iter(results.values()))
    with save_figure(folder / "trace.png", (10, 3.8), 1, 2) as axes:
        titles = {"gpu_hours_saved": "GPU-hours saved", "time": "mean time, change"}
        for axis, (key, title) in zip(axes[0], titles.items(), strict=True):
            _draw_bars(axis, {rule: [by_rule[rule][key] for by_rule in results.values()] for rule in rules})
            _label_axis(axis, list(results), title)


def _draw_bars(axis: Any, series: dict[str, list[dict[str, float]]]) -> None:
    """Draw grouped bars, one per series in each group, with intervals if they have any."""
    width = 0.8 / len(series)
    for number, (label, bars) in enumerate(series.items()):
        places = [place + width * (number - (len(series) - 1) / 2) for place in range(len(bars))]
        values = [item["value"] for item in bars]
        axis.bar(places, values, 0.92 * width, label=label, yerr=_compute_errors(bars), capsize=2, ecolor="#333333")


def _compute_errors(figures: list[dict[str, float]]) -> list[list[float]]:
    below = [item["value"] - item.get("low", item["value"]) for item in figures]
    return [below, [item.get("high", item["value"]) - item["value"] for item in figures]]


def _label_axis(axis: Any, places: list[str], title: str, *, percent: bool = True) -> None:
    axis.axhline(0, color="#333333", linewidth=0.8)
    axis.set_xticks(range(len(places)), places)
    axis.set_ylabel(title)
    if percent:
        show_percent(axis.yaxis)
    axis.legend(fontsize=8)
