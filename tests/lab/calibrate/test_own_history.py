"""Thresholds for one's own history: found on one part, reported on another, and honest where runs are few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evalstop_detectors.detectors.k_below_best import KBelowBest
from evalstop_lab.calibrate.own_history import calibrated, is_first, promise, runs_needed
from evalstop_lab.cli import main
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay import Run, load_policy, read
from evalstop_lab.replay.command import judge_all
from evalstop_lab.worlds import draw_world
from evalstop_service.rules.outcome import assess_run
from evalstop_service.rules.statuses import RunOutcome

from tests.lab.replay.conftest import write_jsonl


def test_what_is_reported_is_what_the_policy_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is a policy; replayed, it stops just as many runs of the part it was not found on as was said."""
    families = ("plateau", "stairs", "gao_rl")
    rows = [row for seed in range(60) for row in draw_world(families[seed % 3], seed, length=40).rows()]
    log, file = write_jsonl(tmp_path / "runs.jsonl", rows), tmp_path / "ours.json"
    arguments = ["calibrate", str(log), "--false-stops", "0.1", "--detector", "k_below_best", "--jobs", "1", "--json"]
    assert main([*arguments, "--output", str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == document["policy"]
    runs = read([log])
    runs.settle()
    healthy = [run for run in runs.by_name.values() if assess_run(run.scores()).run_outcome is RunOutcome.HEALTHY]
    assert document["healthy"] == len(healthy) == document["calibrated_on"] + document["reported_on"]
    for first, most in ((True, 0.1 * document["calibrated_on"]), (False, document["false_stops"]["hits"])):
        some = [run for run in healthy if is_first(run.name) is first]
        stopped = [
            item.stop_step
            for item, run in zip(judge_all(load_policy(str(file)), some, 1), some, strict=True)
            if item.stop_step is not None and item.stop_step < run.last_step
        ]
        assert len(stopped) <= most if first else len(stopped) == most
    assert document["promise"] == "too_few"
    assert "too few runs for this promise" in document["policy"]["description"]


def test_a_promise_is_judged_by_the_part_it_was_not_found_on() -> None:
    """None of 368 shows 1 %, none of 367 does not; 50 of 1,000 breaks it; few runs are said to be few."""
    assert runs_needed(0.01) == 368
    assert promise(0.01, 400, 0, 368) == "shown"
    assert promise(0.01, 400, 0, 367) == "too_few"
    assert promise(0.01, 99, 5, 1000) == "too_few"
    assert promise(0.01, 400, 8, 1000) == "open"
    assert promise(0.01, 400, 50, 1000) == "broken"


def test_no_healthy_run_no_threshold() -> None:
    """It is said how many of the runs are healthy, and nothing is written."""
    with pytest.raises(UnusableArguments, match="Of 1 runs 0 are healthy"):
        calibrated([Run("a")], KBelowBest(), 0.01, 1)


def test_a_detector_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """A source without --false-stops is taken for a detector, and the answer says how it is meant."""
    assert main(["calibrate", "runs.jsonl"]) == 2
    assert "Past runs go with --false-stops" in capsys.readouterr().err
