"""The file of calibrations is written by a program, and has all calibrations of the shipped policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evalstop_detectors import DETECTORS, POLICIES, Detector, policy_to_document
from evalstop_detectors.policy.calibration import SHIPPED_FILE
from evalstop_detectors.policy.shipped import DOCUMENTS
from evalstop_lab.calibrate.command import HEALTHY, record_worlds
from evalstop_lab.calibrate.shipped import main, write_calibrations
from evalstop_lab.worlds.world import plan_worlds

CALIBRATIONS: list[dict[str, Any]] = json.loads(SHIPPED_FILE.read_text(encoding="utf-8"))


def test_file_equals_the_programs_output(tmp_path: Path) -> None:
    """The file equals the program's output for its calibrations."""
    write_calibrations(tmp_path / "written.json", CALIBRATIONS)
    assert (tmp_path / "written.json").read_bytes() == SHIPPED_FILE.read_bytes()


def test_every_risk_of_a_shipped_policy_has_a_threshold() -> None:
    """Loaded policies have numbers instead of risks, and suspect before they stop."""
    for name in DOCUMENTS:
        for member in policy_to_document(POLICIES[name])["members"]:
            ends = (member["suspect_at"], member["stop_at"])
            assert None in ends or ends[0] < ends[1]


@pytest.mark.parametrize("item", CALIBRATIONS, ids=lambda item: item["detector"])
def test_calibrations_are_current(item: dict[str, Any]) -> None:
    """Neither the detector nor the runs have changed since the calibration."""
    detector: Detector[Any] = msgspec.convert(item["params"], DETECTORS[item["detector"]])
    stored, data = item["highest_of_first"], item["data"]
    recipes = plan_worlds(data["runs"], data["first_seed"], HEALTHY)[: len(stored)]
    highest = [records.highest for records in record_worlds(detector, recipes)]
    remedy = "its thresholds are stale: run `python -m evalstop_lab.calibrate.shipped` and the benchmark"
    assert len(stored) == 50
    assert highest == pytest.approx(stored, rel=1e-5), f"{detector.name} has changed, {remedy}"


def test_program_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The written file has the detectors, seeds and commands of the calibrations."""
    assert main(["--runs", "40", "--output", str(tmp_path / "calibrations.json")]) == 0
    shipped = json.loads((tmp_path / "calibrations.json").read_text(encoding="utf-8"))
    expected = ["posterior", "focus", "river_drift", "divergence", "gao_fit"]
    assert [item["detector"] for item in shipped] == expected
    focus = shipped[1]
    assert (focus["data"]["first_seed"], focus["data"]["runs"]) == (0, 40)
    assert focus["command"].startswith("evalstop-lab calibrate focus --params ")
    assert [item["rate"] for item in focus["thresholds"]] == [0.01, 0.05, 0.1]
