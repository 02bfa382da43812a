"""Reads CSV: a header with `step`, a column per role, and `run` unless the file is a single run.

An exported W&B chart instead has a column per run, called `run - metric`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import STEPS, add_row, parse_run_name, parse_step, parse_text_number
from evalstop_lab.replay.lines import NumberedLines
from evalstop_lab.replay.runs import ReadErrors, Roles, Runs

BETWEEN = " - "
_ENVELOPES = ("__MIN", "__MAX")  # of the points that W&B's chart merged into one


def list_metrics(path: Path, errors: ReadErrors) -> set[str]:
    """The columns; for a chart the metrics."""
    header = next((cells for _, cells in _read_rows(path, errors)), [])
    return (
        {metric for _, metric in _parse_chart(header).values()} | set(header[:1])
        if _parse_chart(header)
        else set(header)
    )


def read_runs(path: Path, name: str, runs: Runs, roles: Roles, errors: ReadErrors) -> None:
    """Read every row. Without a column `run` the run is called `name`."""
    header: list[str] = []
    chart: dict[str, tuple[str, str]] = {}
    for number, cells in _read_rows(path, errors):
        try:
            if not header:
                header, chart = cells, _parse_chart(cells)
                if not chart and roles.step not in header:
                    raise ValueError(f"the header has no column `{roles.step}`, but {', '.join(header)[:200]}")
            elif len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells where the header has {len(header)}; quote cells with commas")
            else:
                row = dict(zip(header, cells, strict=True))
                if chart:
                    for column, (run, metric) in chart.items():
                        add_row(runs.run(run, roles), parse_step(cells[0]), {metric: row[column]}, parse_text_number)
                    continue
                run = parse_run_name(row["run"]) if "run" in row else name
                add_row(runs.run(run, roles), parse_step(row[roles.step]), row, parse_text_number)
        except ValueError as error:
            errors.add(UnreadableInput(path, str(error), number))


def _read_rows(path: Path, errors: ReadErrors) -> Iterator[tuple[int, list[str]]]:
    """The validated header, and the rows."""
    numbered = NumberedLines(path, errors)
    rows = csv.reader(numbered, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    first = True
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as error:
            errors.add(UnreadableInput(path, str(error), numbered.number))
            continue
        if cells is None:
            return
        if first:
            first, cells = False, [cell.strip() for cell in cells]
            if repeated := {cell for cell in cells if cells.count(cell) > 1}:
                problem = f"the header has {', '.join(sorted(repeated))} twice; name each column once"
                errors.add(UnreadableInput(path, problem, 1))
                return
            if not _parse_chart(cells) and not set(STEPS) & set(cells):
                problem = f"the header has no column `step`, but {', '.join(cells)[:200]}"
                errors.add(UnreadableInput(path, problem, 1))
                return
        yield numbered.number, cells


def _parse_chart(header: list[str]) -> dict[str, tuple[str, str]]:
    """Run and metric by column, if this is the header of a chart."""
    if not header or header[0] not in STEPS or not all(BETWEEN in column for column in header[1:]):
        return {}
    parts = {column: column.rpartition(BETWEEN) for column in header[1:] if not column.endswith(_ENVELOPES)}
    return {column: (run, metric) for column, (run, _, metric) in parts.items()}
