"""Traces: a cluster's log in any of its forms becomes jobs, and what is wrong with it is said with its line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.errors import UnreadableInput
from evalstop_lab.simulator.trace import enough, load
from evalstop_lab.simulator.trace_file import read


def write(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_philly(tmp_path: Path) -> None:
    """Philly's columns are understood: dates, a start and an end, virtual clusters as tenants, rows that never ran."""
    file = write(
        tmp_path / "philly.csv",
        "status,vc,jobid,user,submitted_time,start_time,end_time,gpus",
        "Pass,ee9e8c,application_2,u1,2017-10-03 10:00:00,2017-10-03 10:30:00,2017-10-03 12:30:00,8",
        "Killed,ed69ec,application_1,u2,2017-10-03 09:00:00,2017-10-03 09:00:00,2017-10-03 09:30:00,1",
        "Failed,ed69ec,application_3,u2,2017-10-03 11:00:00,None,None,4",
        "Pass,ee9e8c,application_4,u1,2017-10-03 11:00:00,2017-10-03 11:00:00,2017-10-03 12:00:00,0",
    )
    trace = read(file)
    assert trace.submitted.tolist() == [0.0, 1.0]
    assert trace.hours.tolist() == [0.5, 2.0]
    assert trace.gpus.tolist() == [1, 8]
    assert trace.tenants.tolist() == [0, 1]
    assert trace.skipped == 2


def test_seconds(tmp_path: Path) -> None:
    """The plain form, as simulators share traces: seconds from the first, and a duration."""
    trace = read(write(tmp_path / "t.csv", "job_id,submit_time,num_gpu,duration", "1,60,2,7200", "2,3660,4,1800"))
    assert trace.submitted.tolist() == [0.0, 1.0]
    assert trace.hours.tolist() == [2.0, 0.5]
    assert trace.gpus.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        ("submit_time,duration", "1,2", "no column with the GPUs; name one gpus"),
        ("duration,gpus", "1,2", "no column with the time of submission"),
        ("submit_time,gpus", "1,2", "no column `duration`, and not both of start_time and end_time"),
        ("submit_time,duration,gpus", "yesterday,2,1", "line 2: 'yesterday' is no time; give seconds, or a date"),
        ("submit_time,duration,gpus", "0,long,1", "line 2: 'long' is no number"),
        ("submit_time,duration,gpus", "0,5,1.5", "line 2: a job of 1.5 GPUs; give a whole number"),
        ("submit_time,duration,gpus", "0,5", "line 2: 2 cells where the header has 3"),
        ("submit_time,duration,gpus,gpus", "0,5,1,1", "line 1: the header has a column twice"),
        ("submit_time,duration,gpus", "0,0,1", "it holds no job that ran on GPUs"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, header: str, row: str, words: str) -> None:
    """An unusable file names the line, what stands there and what to give instead."""
    with pytest.raises(UnreadableInput) as caught:
        read(write(tmp_path / "t.csv", header, row))
    assert words in str(caught.value)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A day of jobs with whole GPUs and random lengths."""
    rng = np.random.default_rng(5)
    file = tmp_path / "jobs.csv"
    with file.open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["submit_time", "duration", "gpus", "user"])
        for second in np.sort(rng.uniform(0, 86_400, 120)):
            rows.writerow([f"{second:.0f}", f"{rng.lognormal(8.5, 1):.0f}", int(rng.choice([1, 2, 4, 8])), "u"])
    return file


def test_stopping_on_a_trace(drawn: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The oracle brings back more than the paper's rule, which brings back something; both shorten the mean time."""
    words = ["cluster", "trace", str(drawn), "--policies", "paper", "--seeds", "2", "--jobs", "1", "--json"]
    assert main([*words, "--plots", str(tmp_path)]) == 0
    assert (tmp_path / "trace.png").stat().st_size > 10_000
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["jobs"] == 120
    assert report["load"] <= 0.85
    for rules in report["results"].values():
        ours, best = rules["paper"], rules["oracle"]
        assert 0 < ours["gpu_hours_saved"]["value"] < best["gpu_hours_saved"]["value"]
        assert best["time"]["value"] < ours["time"]["value"] < 0


def test_the_cluster_is_large_enough(drawn: Path) -> None:
    """Unless told otherwise the cluster is the smallest of whole nodes that is not too busy."""
    trace = read(drawn)
    gpus = enough(trace)
    assert gpus % 8 == 0
    assert load(trace, gpus) <= 0.85 < load(trace, gpus - 8)


def test_a_cluster_that_is_too_small_is_refused(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gang that fits nowhere is an error that says how many GPUs are needed."""
    assert main(["cluster", "trace", str(drawn), "--gpus", "4"]) == 2
    assert "wants 8 GPUs; give --gpus at least as many" in capsys.readouterr().err
