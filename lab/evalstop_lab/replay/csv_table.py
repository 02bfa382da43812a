"""CSV: a header with `step`, a column a signal, and `run` unless the file is a single run."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.cells import add_row, number_in, run_of, step_of
from evalstop_lab.replay.lines import lines
from evalstop_lab.replay.runs import Runs


def read(path: Path, name: str, runs: Runs) -> set[str]:
    """Take in every row; returns the columns beside run and step. Without a column `run` the run is called `name`."""
    where = [0]
    rows = csv.reader(_noting(path, where), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    header: list[str] | None = None
    try:
        for cells in rows:
            if header is None:
                header = _header(path, cells)
            elif len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells where the header has {len(header)}; quote cells with commas")
            else:
                row = dict(zip(header, cells, strict=True))
                run = runs.run(run_of(row["run"]) if "run" in row else name)
                add_row(run, step_of(row["step"]), row, runs.roles, number_in)
    except (ValueError, csv.Error) as error:
        raise UnreadableInput(path, str(error), where[0]) from error
    return set(header or ()) - {"run", "step"}


def _noting(path: Path, where: list[int]) -> Iterator[str]:
    for number, line in lines(path):
        where[0] = number
        yield line


def _header(path: Path, cells: list[str]) -> list[str]:
    header = [cell.strip() for cell in cells]
    if "step" not in header:
        raise UnreadableInput(path, f"the header has no column `step`, but {', '.join(header)[:200]}", 1)
    if twice := {cell for cell in header if header.count(cell) > 1}:
        raise UnreadableInput(path, f"the header has {', '.join(sorted(twice))} twice; name each column once", 1)
    return header
