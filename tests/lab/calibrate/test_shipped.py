"""The module of calibrations: written by a program, read back as it was, and enough for the shipped policies."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evalstop_detectors import DETECTORS, POLICIES, Detector, policy_to_document
from evalstop_detectors.policy import shipped_calibrations
from evalstop_detectors.policy.shipped import DOCUMENTS
from evalstop_lab.calibrate.command import highest_evidence
from evalstop_lab.calibrate.shipped import asked_for, main, module_text
from evalstop_lab.worlds import plan_worlds


def test_the_module_is_as_it_was_written() -> None:
    """Nobody has put a number into it by hand, as far as its form can tell."""
    assert Path(shipped_calibrations.__file__).read_text(encoding="utf-8") == module_text(
        shipped_calibrations.CALIBRATIONS
    )


def test_what_policies_ask_for() -> None:
    """Each detector with its parameters once, with all the risks that any policy names and the usual ones."""
    drop = {"detector": "d", "params": {"a": 1}}
    documents: dict[str, dict[str, Any]] = {
        "p": {"members": [drop | {"stop_at": {"risk": 0.02}}, {"detector": "e", "stop_at": 3}]},
        "q": {"members": [drop | {"stop_at": None, "suspect_at": {"risk": 0.05}}]},
    }
    asked = asked_for(documents)
    assert asked.pop(("plateau_drop", '{"sigmas": 1.5, "use_proxy": true}')) == [0.01, 0.05, 0.1]
    assert asked == {("d", '{"a": 1}'): [0.01, 0.02, 0.05, 0.1]}


def test_every_risk_of_a_shipped_policy_has_its_number() -> None:
    """A shipped policy is a document of numbers once it is read, and stops at a smaller risk than it suspects at."""
    for name in DOCUMENTS:
        for member in policy_to_document(POLICIES[name])["members"]:
            assert member["stop_at"] is None or member["suspect_at"] < member["stop_at"]


@pytest.mark.parametrize("item", shipped_calibrations.CALIBRATIONS, ids=lambda item: item["detector"])
def test_no_threshold_is_that_of_a_detector_as_it_was(item: dict[str, Any]) -> None:
    """The detector, and the runs it was calibrated on, are still as they were when the thresholds were found."""
    detector: Detector[Any] = msgspec.convert(item["params"], DETECTORS[item["detector"]])
    remembered, data = item["highest_of_first"], item["data"]
    recipes = plan_worlds(data["runs"], data["first_seed"], data["families"])[: len(remembered)]
    found = [records.highest for records in highest_evidence(detector, recipes)]
    again = "its thresholds are stale: run `python -m evalstop_lab.calibrate.shipped` and the benchmark"
    assert len(remembered) == 50
    assert found == pytest.approx(remembered, rel=1e-5), f"{detector.name} has changed, {again}"


def test_the_module_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A calibration of what is shipped ends in a module with its detector, seeds and command."""
    assert main(["--runs", "40", "--output", str(tmp_path / "calibration.py")]) == 0
    written, shipped = runpy.run_path(str(tmp_path / "calibration.py"))["CALIBRATIONS"]
    assert shipped["detector"] == "posterior"
    assert (written["detector"], written["data"]["first_seed"], written["data"]["runs"]) == ("plateau_drop", 0, 40)
    assert written["command"].startswith("evalstop-lab calibrate plateau_drop --params ")
    assert [item["rate"] for item in written["thresholds"]] == [0.01, 0.05, 0.1]
