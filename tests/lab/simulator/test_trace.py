"""Traces: a cluster's log is read in several formats, and errors name the line."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.errors import UnreadableInput
from evalstop_lab.simulator.trace import compute_load, find_cluster_size, read_trace

from tests.lab.simulator.conftest import read_report


def write_csv(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_phillys_columns_are_read(tmp_path: Path) -> None:
    """Times are dates, durations are start to end; jobs that never ran are skipped."""
    file = write_csv(
        tmp_path / "philly.csv",
        "status,vc,jobid,user,submitted_time,start_time,end_time,gpus",
        "Pass,ee9e8c,application_2,u1,2017-10-03 10:00:00,2017-10-03 10:30:00,2017-10-03 12:30:00,8",
        "Killed,ed69ec,application_1,u2,2017-10-03 09:00:00,2017-10-03 09:00:00,2017-10-03 09:30:00,1",
        "Failed,ed69ec,application_3,u2,2017-10-03 11:00:00,None,None,4",
        "Pass,ee9e8c,application_4,u1,2017-10-03 11:00:00,2017-10-03 11:00:00,2017-10-03 12:00:00,0",
    )
    trace = read_trace(file)
    assert trace.submitted.tolist() == [0.0, 1.0]
    assert trace.hours.tolist() == [0.5, 2.0]
    assert trace.gpus.tolist() == [1, 8]
    assert trace.skipped == 2


def test_times_in_seconds_are_read(tmp_path: Path) -> None:
    """Times may be seconds, with a column for the duration."""
    trace = read_trace(
        write_csv(tmp_path / "t.csv", "job_id,submit_time,num_gpu,duration", "1,60,2,7200", "2,3660,4,1800")
    )
    assert trace.submitted.tolist() == [0.0, 1.0]
    assert trace.hours.tolist() == [2.0, 0.5]
    assert trace.gpus.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("submit_time,duration", "1,2", "no column with the GPUs; name it gpus"),
        ("duration,gpus", "1,2", "no column with the time of submission"),
        ("submit_time,gpus", "1,2", "needs a column `duration`, or both of start_time and end_time"),
        ("submit_time,duration,gpus", "yesterday,2,1", "line 2: 'yesterday' is not a time; give seconds, or a date"),
        ("submit_time,duration,gpus", "0,long,1", "line 2: 'long' is not a number"),
        ("submit_time,duration,gpus", "0,5,1.5", "line 2: a job has 1.5 GPUs; give a non-negative integer"),
        ("submit_time,duration,gpus", "0,5", "line 2: 2 cells where the header has 3"),
        ("submit_time,duration,gpus,gpus", "0,5,1,1", "line 1: the header has a column twice"),
        ("submit_time,duration,gpus", "0,0,1", "it has no job that ran on GPUs"),
    ],
)
def test_errors_name_line_and_remedy(tmp_path: Path, header: str, row: str, message: str) -> None:
    """The message for an unusable file has the line, its problem and what to give instead."""
    with pytest.raises(UnreadableInput) as caught:
        read_trace(write_csv(tmp_path / "t.csv", header, row))
    assert message in str(caught.value)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """A day of jobs with whole GPUs and random lengths."""
    rng = np.random.default_rng(5)
    file = tmp_path / "jobs.csv"
    with file.open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["submit_time", "duration", "gpus", "user"])
        for second in np.sort(rng.uniform(0, 86_400, 120)):
            rows.writerow([f"{second:.0f}", f"{rng.lognormal(8.5, 1):.0f}", int(rng.choice([1, 2, 4, 8])), "u"])
    return file


def test_stopping_on_a_trace(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's rule saves GPU-hours, the oracle saves more, and both shorten the mean time."""
    report = read_report(capsys, "trace", str(trace_file), "--policies", "paper", "--seeds", "2")
    assert report["jobs"] == 120
    assert report["load"] <= 0.85
    for rules in report["results"].values():
        ours, best = rules["paper"], rules["oracle"]
        assert 0 < ours["gpu_hours_saved"]["value"] < best["gpu_hours_saved"]["value"]
        assert best["time"]["value"] < ours["time"]["value"] < 0


def test_cluster_is_large_enough(trace_file: Path) -> None:
    """By default the cluster is the smallest number of whole nodes whose load is at most 85 %."""
    trace = read_trace(trace_file)
    gpus = find_cluster_size(trace)
    assert gpus % 8 == 0
    assert compute_load(trace, gpus) <= 0.85 < compute_load(trace, gpus - 8)


def test_cluster_that_is_too_small_is_refused(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that is larger than the cluster is an error that states the required number of GPUs."""
    assert main(["cluster", "trace", str(trace_file), "--gpus", "4"]) == 2
    assert "needs 8 GPUs; --gpus must be at least as many" in capsys.readouterr().err
