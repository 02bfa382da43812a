"""`evalstop-lab stopbench`: the figures of a rule follow from its stops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evalstop_lab.cli import main
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.stopbench.judging import SUITES, TRAINED, compute_figures
from evalstop_lab.stopbench.libraries import LIBRARIES
from evalstop_lab.stopbench.rules import BUILT_IN, load_rule
from evalstop_lab.worlds.families import Group, list_families
from evalstop_lab.worlds.recorded import read_runs
from evalstop_lab.worlds.scoring import Outcome
from evalstop_lab.worlds.truth import Label
from evalstop_lab.worlds.world import draw_world
from ruptures.detection import KernelCPD, Pelt

pytestmark = pytest.mark.slow

THREE_DECLINES = """
class ThreeDeclines:
    def __init__(self, planned_steps):
        self.last, self.declines = None, 0

    def stop(self, step, score, stderr, proxy, kl):
        if score is None:
            return False
        self.declines = self.declines + 1 if self.last is not None and score < self.last else 0
        self.last = score
        return self.declines >= 3
"""


def run_stopbench(*arguments: str) -> int:
    return main(["stopbench", "--jobs", "1", *arguments])


def test_custom_rule_equals_the_policy_that_it_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rule of three declines from a file has the same figures as the paper's policy, also with missing evals."""
    rule = tmp_path / "rule.py"
    rule.write_text(THREE_DECLINES)
    suites = ("drawn-1", "third-1", "trained-1-small")
    rules = "--rule", f"{rule}:ThreeDeclines", "--only", "EvalStop paper"
    assert run_stopbench(*rules, "--runs", "12", "--json", "--suite", *suites) == 0
    report = json.loads(capsys.readouterr().out)
    for suite in suites:
        custom, paper = (report["suites"][suite][name] for name in (f"{rule}:ThreeDeclines", "EvalStop paper"))
        assert custom["runs"] == 12
        for figure in ("recall", "false_stops", "premature", "delay", "saved"):
            assert custom[figure] == paper[figure]


def test_failing_rule_and_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message states at which eval of which run the rule failed."""
    rule = tmp_path / "rule.py"
    rule.write_text(
        "class Broken:\n    def __init__(self, planned_steps): pass\n    def stop(self, *_): return 1 / 0\n"
    )
    assert run_stopbench("--rule", f"{rule}:Broken", "--only", "--runs", "1", "--suite", "drawn-1") == 2
    assert "Broken failed at eval 1 of the run" in capsys.readouterr().err


def test_saved_is_net_of_wrong_stops() -> None:
    """A stop midway between peak and end saves half; a false stop in the middle of a run subtracts half a run."""
    turned = draw_world(list_families(Group.HACKING)[0], 1, length=100, level=0.0)
    last = len(turned.steps) - 1
    midway = int(turned.steps[(turned.truth.peak + last) // 2])
    right = compute_figures([(Outcome(midway), turned)])
    assert right["saved"]["value"] == pytest.approx(0.5, abs=0.02)
    healthy = replace(turned, truth=replace(turned.truth, label=Label.HEALTHY))
    middle = int(turned.steps[last // 2])
    both = compute_figures([(Outcome(midway), turned), (Outcome(middle), healthy)])
    possible = 1 - turned.truth.peak / last
    assert both["saved"]["value"] == pytest.approx((0.5 * possible - 0.5) / possible, abs=0.03)
    assert both["false_stops"]["value"] == 1.0


def test_shipped_runs_are_those_of_their_seeds() -> None:
    """The file has 400 runs of consecutive seeds, some of which turn; small evals of the same runs are noisier."""
    worlds = read_runs(TRAINED)
    first = worlds[0].seed
    assert [world.seed for world in worlds] == list(range(first, first + SUITES["trained-1"].runs))
    assert {Label.HACKING, Label.HEALTHY} <= {world.truth.label for world in worlds}
    small = read_runs(TRAINED, small=True)
    assert (small[0].truth.noise_sd or 0.0) > 2 * (worlds[0].truth.noise_sd or 0.0)
    assert np.array_equal(small[0].truth.eval_scores, worlds[0].truth.eval_scores)


def find_falls(suite: str) -> dict[Label, list[float]]:
    """The falls of a suite's runs as shares of their gains, by label."""
    falls: dict[Label, list[float]] = {label: [] for label in Label}
    for number in range(SUITES[suite].runs):
        truth = SUITES[suite].draw("public", number).truth
        falls[truth.label].append(truth.drop / truth.unit)
    return falls


