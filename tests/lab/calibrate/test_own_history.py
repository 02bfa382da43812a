"""Thresholds for past runs: calibrated on one part, evaluated on another, with a warning if runs are few."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_lab.calibrate.own_history import calibrate_policy, count_runs_needed, is_for_calibration
from evalstop_lab.cli import main
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.command import judge_all, load_policy
from evalstop_lab.replay.runs import Run
from evalstop_lab.replay.sources import read_runs
from evalstop_lab.worlds.scoring import clopper_pearson
from evalstop_lab.worlds.world import draw_world
from evalstop_service.domain.outcome import assess_run
from evalstop_service.domain.statuses import RunOutcome

from tests.lab.replay.conftest import list_rows, write_jsonl


def test_report_equals_a_replay_of_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The written policy, replayed on the runs that it was not calibrated on, stops as many runs as reported."""
    families = ("plateau", "stairs", "gao_rl")
    rows = [row for seed in range(60) for row in list_rows(draw_world(families[seed % 3], seed, length=40))]
    log, file = write_jsonl(tmp_path / "runs.jsonl", rows), tmp_path / "ours.json"
    arguments = ["calibrate", str(log), "--false-stops", "0.1", "--detector", "k_decline", "--jobs", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    file.write_text(printed.out)
    runs = read_runs([log])
    runs.settle()
    assert json.loads(printed.out) == calibrate_policy(list(runs.by_name.values()), KDecline(), 0.1, 1)
    words = json.loads(printed.out)["description"]
    assert words.split() == printed.err.split()
    healthy = [run for run in runs.by_name.values() if assess_run(run.scores()).run_outcome is RunOutcome.HEALTHY]
    for calibrating in (True, False):
        part = [run for run in healthy if is_for_calibration(run.name) is calibrating]
        stopped = [
            item.stop_step
            for item, run in zip(judge_all(load_policy(str(file)), part, 1), part, strict=True)
            if item.stop_step is not None and item.stop_step < run.last_step
        ]
        if calibrating:
            assert len(stopped) <= 0.1 * len(part)
            assert f"calibrated on {len(part)} healthy runs" in words
        else:
            assert f"Of {len(part)} other healthy runs it stops {len(stopped)}:" in words
    assert "too few runs to show" in words


def test_runs_that_show_a_rate_are_counted() -> None:
    """No stop in 368 runs shows 1 %: the interval of 0 of 367 still holds it."""
    assert count_runs_needed(0.01) == 368
    assert clopper_pearson(0, 368).high <= 0.01 < clopper_pearson(0, 367).high


def test_too_few_healthy_runs_are_refused(tmp_path: Path) -> None:
    """The message has the number of healthy runs; ten in each part are enough for a threshold, but not for a lower one
    to suspect at."""
    with pytest.raises(UnusableArguments, match="Only 0 of 1 runs are healthy"):
        calibrate_policy([Run("a")], KDecline(), 0.01, 1)
    runs = list(read_runs([write_jsonl(tmp_path / "runs.jsonl", rising_rows(30))]).by_name.values())
    calibrating = [run for run in runs if is_for_calibration(run.name)]
    others = [run for run in runs if not is_for_calibration(run.name)]
    with pytest.raises(UnusableArguments, match="9 for calibration and 10 to evaluate it"):
        calibrate_policy([*calibrating[:9], *others[:10]], KDecline(), 0.1, 1)
    document = calibrate_policy([*calibrating[:10], *others[:10]], KDecline(), 0.1, 1)
    assert "calibrated on 10 healthy runs" in document["description"]
    (member,) = document["members"]
    assert (member["suspect_at"], member["stop_at"]) == (None, 1.0)


def rising_rows(count: int) -> list[dict[str, Any]]:
    """The rows of this many runs whose eval only rises."""
    return [{"run": f"run-{run}", "step": step, "eval": step / 30} for run in range(count) for step in range(30)]


def test_source_without_false_stops_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message about the unknown detector mentions --false-stops."""
    assert main(["calibrate", "runs.jsonl"]) == 2
    assert "With past runs give --false-stops" in capsys.readouterr().err
