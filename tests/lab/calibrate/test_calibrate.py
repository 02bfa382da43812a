"""Calibration: a threshold stops the requested share of healthy runs; the shipped thresholds are those of a program."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evalstop_detectors import (
    DETECTORS,
    POLICIES,
    Detector,
    Kind,
    MetricRole,
    Observation,
    policy_from_document,
    policy_to_document,
    replay,
)
from evalstop_detectors.detectors.k_decline import KDecline
from evalstop_detectors.policy.calibration import SHIPPED_FILE
from evalstop_detectors.policy.shipped import DOCUMENTS
from evalstop_lab.calibrate.command import HEALTHY, record_worlds
from evalstop_lab.calibrate.evidence import (
    Records,
    calibrate_threshold,
    calibrate_thresholds,
    record_evidence,
    record_run,
)
from evalstop_lab.calibrate.own_history import calibrate_policy, count_runs_needed, is_for_calibration
from evalstop_lab.calibrate.shipped import main as write_shipped
from evalstop_lab.calibrate.shipped import write_calibrations
from evalstop_lab.cli import main
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.command import judge_all, load_policy
from evalstop_lab.replay.judged import judge_run
from evalstop_lab.replay.runs import Run
from evalstop_lab.replay.sources import read_runs
from evalstop_lab.worlds.scoring import clopper_pearson
from evalstop_lab.worlds.world import draw_world, plan_worlds
from evalstop_service.domain.outcome import assess_run
from evalstop_service.domain.statuses import RunOutcome
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.replay.conftest import list_rows, write_jsonl

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


def test_records_equal_the_verdicts_of_a_run_whose_eval_changes() -> None:
    """A fall between two measurements of the eval is no record, and the last eval is one if the run goes on."""
    run = Run("a", eval_versions={step: str(step > 2) for step in range(6)})
    for step, value in enumerate([0.7, 0.8, 0.9, 0.2, 0.1, 0.0]):
        run.add(MetricRole.EVAL, step, value, None)
    run.add(MetricRole.PROXY, 6, 1.0, None)
    assert record_run(KDecline(), run).alarms == (0.0, 1.0, 2.0)
    judged = judge_run(policy_from_document({"name": "p", "members": [{"detector": "k_decline"}]}), run)
    assert [item.value for item in judged.evidence] == [2.0]


@pytest.mark.slow
def test_thresholds_hold_on_other_seeds() -> None:
    """A threshold calibrated on 600 runs at 10 % stops 5 to 15 % of 600 others."""
    records = record_worlds(KDecline(), plan_worlds(600, families=HEALTHY))
    (ten_percent,) = calibrate_thresholds(records, [0.10])
    assert ten_percent.value is not None
    assert ten_percent.stopped.value <= 0.10
    other_records = record_worlds(KDecline(), plan_worlds(600, 50_000, families=HEALTHY))
    rate = sum(item.highest >= ten_percent.value for item in other_records) / 600
    assert ten_percent.stopped.value - 0.05 < rate < ten_percent.stopped.value + 0.05


def test_detector_without_evidence_cannot_be_calibrated() -> None:
    """Runs without the roles of the detector are refused."""
    with pytest.raises(UnusableArguments, match="No run has a metric"):
        calibrate_thresholds([Records(None, (), ())], [0.01])


def test_document_is_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    """It has detector, parameters, runs and the command that finds the same, for any number of processes."""
    arguments = ["calibrate", "k_decline", "--runs", "60", "--rates", "0.05", "0.2"]
    assert main([*arguments, "--jobs", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["detector"] == "k_decline"
    assert document["params"]["k"] == 3
    assert [row["rate"] for row in document["thresholds"]] == [0.05, 0.2]
    assert all(row["stopped"]["hits"] <= row["rate"] * 60 for row in document["thresholds"])
    assert document["data"] == {"source": "worlds", "runs": 60, "first_seed": 0}
    assert main([*shlex.split(document["command"])[1:], "--jobs", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == document


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["k_decline", "--params", '{"k": 0}'], "k"),
        (["k_decline", "--params", "{"], "--params"),
    ],
)
def test_unusable_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and the message states the problem."""
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


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


def test_program_writes_the_file(tmp_path: Path) -> None:
    """The written file has the detectors, seeds and commands of the calibrations."""
    write_shipped(tmp_path / "calibrations.json", runs=40)
    shipped = json.loads((tmp_path / "calibrations.json").read_text(encoding="utf-8"))
    expected = ["posterior", "focus", "river_drift", "divergence", "gao_fit"]
    assert [item["detector"] for item in shipped] == expected
    focus = shipped[1]
    assert (focus["data"]["first_seed"], focus["data"]["runs"]) == (0, 40)
    assert focus["command"].startswith("evalstop-lab calibrate focus --params ")
    assert [item["rate"] for item in focus["thresholds"]] == [0.01, 0.05, 0.1]


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
