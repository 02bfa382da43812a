"""The plots of `evalstop-lab cluster`, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalstop_lab.figure import saved_figure, show_percent
from evalstop_lab.report import format_percent

SMALLEST = 1e-3

OURS, PAPERS = "#3b6fb6", "#b7791f"


def reproduce(folder: Path, report: dict[str, Any]) -> None:
    """Write reproduce.png: the change of the mean time of all, healthy and hacking jobs, by scheduler."""
    changes = report["changes"]["paper"]
    with saved_figure(folder / "reproduce.png", (10, 4.6)) as axes:
        axis = axes[0, 0]
        for offset, (what, color) in enumerate(
            (("mean time", OURS), ("of healthy jobs", "#5a9e6f"), ("of hacking jobs", "#c53030"))
        ):
            found = [changes[name][what]["change"] for name in changes]
            places = [place + 0.27 * (offset - 1) for place in range(len(found))]
            values = [item["value"] for item in found]
            axis.bar(places, values, 0.25, color=color, label=what, yerr=_errors(found), capsize=2, ecolor="#333333")
        axis.axhspan(-0.25, -0.09, color=PAPERS, alpha=0.12, label="the paper, all jobs: -9 to -25 %")
        axis.set_xticks(range(len(changes)), changes)
        show_percent(axis.yaxis)
        axis.set_ylabel("change of the mean time to completion")
        axis.legend(fontsize=8)


def frontier(folder: Path, report: dict[str, Any]) -> None:
    """Write frontier.png: the share of the oracle's saving against false stops, a panel a world."""
    worlds = list(report["worlds"])
    columns = min(len(worlds), 4)
    rows = -(-len(worlds) // columns)
    with saved_figure(folder / "frontier.png", (3.4 * columns, 3.1 * rows), rows, columns, sharey=True) as axes:
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


def actions(folder: Path, report: dict[str, Any]) -> None:
    """Write actions.png: contended GPU-hours returned against healthy jobs lost, a mark a rule and scheduler."""
    rules = list(dict.fromkeys(item["rule"] for item in report["outcomes"]))
    with saved_figure(folder / "actions.png", (7.4, 4.2)) as axes:
        axis = axes[0, 0]
        for number, rule in enumerate(rules):
            points = [item for item in report["outcomes"] if item["rule"] == rule]
            places = [[item[name]["value"] for item in points] for name in ("lost", "returned")]
            marker = "o" if "stop" in rule else "s"
            axis.plot(*places, marker, color=f"C{number}", markersize=6, alpha=0.8, label=rule)
        axis.set(xlabel="healthy jobs lost for good", ylabel="returned, of the oracle's contended GPU-hours")
        show_percent(axis.xaxis)
        show_percent(axis.yaxis)
        axis.figure.legend(loc="outside right upper", fontsize=8)


def cadence(folder: Path, report: dict[str, Any]) -> None:
    """Write cadence.png: GPU-hours that come back against the number of evals, a line a cost, a panel a policy."""
    policies = list(dict.fromkeys(net["policy"] for net in report["nets"]))
    costs = list(dict.fromkeys(net["eval_share"] for net in report["nets"]))
    with saved_figure(folder / "cadence.png", (4 * len(policies), 3.6), 1, len(policies), sharey=True) as axes:
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
            axis.set(xscale="log", title=policy, xlabel="evals a job", ylim=(-0.2, 0.2))
            show_percent(axis.yaxis)
        axes[0, 0].set_ylabel("GPU-hours that come back, of all")
        axes[0, 0].legend(title="an eval costs", fontsize=8)


def cost(folder: Path, report: dict[str, Any]) -> None:
    """Write cost.png: what comes back by policy, and the dollars a month by how GPUs are paid for."""
    policies = report["policies"]
    with saved_figure(folder / "cost.png", (10, 3.8), 1, 2) as axes:
        shares, dollars = axes[0]
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


def rollback(folder: Path, report: dict[str, Any]) -> None:
    """Write rollback.png: GPU-hours, mean time and the eval score kept, stopping beside rolling back, by policy."""
    outcomes = report["outcomes"]
    policies = list(dict.fromkeys(item["policy"] for item in outcomes))
    with saved_figure(folder / "rollback.png", (11, 3.6), 1, 3) as axes:
        titles = {
            "gpu_hours": "GPU-hours, change",
            "time": "mean time, change",
            "eval_kept": "eval score kept, of what there was",
        }
        for axis, (key, title) in zip(axes[0], titles.items(), strict=True):
            series: dict[str, list[dict[str, float]]] = {}
            for item in outcomes:
                series.setdefault(item["action"], []).append(item[key])
            _bars(axis, series)
            _named(axis, policies, title)


def population(folder: Path, report: dict[str, Any]) -> None:
    """Write population.png: the eval score of the kept checkpoint against GPU-hours, a mark a way to run the sweep."""
    with saved_figure(folder / "population.png", (6.4, 4.2)) as axes:
        axis = axes[0, 0]
        for number, item in enumerate(report["outcomes"]):
            spent, kept = item["gpu_hours"], item["kept"]
            mark = {"marker": "o", "color": f"C{number}", "capsize": 2, "label": item["way"]}
            axis.errorbar([spent["value"]], [kept["value"]], xerr=_errors([spent]), yerr=_errors([kept]), **mark)
        show_percent(axis.xaxis, axis.yaxis, decimals=1)
        axis.set(
            xlabel="GPU-hours, of all plans", ylabel="the eval score of the kept checkpoint, of the frontier's top"
        )
        axis.legend(fontsize=8)


def trace(folder: Path, report: dict[str, Any]) -> None:
    """Write trace.png: GPU-hours that come back and the change of the mean time by scheduler, a bar a rule."""
    results = report["results"]
    rules = next(iter(results.values()))
    with saved_figure(folder / "trace.png", (10, 3.8), 1, 2) as axes:
        titles = {"gpu_hours_saved": "GPU-hours that come back", "time": "mean time, change"}
        for axis, (key, title) in zip(axes[0], titles.items(), strict=True):
            _bars(axis, {rule: [of[rule][key] for of in results.values()] for rule in rules})
            _named(axis, list(results), title)


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
        show_percent(axis.yaxis)
    axis.legend(fontsize=8)
