"""The tables of `make bench-detection`."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from evalstop_lab.worlds import HELD_OUT, LEVELS


def print_tables(console: Console, report: dict[str, Any]) -> None:
    """Print all tables of a report."""
    console.print(_summary(report))
    console.print(_by_noise(report))
    console.print(_without_dips(report))
    console.print(_left_out(report))
    console.print(_checkpoints(report))
    if report["setting"]["recorded_runs"]:
        console.print(_of_recorded(report))


def _summary(report: dict[str, Any]) -> Table:
    table = Table(title=f"finding the turn: {report['setting']['runs']} runs, half of them hacking")
    for heading in (
        "",
        "at",
        "recall",
        "false stops",
        "of held-out families",
        "precision",
        "premature",
        "delay p50",
        "p90",
        "delay / bound",
        "wasted",
        "the eval score lost",
        "us an eval",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in report["rows"]:
        table.add_row(
            row["contender"],
            row["at"],
            _share(row["recall"]),
            _share(row["false_stops"]),
            _share(row["false_stops_held_out"]),
            _number(row["precision"]["value"], 2),
            _number(row["premature"]["value"], 3),
            _number(row["delay"]["value"], 0),
            _number(row["delay_p90"]["value"], 0),
            _number(row["delay_to_bound"]["value"], 2),
            _number(row["wasted"]["value"], 2),
            _number(row["eval_lost"]["value"], 3),
            f"{row['microseconds']:.0f}",
        )
    return table


def _by_noise(report: dict[str, Any]) -> Table:
    table = Table(title="recall, and median delay in evals, by noise as a share of the gain")
    for heading in ("", "at", *(f"{level:g}" for level in LEVELS)):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in report["rows"]:
        cells = [row["by_noise"][f"{level:g}"] for level in LEVELS]
        table.add_row(
            row["contender"],
            row["at"],
            *(
                f"{_number(cell['recall']['value'], 2)}  {_number(cell['delay']['value'], 0)}"
                f" ({_number(cell['delay_p90']['value'], 0)}) / {_number(cell['bound']['value'], 0)}"
                for cell in cells
            ),
        )
    table.caption = "recall, median delay (90th percentile) / median lower bound"
    return table


def _without_dips(report: dict[str, Any]) -> Table:
    table = Table(title="if no healthy run had dips: thresholds and figures among runs without")
    for heading in ("", "at", "recall", "false stops", "delay p50", "p90", "delay / bound"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in report["rows"]:
        clear = row["without_dips"]
        table.add_row(
            row["contender"],
            row["at"],
            _share(clear["recall"]),
            _share(clear["false_stops"]),
            _number(clear["delay"]["value"], 0),
            _number(clear["delay_p90"]["value"], 0),
            _number(clear["delay_to_bound"]["value"], 2),
        )
    return table


def _left_out(report: dict[str, Any]) -> Table:
    rows = [row for row in report["rows"] if row["left_out"]]
    families = list(rows[0]["left_out"]) if rows else []
    table = Table(title="false stops in % on each healthy family, at the threshold found on all others")
    for heading in ("", "at", *(f"{name} *" if name in HELD_OUT else name for name in families)):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rows:
        shares = (row["left_out"][family] for family in families)
        table.add_row(row["contender"], row["at"], *(f"{100 * share['value']:.1f}" for share in shares))
    table.caption = "* no threshold has ever seen it"
    return table


def _checkpoints(report: dict[str, Any]) -> Table:
    table = Table(title="what the chosen checkpoint lacks, as a share of the gain, by noise")
    for heading in ("", *(f"{level:g}" for level in LEVELS)):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, by_noise in report["checkpoints"].items():
        table.add_row(name, *(_number(by_noise[f"{level:g}"]["value"], 4) for level in LEVELS))
    return table


def _of_recorded(report: dict[str, Any]) -> Table:
    table = Table(title=f"{report['setting']['recorded_runs']} recorded runs, the ambiguous left out")
    for heading in ("", "at", "recall", "false stops", "precision", "premature", "delay p50", "the eval score lost"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in report["rows"]:
        cell = row["recorded"]
        table.add_row(
            row["contender"],
            row["at"],
            _share(cell["recall"]),
            _share(cell["false_stops"]),
            _number(cell["precision"]["value"], 2),
            _number(cell["premature"]["value"], 2),
            _number(cell["delay"]["value"], 0),
            _number(cell["eval_lost"]["value"], 3),
        )
    return table


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _share(share: dict[str, Any]) -> str:
    return f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}]" if share["n"] else "-"
