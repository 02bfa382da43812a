"""The model of fusion and its report as tables."""

from __future__ import annotations

from typing import Any

from evalstop_detectors.detectors.fusion import FusionModel
from rich.console import Console
from rich.table import Table

from evalstop_lab.benchmarks.standing import RATES
from evalstop_lab.worlds import FAMILIES


def print_model(console: Console, model: FusionModel) -> None:
    """What each feature adds to the log-odds."""
    table = Table(title=f"log-odds {model.log_odds:+.2f} and, by feature,")
    for heading in ("feature", "steps", "from", "to", "adds at the most"):
        table.add_column(heading, justify="left" if heading == "feature" else "right")
    for item in model.functions:
        row = (len(item.at), item.at[0], item.at[-1], max(item.log_odds, key=abs))
        table.add_row(item.feature, str(row[0]), *(f"{number:.3g}" for number in row[1:]))
    console.print(table)


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Known families, families left out, families never seen, and the calibration."""
    for key, title in (("known", "families it was fitted on, fresh seeds"), ("all", "all families, fresh seeds")):
        _print_known(console, report[key], title)
    _print_families(console, report["left_out"], "each family left out of fitting and calibration in turn")
    _print_families(console, report["never_seen"], "families that neither ever sees")
    table = Table(title="the probability beside the share of evals past the turn")
    for heading in ("evals", "probability", "past"):
        table.add_column(heading, justify="right")
    for row in report["reliability"]:
        table.add_row(str(row["evals"]), f"{row['probability']:.3f}", f"{row['past']:.3f}")
    console.print(table)


def _print_known(console: Console, found: dict[str, Any], title: str) -> None:
    table = Table(title=title)
    for heading in ("", "calibrated to", "threshold", "recall", "premature", "false stops"):
        table.add_column(heading, justify="right")
    for name, rates in found.items():
        for rate, row in rates.items():
            shares = (_words(row[key]) for key in ("recall", "premature", "false_stops"))
            table.add_row(name, f"{float(rate):.0%}", f"{row['alarm']:.6f}", *shares)
    console.print(table)


def _print_families(console: Console, found: dict[str, dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    names = ("fusion", "plateau_drop")
    for heading in ("family", "group", "share of", *(f"{name} at {rate:.0%}" for name in names for rate in RATES)):
        table.add_column(heading)
    for family, row in found.items():
        group = FAMILIES[family].group
        cells = (_words(row[name][f"{rate:g}"]) for name in names for rate in RATES)
        table.add_row(family, group, "right stops" if group == "hacking" else "false stops", *cells)
    console.print(table)


def _words(share: dict[str, Any]) -> str:
    if share["value"] is None:
        return "-"
    return f"{share['value']:.3f} ({share['low']:.3f}-{share['high']:.3f})"
