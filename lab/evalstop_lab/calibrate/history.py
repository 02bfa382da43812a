"""A user's own runs that were healthy, in any format that `evalstop-lab replay` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from evalstop_detectors import Observation

from evalstop_lab.replay import Asked, read
from evalstop_lab.replay.lines import lines

HEALTHY = "healthy"


def healthy_runs(paths: Sequence[Path], asked: Asked | None = None) -> dict[str, list[Observation]]:
    """The runs of these files by name, each in order; raises UnreadableInput naming file and line at fault.

    A run of JSON lines with a `label` other than "healthy" on any of its lines is left out.
    """
    runs = read(paths, asked)
    runs.settle()
    left_out = {run for path in paths if path.suffix == ".jsonl" for run in _otherwise_labeled(path)}
    return {name: run.observations() for name, run in runs.by_name.items() if name not in left_out}


def _otherwise_labeled(path: Path) -> Iterator[str]:
    for _, line in lines(path):
        if '"label"' in line:
            row = json.loads(line)
            if row.get("label", HEALTHY) != HEALTHY:
                yield str(row.get("run", path.with_suffix("")))
