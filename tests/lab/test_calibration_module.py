"""The module of calibrations: written by a program, read back as it was, and enough for the shipped policies."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import POLICIES, calibration, policy_to_document
from evalstop_detectors.shipped import DOCUMENTS
from evalstop_lab.calibration_module import asked_for, main, module_text


def test_the_module_is_as_it_was_written() -> None:
    """Nobody has put a number into it by hand, as far as its form can tell."""
    assert Path(calibration.__file__).read_text(encoding="utf-8") == module_text(calibration.CALIBRATIONS)


def test_what_policies_ask_for() -> None:
    """Each detector with its parameters once, with all the risks that any policy names and the usual ones."""
    drop = {"detector": "d", "params": {"a": 1}}
    documents: dict[str, dict[str, Any]] = {
        "p": {"members": [drop | {"stop_at": {"risk": 0.02}}, {"detector": "e", "stop_at": 3}]},
        "q": {"members": [drop | {"stop_at": None, "suspect_at": {"risk": 0.05}}]},
    }
    assert asked_for(documents) == {("d", '{"a": 1}'): [0.01, 0.02, 0.05, 0.1]}


def test_every_risk_of_a_shipped_policy_has_its_number() -> None:
    """A shipped policy is a document of numbers once it is read, and stops at a smaller risk than it suspects at."""
    for name in DOCUMENTS:
        for member in policy_to_document(POLICIES[name])["members"]:
            assert member["stop_at"] is None or member["suspect_at"] < member["stop_at"]


def test_the_module_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A calibration of what is shipped ends in a module with its detector, seeds and command."""
    assert main(["--runs", "40", "--output", str(tmp_path / "calibration.py")]) == 0
    (written,) = runpy.run_path(str(tmp_path / "calibration.py"))["CALIBRATIONS"]
    assert (written["detector"], written["data"]["first_seed"], written["data"]["runs"]) == ("plateau_drop", 0, 40)
    assert written["command"].startswith("evalstop-lab calibrate plateau_drop --params ")
    assert [item["rate"] for item in written["thresholds"]] == [0.01, 0.05, 0.1]