def test_recorded_fall_within_its_error_is_ambiguous() -> None:
    """A fall of more than a tenth of the gain counts only if it is more than three standard errors."""
    falls = find_falls("language-1")
    assert min(falls[Label.HACKING]) > 0.1
    assert max(falls[Label.AMBIGUOUS]) > 0.1
    assert max(falls[Label.HEALTHY]) < 0.05
    assert [len(falls[label]) for label in (Label.HACKING, Label.HEALTHY, Label.AMBIGUOUS)] == [44, 13, 15]


def test_recorded_answers_find_more_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With recorded paired evaluations `cautious` stops more of the runs that turn, and no healthy one."""
    rules = "EvalStop cautious", "EvalStop cautious, evaluate now"
    assert run_stopbench("--suite", "language-3", "--only", *rules, "--json") == 0
    result = json.loads(capsys.readouterr().out)["suites"]["language-3"]
    without, answered = (result[rule] for rule in rules)
    assert [round(22 * figures["recall"]["value"]) for figures in (without, answered)] == [5, 7]
    assert [figures["false_stops"]["value"] for figures in (without, answered)] == [0, 0]


def test_interrupted_command_ends_without_traceback(tmp_path: Path) -> None:
    """Ctrl-C ends a command with exit code 1."""
    rule = tmp_path / "rule.py"
    rule.write_text(THREE_DECLINES.replace("if score is None:", "raise KeyboardInterrupt\n        if True:"))
    own = ["--only", "--rule", f"{rule}:ThreeDeclines"]
    assert run_stopbench("--suite", "drawn-1", "--runs", "1", *own) == 1


RISING_THEN_FALLING = (0.0, 1.0, 2.0, 3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4)
UP_AND_DOWN_BELOW_BEST = (0.0, 1.0, 3.0, 2.0, 2.5, 2.0, 2.5, 2.0, 2.5)


def find_stop_step(name: str, scores: tuple[float, ...]) -> int | None:
    rule = load_rule(name)(None)
    return next((step for step, score in enumerate(scores) if rule.stop(step, score, None, None, None)), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "falling", "below_best"),
    [
        ("transformers EarlyStoppingCallback", 6, 5),
        ("Optuna PatientPruner", 7, 6),
        ("EvalStop paper", 6, None),
        ("z-score of 20", None, None),
    ],
)
def test_patience_counts_evals_below_the_best_and_declines_count_in_a_row(
    name: str, falling: int | None, below_best: int | None
) -> None:
    """Callbacks with a patience stop after three evals without a new best; the paper's rule needs three declines."""
    assert find_stop_step(name, RISING_THEN_FALLING) == falling
    assert find_stop_step(name, UP_AND_DOWN_BELOW_BEST) == below_best


@pytest.mark.slow
def test_ray_stops_on_a_plateau() -> None:
    """Four results with a standard deviation below 0.01 stop the run."""
    assert find_stop_step("Ray TrialPlateauStopper", (0.0, 1.0, 2.0, 2.0, 2.0, 2.0)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_detectors_of_other_libraries_stop_runs_that_fall(name: str) -> None:
    """They stop a run that falls again and again after a plateau, and none that stays on it."""
    plateau = np.repeat([0.0, 10.0], [20, 580]) + 0.5 * np.random.default_rng(1).standard_normal(600)
    falling = plateau - 10 * (np.maximum(np.arange(600) - 10, 0) // 150)
    assert find_stop_step(name, tuple(plateau)) is None
    stopped = find_stop_step(name, tuple(falling))
    assert stopped is not None
    assert stopped >= 160


@pytest.mark.slow
def test_segments_are_those_of_ruptures_pelt() -> None:
    """The segmentation by `KernelCPD` that stands for `Pelt` is the one that `Pelt` finds."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        values = np.repeat(3 * rng.standard_normal(4), 15) + rng.standard_normal(60)
        borders = Pelt(model="l2", min_size=5, jump=1).fit(values).predict(pen=8.0)
        assert KernelCPD(kernel="linear", min_size=5).fit(values).predict(pen=8.0) == borders


@pytest.mark.parametrize("name", BUILT_IN)
def test_missing_eval_stops_no_run(name: str) -> None:
    """A rule does not stop at an eval without a score."""
    assert not load_rule(name)(100.0).stop(0, None, None, 1.0, None)


def test_unusable_rule_file_is_refused(tmp_path: Path) -> None:
    """An unusable rule is refused with its problem before any run is judged."""
    path = tmp_path / "rule.py"
    path.write_text("class Other:\n    pass\n")
    with pytest.raises(UnusableArguments, match="no class 'Mine' with a method `stop`"):
        load_rule(f"{path}:Mine")
    with pytest.raises(UnusableArguments, match=r"give path\.py:Name"):
        load_rule("nowhere.py:Mine")
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(UnusableArguments, match="cannot be imported"):
        load_rule(f"{path}:Mine2")
