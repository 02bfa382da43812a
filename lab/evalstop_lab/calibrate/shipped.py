"""`python -m evalstop_lab.calibrate.shipped`: calibrates the shipped policies and writes the results.

The file has one line per detector and parameters: thresholds, the highest evidence of the first runs, which shows
whether the detector has changed since, and the command that prints everything else again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import joblib
import msgspec
from evalstop_detectors import DETECTORS, Detector
from evalstop_detectors.policy import shipped
from evalstop_detectors.policy.calibration import SHIPPED_FILE

from evalstop_lab.calibrate.command import calibrate_on_worlds

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
    lines = ",\n".join(map(json.dumps, calibrations))
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main(path: Path = Path(str(SHIPPED_FILE)), runs: int = 10_000) -> None:
    """Calibrate on this many simulated runs, and write what is shipped of it."""
    calibrations = []
    for (name, params), rates in collect_risks(shipped.DOCUMENTS).items():
        detector: Detector[Any] = msgspec.convert(json.loads(params), DETECTORS[name])
        calibration = calibrate_on_worlds(detector, rates, runs, joblib.cpu_count(), params)
        levels = [{key: level[key] for key in ("rate", "threshold")} for level in calibration["thresholds"]]
        calibrations.append(calibration | {"thresholds": levels})
    write_calibrations(path, calibrations)


if __name__ == "__main__":
    main()
