"""`python -m evalstop_lab.calibrate.shipped`: calibrates the shipped policies and writes the results.

The file has one line per detector and parameters: thresholds, the highest evidence of the first runs, which shows
whether the detector has changed since, and the command that prints everything else again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evalstop_detectors.policy import shipped
from evalstop_detectors.policy.calibration import SHIPPED_FILE

from evalstop_lab import cli
from evalstop_lab.arguments import positive_number

_RATES = (0.01, 0.05, 0.1)


def collect_risks(documents: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """The risks that policies request, and those of `_RATES`, by detector and parameters (as JSON)."""
    by_detector: dict[tuple[str, str], set[float]] = {}
    for document in documents.values():
        for member in document["members"]:
            thresholds = (member.get("suspect_at"), member.get("stop_at"))
            risks = {threshold["risk"] for threshold in thresholds if isinstance(threshold, dict)}
            if risks:
                params = json.dumps(member.get("params", {}))
                by_detector.setdefault((member["detector"], params), set(_RATES)).update(risks)
    return {key: sorted(risks) for key, risks in by_detector.items()}


def write_calibrations(path: Path, calibrations: Iterable[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(_select_kept(item)) for item in calibrations)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _select_kept(calibration: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        key: calibration[key] for key in ("detector", "params", "thresholds", "highest_of_first", "data", "command")
    }
    levels = [{key: level[key] for key in ("rate", "threshold")} for level in kept["thresholds"]]
    data = {key: kept["data"][key] for key in ("source", "runs", "first_seed")}
    return kept | {"thresholds": levels, "data": data}


def run_calibration(detector: str, params: str, rates: Sequence[float], runs: int) -> dict[str, Any]:
    """Run `evalstop-lab calibrate` on simulated runs and return its result."""
    command = ["calibrate", detector, "--params", params, "--runs", str(runs), "--rates", *map(str, rates)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "calibration.json"
        if code := cli.main([*command, "--output", str(output)]):
            sys.exit(code)
        calibration: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return calibration | {"command": "evalstop-lab " + shlex.join(command)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate and write the file; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--runs", type=positive_number, default=10_000, help="number of runs (default: 10000)")
    parser.add_argument("--output", type=Path, default=Path(str(SHIPPED_FILE)), metavar="FILE", help="file to write")
    args = parser.parse_args(arguments)
    risks = collect_risks(shipped.DOCUMENTS)
    calibrations = [run_calibration(detector, params, rates, args.runs) for (detector, params), rates in risks.items()]
    write_calibrations(args.output, calibrations)
    return 0


if __name__ == "__main__":
    sys.exit(main())
