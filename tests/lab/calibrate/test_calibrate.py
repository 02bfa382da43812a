"""Calibration: a threshold stops as many healthy runs as was asked for, and about as many fresh ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from evalstop_detectors import Kind, MetricRole, Observation, policy_from_document, replay
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_lab.calibrate.command import HEALTHY, highest_evidence, thresholds
from evalstop_lab.calibrate.evidence import Records, healthy_runs, records, records_of_run, to_alarm
from evalstop_lab.calibrate.thresholds import threshold
from evalstop_lab.cli import main
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.worlds import CALIBRATION, HELD_OUT, draw_world, plan_worlds
from hypothesis import given, settings
from hypothesis import strategies as st

alarms = st.floats(0, 100) | st.sampled_from([0.0, 1.0, 2.0, 3.0])
rates = st.floats(0.001, 0.5)


@given(st.lists(alarms, min_size=1, max_size=200), rates, st.sampled_from([Kind.FRACTION, Kind.P_VALUE]))
@settings(deadline=None)
def test_no_more_are_stopped_than_asked_for_and_one_more_would_be_too_many(
    highest: list[float], rate: float, kind: Kind
) -> None:
    """The threshold is the most lenient that keeps to the rate, ties apart."""
    highest = [to_alarm(kind, value) for value in highest]
    found = threshold(kind, highest, rate)
    if found.value is None:
        assert kind is Kind.P_VALUE
        assert sum(value >= 0 for value in highest) > rate * len(highest)
        return
    stopped = sum(value >= to_alarm(kind, found.value) for value in highest)
    assert found.stopped.hits == stopped <= rate * len(highest) + 1e-9
    below = [value for value in highest if value < to_alarm(kind, found.value)]
    if below and max(below) > 0:
        assert sum(value >= max(below) for value in highest) > rate * len(highest) - 1e-9


def test_a_threshold_by_hand() -> None:
    """Of 1 to 100, 1 % is stopped halfway between 99 and 100, 5 % between 95 and 96; of a p-value, 1 % below .015."""
    highest = [float(value) for value in range(1, 101)]
    assert threshold(Kind.FRACTION, highest, 0.01).value == 99.5
    assert threshold(Kind.FRACTION, highest, 0.05).value == 95.5
    assert threshold(Kind.COUNT, highest, 0.05).value == 96.0
    assert threshold(Kind.P_VALUE, [-value / 100 for value in highest], 0.01).value == pytest.approx(0.015)


def test_few_runs_give_a_wide_interval() -> None:
    """30 runs allow nothing at 1 %: the threshold lies just above all of them, and up to 12 % may still be stopped."""
    found = threshold(Kind.FRACTION, [float(value) for value in range(30)], 0.01)
    assert found.value is not None
    assert found.value > 29
    assert found.stopped.hits == 0
    assert found.stopped.high == pytest.approx(0.1157, abs=1e-3)


def test_runs_without_any_evidence_are_never_stopped() -> None:
    """Minus infinity is below every threshold, but every threshold a policy takes is above zero."""
    found = threshold(Kind.FRACTION, [-math.inf] * 99 + [2.0], 0.01)
    assert found.value is not None
    assert 0 < found.value <= 2.0
    assert found.stopped.hits == 1


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40), st.integers(1, 8))
def test_records_tell_what_a_policy_would_do_at_every_threshold(scores: list[float], k: int) -> None:
    """The first record at k is where a policy of threshold k stops, unless that is the last step."""
    run = [Observation(MetricRole.EVAL, 10 * index, value) for index, value in enumerate(scores)]
    policy = policy_from_document({"name": "p", "members": [{"detector": "k_decline", "params": {"k": k}}]})
    verdict = replay(policy, run[:-1]).verdict
    assert records(KDecline(), run).first_at(float(k)) == (verdict.step if verdict.stops else None)


def test_the_last_step_is_no_record() -> None:
    """To stop there saves nothing."""
    run = [Observation(MetricRole.EVAL, index, value) for index, value in enumerate([3.0, 2.0, 1.0])]
    assert records(KDecline(), run).highest == 1.0


def test_thresholds_hold_on_fresh_seeds() -> None:
    """Found on 600 runs at 10 %, a threshold stops 5 to 15 % of 600 others."""
    found = highest_evidence(KDecline(), plan_worlds(600, families=HEALTHY))
    kind, (ten_percent,) = thresholds(found, [0.10])
    assert ten_percent.value is not None
    assert ten_percent.stopped.value <= 0.10
    fresh = highest_evidence(KDecline(), plan_worlds(600, 50_000, families=HEALTHY))
    rate = sum(item.highest >= to_alarm(kind, ten_percent.value) for item in fresh) / 600
    assert ten_percent.stopped.value - 0.05 < rate < ten_percent.stopped.value + 0.05


def test_a_detector_that_saw_nothing_cannot_be_calibrated() -> None:
    """There is nothing to hold a threshold against."""
    with pytest.raises(UnusableArguments, match="none of its roles"):
        thresholds([Records(None, (), ())], [0.01])


def test_the_document_says_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Detector, parameters, seeds, families, versions and the command; the same whatever the number of processes."""
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


def test_ones_own_history_calibrates_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of a file, those with another label left out."""
    file = tmp_path / "history.jsonl"
    rows = [row for seed in range(20) for row in draw_world("plateau", seed, length=30, level=0.1).rows()]
    bad = [{"run": "bad", "step": step, "eval": -step, "label": "hacking"} for step in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]))
    assert set(healthy_runs([file])) == {f"plateau-{seed}" for seed in range(20)}
    assert main(["calibrate", "k_decline", "--history", str(file), "--rates", "0.1", "--jobs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["data"] == {"source": [str(file)], "runs": 20}
    highest = [records_of_run(KDecline(), run).highest for run in healthy_runs([file]).values()]
    stop_at = document["thresholds"][0]["threshold"]
    assert sum(value >= stop_at for value in highest) == document["thresholds"][0]["stopped"]["hits"] <= 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["k_decline", "--params", '{"k": 0}'], "k"),
        (["k_decline", "--params", "{"], "--params"),
        (["k_decline", "--first-seed", "19999999", "--runs", "5"], "are for reports"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what was wrong."""
    assert main(["calibrate", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_bad_line_of_a_history_is_named(tmp_path: Path) -> None:
    """The number of the line, and what a line holds."""
    file = tmp_path / "history.jsonl"
    file.write_text('{"run": "a", "step": 0, "eval": 1.0}\n{"run": "a", "eval": 1.0}\n')
    with pytest.raises(UnreadableInput, match=r"line 2.*step"):
        healthy_runs([file])


def test_columns_of_a_history_may_have_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CSV with names of its own is read as replay reads it."""
    file = tmp_path / "ours.csv"
    rows = [f"{run},{step},{(step * 7 + run) % 5}" for run in range(10) for step in range(30)]
    file.write_text("run,step,score\n" + "\n".join(rows) + "\n")
    arguments = ["calibrate", "k_decline", "--history", str(file), "--eval", "score", "--rates", "0.5", "--json"]
    assert main([*arguments, "--jobs", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["runs"] == 10
    assert main(["calibrate", "k_decline", "--history", "/nowhere/history.jsonl"]) == 1
    assert "/nowhere/history.jsonl" in capsys.readouterr().err
