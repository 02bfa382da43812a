"""The tables of `make bench-ingest`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from evalstop_lab.benchmarks.rounds import BATCHES, CLIENTS


def print_tables(console: Console, report: dict[str, Any]) -> None:
    """Print all tables of a report."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    console.print(f"{report['command']}, begun {report['begun']}, {report['minutes']:.0f} minutes", highlight=False)
    console.print(
        f"{report['setting']['rounds']} rounds of {report['setting']['seconds']:g} s each in turns, medians;"
        f" {machine['cores']} cores, which clients, servers and PostgreSQL share; Linux {machine['kernel']};"
        f" Python {machine['python']}; {versions}; PostgreSQL {machine['postgresql']}; fsync and synchronous_commit on",
        highlight=False,
    )
    console.print(
        f"8 kB are durable after {machine['sync_ms']:.2f} ms; load average {machine['load_average_before']:.1f} before"
        f" and {machine['load_average_after']:.1f} after",
        highlight=False,
    )
    for note in report["notes"]:
        console.print(f"note: {note}", highlight=False)
    for failure in report["failures"]:
        console.print(f"FAILED: {failure}", highlight=False)
    for clients in CLIENTS:
        rows = [row for row in report["cells"] if row["clients"] == clients and not row["asking"]]
        if rows:
            console.print(_grid(rows, clients))
    asking = [row for row in report["cells"] if row["asking"]]
    if asking:
        console.print(_asking(asking))
    _print_growth(console, report)
    if report["targets"]:
        console.print(_address_policy(report["targets"]))


def _grid(rows: list[dict[str, Any]], clients: int) -> Table:
    batches = [*BATCHES, *sorted({row["batch"] for row in rows} - set(BATCHES))]
    table = Table(
        title=f"{clients} client{'s' if clients > 1 else ''}: observations a second (p50 / p99 of a request in ms)"
    )
    table.add_column("")
    for batch in batches:
        table.add_column(f"{batch} a request", justify="right")
    for name in dict.fromkeys(row["contender"] for row in rows):
        by_batch = {row["batch"]: row for row in rows if row["contender"] == name}
        table.add_row(name, *(_cell(by_batch.get(batch)) for batch in batches))
    return table


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    refused = f", {row['refused']} refused" if row["refused"] else ""
    return f"{row['per_second']:,.0f} ({row['p50_ms']:.2f} / {row['p99_ms']:.1f}{refused})"


def _asking(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="report one eval and ask whether to stop, 8 clients")
    for heading in ("", "a second", "lowest - highest", "p50 ms", "p99 ms"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        extremes = f"{row['lowest']:,.0f} - {row['highest']:,.0f}"
        table.add_row(
            row["contender"], f"{row['per_second']:,.0f}", extremes, f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.1f}"
        )
    return table


def _print_growth(console: Console, report: dict[str, Any]) -> None:
    if "live_runs" in report:
        table = Table(title="live runs: 20 observations a request, 64 clients")
        for heading in (
            "live runs",
            "us an observation, runs new to the process",
            "us, seen before",
            "p99 ms",
            "kB a run",
        ):
            table.add_column(heading, justify="right")
        for row in report["live_runs"]:
            table.add_row(
                f"{row['live_runs']:,}" + ("" if row["remembers_all"] else ", 10,000 remembered"),
                f"{row['microseconds_first']:.1f}",
                f"{row['microseconds']:.1f}",
                f"{row['p99_ms']:.1f}",
                f"{row['bytes_a_run'] / 1000:.1f}",
            )
        console.print(table)
    if "points" in report:
        table = Table(title="points in a run: 100 observations a request, a lone client")
        for heading in ("points", "ms to the first verdict, cold", "us an observation after"):
            table.add_column(heading, justify="right")
        for row in report["points"]:
            table.add_row(f"{row['points']:,}", f"{row['first_ms']:,.0f}", f"{row['microseconds']:.1f}")
        console.print(table)
    if "recovery" in report:
        table = Table(title="recovery from kill -9, in ms")
        table.add_column("")
        table.add_column("", justify="right")
        found = report["recovery"]
        table.add_row(
            "to the first accepted observation, start of the process included", f"{found['to_first_accepted_ms']:,.0f}"
        )
        table.add_row("first correct verdict on a cold run of 10^4 points", f"{found['cold_verdict_ms']:,.1f}")
        table.add_row("the same, its monitor's state thrown away", f"{found['cold_verdict_rebuilt_ms']:,.1f}")
        console.print(table)
    if "reading" in report:
        table = Table(title="reading back, in ms")
        for heading in ("", "first look", "p50 of 20 more", "worst of them"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, took in report["reading"].items():
            columns = ("first_ms", "p50_ms", "worst_ms")
            cells = ["no such route"] if took is None else [f"{took[column]:.1f}" for column in columns]
            table.add_row(name, *cells)
        console.print(table)


def _address_policy(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="targets")
    for heading in ("", "measured", "round by round", "target", "", "of"):
        table.add_column(heading, justify="right" if heading in ("measured", "round by round", "target") else "left")
    for row in rows:
        measured, unit = row["measured"], row["unit"]
        rounds = "" if row["lowest"] is None else f"{row['lowest']:.3g} - {row['highest']:.3g}"
        word = {True: "met", False: "MISSED", None: "not measured"}[row["met"]]
        value = "" if measured is None else f"{measured:.3g} {unit}"
        table.add_row(row["name"], value, rounds, f"{row['bound']} {row['limit']:g} {unit}", word, row["where"])
    return table
