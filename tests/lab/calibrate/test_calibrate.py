"""Calibration: a threshold stops the requested share of healthy runs, and about as many other runs."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import Kind, MetricRole, Observation, policy_from_document, replay
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_lab.calibrate.command import HEALTHY, record_worlds
from evalstop_lab.calibrate.evidence import (
    Records,
    calibrate_threshold,
    calibrate_thresholds,
    read_healthy_runs,
    record_evidence,
    record_run,
)
from evalstop_lab.cli import main
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay.judged import judge_runs
from evalstop_lab.replay.runs import Run
from evalstop_lab.worlds.families import CALIBRATION, HELD_OUT
from evalstop_lab.worlds.world import draw_world, plan_worlds
from hypothesis import given
from hypothesis import strategies as st

alarms = st.floats(0, 100) | st.sampled_from([0.0, 1.0, 2.0, 3.0])
rates = st.floats(0.001, 0.5)


@given(st.lists(alarms, min_size=1, max_size=200), rates, st.sampled_from([Kind.STATISTIC, Kind.POSTERIOR]))
def test_threshold_is_the_most_lenient_one(highest: list[float], rate: float, kind: Kind) -> None:
    """It stops at most the requested share of runs, and a more lenient one would stop more, except for ties.

    There is none if too many runs show the highest possible evidence.
    """
    highest = [min(value, kind.upper_bound) for value in highest]
    threshold = calibrate_threshold(kind, highest, rate)
    if threshold.value is None:
        assert sum(value >= kind.upper_bound for value in highest) > rate * len(highest)
        return
    assert threshold.value <= kind.upper_bound
    stopped = sum(value >= threshold.value for value in highest)
    assert threshold.stopped.hits == stopped <= rate * len(highest) + 1e-9
    below = [value for value in highest if value < threshold.value]
    if below and max(below) > 0:
        assert sum(value >= max(below) for value in highest) > rate * len(highest) - 1e-9


def test_thresholds_equal_those_computed_by_hand() -> None:
    """For 1 to 100 the threshold of 1 % is 99.5 and of 5 % 95.5, or 96 for a count."""
    highest = [float(value) for value in range(1, 101)]
    assert calibrate_threshold(Kind.STATISTIC, highest, 0.01).value == 99.5
    assert calibrate_threshold(Kind.STATISTIC, highest, 0.05).value == 95.5
    assert calibrate_threshold(Kind.COUNT, highest, 0.05).value == 96.0


@pytest.mark.parametrize("kind", [Kind.STATISTIC, Kind.COUNT])
def test_interval_contains_the_threshold(kind: Kind) -> None:
    """The threshold for 5 % of a thousand runs lies within the interval given for it, also where values repeat."""
    for values in ([float(value) for value in range(1000)], [1.0] * 900 + [2.0] * 60 + [3.0] * 40, [2.0] * 1000):
        threshold = calibrate_threshold(kind, values, 0.05)
        assert threshold.value is not None
        assert threshold.low <= threshold.value <= math.nextafter(threshold.high, math.inf)


def test_few_runs_give_a_wide_interval() -> None:
    """With 30 runs the threshold of 1 % is just above all of them, and up to 12 % of other runs may be stopped."""
    threshold = calibrate_threshold(Kind.STATISTIC, [float(value) for value in range(30)], 0.01)
    assert threshold.value is not None
    assert threshold.value > 29
    assert threshold.stopped.hits == 0
    assert threshold.stopped.high == pytest.approx(0.1157, abs=1e-3)


def test_runs_without_any_evidence_are_never_stopped() -> None:
    """Their highest evidence is minus infinity, and the threshold is above zero."""
    threshold = calibrate_threshold(Kind.STATISTIC, [-math.inf] * 99 + [2.0], 0.01)
    assert threshold.value is not None
    assert 0 < threshold.value <= 2.0
    assert threshold.stopped.hits == 1


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40), st.integers(1, 8))
def test_records_give_the_stop_at_every_threshold(scores: list[float], k: int) -> None:
    """A policy with threshold k stops at the first record that reaches k, unless that is the last step."""
    run = [Observation(MetricRole.EVAL, 10 * index, value) for index, value in enumerate(scores)]
    policy = policy_from_document({"name": "p", "members": [{"detector": "k_decline", "params": {"k": k}}]})
    verdict = replay(policy, run[:-1]).verdict
    assert record_evidence(KDecline(), run, run[-1].step).first_at(float(k)) == (
        verdict.step if verdict.stops else None
    )


def test_last_step_has_no_record() -> None:
    """A stop at the last step saves nothing."""
    run = [Observation(MetricRole.EVAL, index, value) for index, value in enumerate([3.0, 2.0, 1.0])]
    assert record_evidence(KDecline(), run, 2).highest == 1.0


def test_records_equal_the_verdicts_of_a_run_whose_eval_changes() -> None:
    """A fall between two measurements of the eval is no record, and the last eval is one if the run goes on."""
    run = Run("a", eval_versions={step: str(step > 2) for step in range(6)})
    for step, value in enumerate([0.7, 0.8, 0.9, 0.2, 0.1, 0.0]):
        run.add(MetricRole.EVAL, step, value, None)
    run.add(MetricRole.PROXY, 6, 1.0, None)
    assert record_run(KDecline(), run).alarms == (0.0, 1.0, 2.0)
    (judged,) = judge_runs(policy_from_document({"name": "p", "members": [{"detector": "k_decline"}]}), [run])
    assert judged.detectors["k_decline"]["value"] == 2.0


@pytest.mark.slow
def test_thresholds_hold_on_other_seeds() -> None:
    """A threshold calibrated on 600 runs at 10 % stops 5 to 15 % of 600 others."""
    records = record_worlds(KDecline(), plan_worlds(600, families=HEALTHY))
    _, (ten_percent,) = calibrate_thresholds(records, [0.10])
    assert ten_percent.value is not None
    assert ten_percent.stopped.value <= 0.10
    other_records = record_worlds(KDecline(), plan_worlds(600, 50_000, families=HEALTHY))
    rate = sum(item.highest >= ten_percent.value for item in other_records) / 600
    assert ten_percent.stopped.value - 0.05 < rate < ten_percent.stopped.value + 0.05


def test_detector_without_evidence_cannot_be_calibrated() -> None:
    """Runs without the roles of the detector are refused."""
    with pytest.raises(UnusableArguments, match="No run has a metric"):
        calibrate_thresholds([Records(None, (), ())], [0.01])


def test_document_is_reproducible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has detector, parameters, seeds, families, versions and command, for any number of processes."""
    file = tmp_path / "thresholds.json"
    arguments = ["calibrate", "k_decline", "--runs", "60", "--rates", "0.05", "0.2", "--json"]
    assert main([*arguments, "--jobs", "1", "--output", str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == document
    assert document["detector"] == "k_decline"
    assert document["params"]["k"] == 3
    assert [row["rate"] for row in document["thresholds"]] == [0.05, 0.2]
    assert all(row["stopped"]["hits"] <= row["rate"] * 60 for row in document["thresholds"])
    assert set(document["data"]["families"]) <= set(CALIBRATION)
    assert document["data"]["held_out"] == sorted(HELD_OUT)
    assert document["data"]["first_seed"] == 0
    assert {"evalstop-detectors", "numpy"} <= set(document["versions"])
    assert main([*arguments, "--jobs", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["thresholds"] == document["thresholds"]


def read_history(path: Path, total_steps: int | None = None) -> list[Run]:
    roles = dict.fromkeys(MetricRole)
    return read_healthy_runs(
        argparse.Namespace(history=[path], minimize=[], step=None, total_steps=total_steps, **roles)
    )


def test_thresholds_are_calibrated_on_a_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Thresholds are calibrated on the runs of a file, without those that ended early."""
    file = tmp_path / "history.jsonl"
    rows = [row for seed in range(20) for row in draw_world("plateau", seed, length=30, level=0.1).rows()]
    bad = [{"run": "bad", "step": step, "eval": -step, "total_steps": 90} for step in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]))
    assert {run.name for run in read_history(file)} == {f"plateau-{seed}" for seed in range(20)}
    other_name = tmp_path / "history.ndjson"
    other_name.write_text(file.read_text())
    assert [run.name for run in read_history(other_name)] == [run.name for run in read_history(file)]
    assert main(["calibrate", "k_decline", "--history", str(file), "--rates", "0.1", "--jobs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["data"] == {"source": [str(file)], "runs": 20}
    highest = [record_run(KDecline(), run).highest for run in read_history(file)]
    stop_at = document["thresholds"][0]["threshold"]
    assert sum(value >= stop_at for value in highest) == document["thresholds"][0]["stopped"]["hits"] <= 2


def test_runs_without_evidence_are_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of a single eval has no evidence that could stop it, and JSON has no infinity."""
    file = tmp_path / "history.jsonl"
    rows = [{"run": f"run-{run}", "step": 0, "eval": 1.0} for run in range(4)] + [
        {"run": "run-3", "step": 1, "eval": 2}
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["calibrate", "k_decline", "--history", str(file), "--jobs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["highest_of_first"] == [None, None, None, 0.0]
    assert document["thresholds"][0]["interval"] == [None, 1.0]


def test_planned_length_of_a_history_is_used(tmp_path: Path) -> None:
    """Runs that do not report their length have the one that is given."""
    file = tmp_path / "history.jsonl"
    rows: list[dict[str, Any]] = [{"run": f"run-{run}", "step": 7 + 93 * run, "proxy": 1.0} for run in range(2)]
    rows[0]["total_steps"] = 7
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [run.total_steps for run in read_history(file, total_steps=100)] == [7, 100]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["k_decline", "--params", '{"k": 0}'], "k"),
        (["k_decline", "--params", "{"], "--params"),
        (["k_decline", "--first-seed", "19999999", "--runs", "5"], "are for reports"),
    ],
)
def test_unusable_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and the message states the problem."""
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bad_line_of_a_history_is_named(tmp_path: Path) -> None:
    """The message has the number of the line and the missing field."""
    file = tmp_path / "history.jsonl"
    file.write_text('{"run": "a", "step": 0, "eval": 1.0}\n{"run": "a", "eval": 1.0}\n')
    with pytest.raises(UnreadableInput, match=r"line 2.*step"):
        read_history(file)


def test_columns_of_a_history_may_have_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options of replay set the columns of a CSV."""
    file = tmp_path / "ours.csv"
    rows = [f"{run},{step},{(step * 7 + run) % 5}" for run in range(10) for step in range(30)]
    file.write_text("run,step,score\n" + "\n".join(rows) + "\n")
    arguments = ["calibrate", "k_decline", "--history", str(file), "--eval", "score", "--rates", "0.5", "--json"]
    assert main([*arguments, "--jobs", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["runs"] == 10
    assert main(["calibrate", "k_decline", "--history", "/nowhere/history.jsonl"]) == 1
    assert "/nowhere/history.jsonl" in capsys.readouterr().err
