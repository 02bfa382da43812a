"""A user's own runs, one JSON object an eval: `{"run": "a", "step": 10, "eval": 0.61, "eval_stderr": 0.02, ...}`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evalstop_detectors import Observation, Signal

from evalstop_lab.errors import UnusableArguments

SIGNALS = {"kl": Signal.KL, "loss": Signal.LOSS, "proxy": Signal.PROXY, "eval": Signal.EVAL}


def healthy_runs(path: Path) -> dict[str, list[Observation]]:
    """The runs of the file, each in order; raises UnusableArguments naming the line at fault.

    A run with a `label` other than "healthy" on any of its lines is left out.
    """
    runs: dict[str, dict[tuple[int, int], Observation]] = {}
    left_out = set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableArguments(f"{path}: {error}; give a file of JSON lines.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            run = str(row["run"])
            if row.get("label", "healthy") != "healthy":
                left_out.add(run)
            for item in _observations(row):
                runs.setdefault(run, {}).setdefault(item.order, item)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnusableArguments(
                f"{path}, line {number}: {error!r}; a line holds run, step and one or more of"
                f" {', '.join(SIGNALS)}, and may hold eval_stderr and label."
            ) from error
    return {run: [found[order] for order in sorted(found)] for run, found in runs.items() if run not in left_out}


def _observations(row: dict[str, Any]) -> list[Observation]:
    return [
        Observation(
            signal,
            row["step"],
            float(row[key]),
            None if row.get(f"{key}_stderr") is None else float(row[f"{key}_stderr"]),
        )
        for key, signal in SIGNALS.items()
        if row.get(key) is not None
    ]
