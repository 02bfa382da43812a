"""Backtests: figures equal those computed by hand, and the page lists every run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import POLICIES, MetricRole
from evalstop_lab.backtest.cases import Case, assess_outcome, compare_policies, judge_cases, summarize_policy
from evalstop_lab.backtest.command import build_report
from evalstop_lab.backtest.page import MOST_POINTS, rank_harm, write_page
from evalstop_lab.cli import main
from evalstop_lab.replay.runs import Run
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import expect

from tests.lab.replay.conftest import write_jsonl
from tests.service.web.pages.serving import NoChromium, launch_chromium

RISING = [0.1 * index for index in range(24)]
TURNING = [*RISING[:12], *(1.1 - 0.1 * index for index in range(12))]
"""The best mean is near the twelfth eval; the third decline in a row is at the sixteenth."""

DIPPING = [*RISING[:6], 0.4, 0.3, 0.2, *RISING[9:]]
TURNING_LATE = [*RISING[:20], *(1.9 - 0.3 * index for index in range(1, 5))]


def build_run(name: str, eval_scores: Sequence[float], gpus: float | None = None) -> Run:
    run = Run(name, gpus=gpus, seconds=3600.0)
    for index, score in enumerate(eval_scores):
        run.add(MetricRole.EVAL, 10 * (index + 1), score, None)
    return run


def judge_by_paper_policy(*runs: Run) -> dict[str, Case]:
    return {case.run.name: case for case in judge_cases(runs, {"paper": POLICIES["paper"]})}


def test_figures_equal_those_computed_by_hand() -> None:
    """A stop after the turn is right, in a dip wrong, near the end unknown; not stopping a rising run is right."""
    cases = judge_by_paper_policy(
        build_run("turns", TURNING, 8),
        build_run("dips", DIPPING),
        build_run("late", TURNING_LATE),
        build_run("rises", RISING),
    )
    outcomes = {
        name: (case.assessment.run_outcome, case.outcomes["paper"].stop_step, case.outcomes["paper"].outcome)
        for name, case in cases.items()
    }
    assert outcomes == {
        "turns": (RunOutcome.TURNED, 160, DecisionOutcome.RIGHT),
        "dips": (RunOutcome.HEALTHY, 90, DecisionOutcome.WRONG),
        "late": (RunOutcome.TURNED, 230, DecisionOutcome.UNKNOWN),
        "rises": (RunOutcome.HEALTHY, None, DecisionOutcome.RIGHT),
    }
    turns, dips = cases["turns"].outcomes["paper"], cases["dips"].outcomes["paper"]
    assert turns.saved == pytest.approx(80 / 240)
    assert dips.saved == pytest.approx(150 / 240)
    summary = summarize_policy(list(cases.values()), "paper")
    assert (summary["stopped"], summary["stops"]) == (
        3,
        {DecisionOutcome.RIGHT: 1, DecisionOutcome.WRONG: 1, DecisionOutcome.UNKNOWN: 1},
    )
    assert {name: figure.n for name, figure in summary["figures"].items()} == {
        "false_stops": 2,
        "caught": 2,
        "saved": 4,
        "cut": 4,
    }
    assert [figure.value for figure in summary["figures"].values()] == pytest.approx([0.5, 0.5, 1 / 12, 150 / 960])
    assert summary["gpu_hours"] == {
        DecisionOutcome.RIGHT: pytest.approx(8 / 3),
        DecisionOutcome.WRONG: 0.0,
        DecisionOutcome.UNKNOWN: 0.0,
    }
    cases |= judge_by_paper_policy(build_run("few", [1.0]))
    assert sorted(cases, key=lambda name: rank_harm(cases[name], "paper")) == ["dips", "late", "turns", "rises", "few"]


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=40), min_size=1, max_size=12))
def test_figures_add_up(walks: list[list[int]]) -> None:
    """Every stop is right, wrong or unknown, and the difference of two policies is that of their figures."""
    runs = [build_run("turns", TURNING), *(build_run(str(number), walk) for number, walk in enumerate(walks))]
    cases = judge_cases(runs, {name: POLICIES[name] for name in ("paper", "default")})
    paper, default = summarize_policy(cases, "paper"), summarize_policy(cases, "default")
    for summary, name in ((paper, "paper"), (default, "default")):
        assert summary["stopped"] == sum(case.outcomes[name].stop_step is not None for case in cases)
        assert 0 <= summary["figures"]["saved"].value + summary["figures"]["cut"].value <= 1
    changed = compare_policies(cases, "paper", "default")
    assert paper["figures"]["saved"].value > default["figures"]["saved"].value
    for name, figure in changed.items():
        difference = paper["figures"][name].value - default["figures"][name].value
        assert figure.value == pytest.approx(difference, nan_ok=True)
    same = compare_policies(cases, "paper", "paper")
    assert (same["saved"].value, same["saved"].low, same["cut"].high) == (0, 0, 0)


def test_json_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has figures, roles, each run and read errors; a run without evals is counted and not stopped."""
    rows = [
        {"run": name, "step": 10 * index, "reward": score, "eval/score": score}
        for name, eval_scores in (("turns", TURNING), ("dips", DIPPING))
        for index, score in enumerate(eval_scores)
    ]
    without_evals: list[dict[str, Any]] = [{"run": "no evals", "step": 0, "reward": 1.0}]
    file = write_jsonl(tmp_path / "runs.jsonl", [*rows, *without_evals])
    with file.open("a") as more:
        more.write('{"run": "tur')
    assert main(["backtest", str(file), "--policy", "paper", "--against", "cautious", "--confirm", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["runs"], report["without_eval"], report["truths"]["turned"]) == (3, 1, 1)
    assert {"role": "eval", "metric": "eval/score", "minimized": False, "runs": 2} in report["roles"]
    assert [item["policy"] for item in report["policies"]] == ["paper", "cautious"]
    assert report["cases"][1]["policies"]["paper"]["outcome"] == "wrong"
    assert report["cases"][2] == report["cases"][2] | {"run": "no evals", "truth": "undecided"}
    assert "line 50" in captured.err
    assert report["read_errors"] == [captured.err.strip().removeprefix("evalstop-lab: ")]


@pytest.mark.parametrize(("plan", "outcome"), [(None, "healthy"), (220, "healthy"), (223, "undecided")])
def test_run_that_ended_before_its_plan_is_not_healthy(plan: int | None, outcome: str) -> None:
    """A run that its trainer stopped early may have turned later; one that reached its plan has not."""
    run = build_run("rises", [0.1 * index for index in range(20)])
    assert run.last_step == 200
    run.total_steps = plan
    assert assess_outcome(run).run_outcome == outcome


def test_guessed_evals_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose eval is a guess is in no figure until that is confirmed, since the service would not stop it."""
    scores = (0.70, 0.74, 0.76, 0.75, 0.71, 0.68, 0.66, 0.63, 0.61, 0.60, 0.58, 0.57, 0.56, 0.55)
    rows = [{"step": step, "eval_set_a_accuracy": score, "total_steps": 20} for step, score in enumerate(scores)]
    file, page_file = write_jsonl(tmp_path / "a.jsonl", rows), str(tmp_path / "page.html")
    reports = []
    for options in ([], ["--confirm"]):
        assert main(["backtest", str(file), *options, "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert [report["runs"] for report in reports] == [0, 1]
    assert reports[0]["guessed"] == {"runs": 1, "stopped": {"default": 1}}
    assert [item["stopped"] for report in reports for item in report["policies"]] == [0, 1]
    assert main(["backtest", str(file), "--html", page_file]) == 0
    printed = capsys.readouterr().out
    assert "1 run is judged on a guess (eval_set_a_accuracy): the service would stop them only after you" in printed


def test_runs_without_an_eval_are_counted_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that stops nothing because no column was taken for the eval does not look as if it found nothing."""
    file = write_jsonl(tmp_path / "runs.jsonl", [{"run": "a", "step": 0, "reward": 1.0, "score": 0.5}])
    page_file = str(tmp_path / "page.html")
    assert main(["backtest", str(file), "--html", page_file]) == 0
    assert "1 run without an eval" in capsys.readouterr().out
    assert main(["backtest", str(file), "--html", page_file, "--eval", "score"]) == 0
    assert "without an eval" not in capsys.readouterr().out


@pytest.mark.real
def test_page_is_self_contained_and_searchable(tmp_path: Path) -> None:
    """The page loads nothing from other sites, escapes names, plots only visible runs, and finds runs by name."""
    long = [0.01 * index for index in range(5 * MOST_POINTS)]
    runs = [build_run(f"dips-{number}", DIPPING) for number in range(60)]
    runs += [build_run("</script><script>alert(1)</script>", TURNING, 8), build_run("long", long)]
    file = write_jsonl(
        tmp_path / "runs.jsonl",
        [
            {"run": run.name, "step": step, "eval": value}
            for run in runs
            for step, value in zip(run.series[MetricRole.EVAL].steps, run.series[MetricRole.EVAL].values, strict=True)
        ],
    )
    page_file = tmp_path / "page.html"
    arguments = ["backtest", str(file), "--policy", "paper", "--against", "default", "--html", str(page_file)]
    assert main(arguments) == 0
    errors: list[str] = []
    try:
        with launch_chromium() as browser:
            expect.set_options(timeout=30_000)
            page = browser.new_page(viewport={"width": 375, "height": 900})
            page.set_default_navigation_timeout(120_000)  # on a busy machine
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("dialog", lambda dialog: errors.append(dialog.message))
            page.on("request", lambda request: errors.append(request.url) if "http" in request.url[:4] else None)
            page.goto(page_file.as_uri())
            page.locator("#runs-heading").scroll_into_view_if_needed()
            page.wait_for_selector("#runs article .drawing svg")
            assert page.locator("#runs article").count() < 60
            assert page.locator("#runs .drawing svg.main-svg").count() < 60
            assert page.evaluate("document.documentElement.scrollWidth") == 375
            expect(page.locator("#runs article h3").first).to_have_text(re.compile(r"dips-\d+"))
            page.fill("#name", "alert")
            expect(page.locator("#shown")).to_have_text("1 of 62 runs")
            expect(page.locator("#runs article h3")).to_have_text("</script><script>alert(1)</script>")
            page.fill("#name", "")
            page.get_by_role("button", name="rightly stopped").click()
            expect(page.locator("#runs article")).to_have_count(1)
    except NoChromium as error:
        pytest.skip(str(error))
    assert errors == []


def test_page_draws_only_the_first_runs(tmp_path: Path) -> None:
    """All runs are listed, the worst first, and only the first `most_drawn` have curves."""
    policies = {"paper": POLICIES["paper"]}
    cases = judge_cases([build_run("rises", RISING), build_run("dips", DIPPING), build_run("turns", TURNING)], policies)
    file = tmp_path / "page.html"
    write_page(file, build_report(cases, ["paper"], [], "backtest"), cases, ["paper"], most_drawn=2)
    data = re.search(r'id="runs-data">(.*?)</script>', file.read_text())
    assert data is not None
    listed = json.loads(data[1])
    assert [(run["run"], list(run["series"])) for run in listed] == [
        ("dips", ["eval"]),
        ("turns", ["eval"]),
        ("rises", []),
    ]


def test_unwritable_page_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and the message has the name of the file."""
    file = write_jsonl(tmp_path / "runs.jsonl", [{"run": "a", "step": 0, "eval": 1.0}])
    assert main(["backtest", str(file), "--html", str(tmp_path / "absent" / "page.html")]) == 2
    assert "absent/page.html: No such file" in capsys.readouterr().err
