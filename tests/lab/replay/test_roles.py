"""Which metrics of a log have which role, and what that means for its runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from evalstop_detectors import MetricRole
from evalstop_lab.cli import main
from evalstop_lab.replay.sources import RequestedRoles, read_runs

from tests.lab.replay.conftest import Replay, write_jsonl

GRPO = {
    "reward": 1.0,
    "rewards/correct/mean": 1.0,
    "frac_reward_zero_std": 0.1,
    "kl": 0.1,
    "eval_reward": 1.0,
    "lr": 1.0,
}


def test_roles_are_those_of_the_service(tmp_path: Path) -> None:
    """TRL's reward is the proxy, and its eval_reward is not the eval score."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"step": 1, **GRPO}])
    (run,) = read_runs([file]).by_name.values()
    assert run.roles.columns == {"proxy": "reward", "kl": "kl", "learning_rate": "lr"}


def test_options_override_roles(tmp_path: Path) -> None:
    """A metric has only the role that an option gives it, with the direction of its name unless `--minimize` is given,
    as in the service."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"step": 1, **GRPO, "test_loss": 1.0}])
    for metric, minimized in (("reward", True), ("reward", False), ("test_loss", False)):
        requested = RequestedRoles({MetricRole.EVAL: metric}, frozenset({metric} if minimized else ()))
        (run,) = read_runs([file], requested).by_name.values()
        assert (run.roles.columns[MetricRole.EVAL], run.is_guessed) == (metric, False)
        assert metric not in {name for role, name in run.roles.columns.items() if role != "eval"}
        assert (run.roles.sign(MetricRole.EVAL) < 0) == (minimized or metric == "test_loss")


@pytest.mark.parametrize("name", ["eval_exact_match", "eval_match_accuracy"])
def test_constant_eval_gives_way(tmp_path: Path, replay: Replay, name: str) -> None:
    """An eval that stays at 0 does not hide the loss: the run is stopped as with the loss alone."""
    losses = (3, 2, 1.5, 1.2, 1.3, 1.5, 1.7, 1.9, 2.1, 2.3, 2.5, 2.8)
    rows = [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses)]
    alone = write_jsonl(tmp_path / "alone.jsonl", rows)
    both = write_jsonl(tmp_path / "both.jsonl", [row | {name: 0.0} for row in rows])
    (expected,), (result,) = replay(alone), replay(both)
    assert result == expected | {"run": str(tmp_path / "both")}
    assert result["stop_step"] is not None


def test_log_is_read_up_to_the_first_eval_that_changes(tmp_path: Path) -> None:
    """A constant eval of one run says nothing of another's, and rows behind a change are not looked at for it."""
    rows = [
        {"run": run, "step": step, "eval_accuracy": score * step, "eval_loss": 1.0 - 0.1 * step}
        for run, score in (("constant", 0), ("rising", 1), ("more", 1))
        for step in range(8)
    ]
    runs = read_runs([write_jsonl(tmp_path / "a.jsonl", rows)]).by_name
    assert {name: (run.roles.eval_name, len(run.series[MetricRole.EVAL].steps)) for name, run in runs.items()} == (
        dict.fromkeys(("constant", "rising", "more"), ("eval_accuracy", 8))
    )


FALLING = (0.2, 0.5, 0.7, 0.8, 0.78, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2)


def test_several_eval_sets_are_judged_by_their_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], replay: Replay
) -> None:
    """Sets of other scales, that start late or miss a step, are combined unless one is named; a run that has but one
    set is judged by that."""
    rows = [
        {"run": "both", "step": step, "eval_a_loss": 3 - value, "eval_a_runtime": 1.0, "eval_b_runtime": 1.0}
        | ({"eval_b_loss": 30 - 10 * value} if step not in (0, 1, 6) else {})
        for step, value in enumerate(FALLING)
    ]
    rows += [{"run": "one", "step": step, "eval_b_loss": 3 - value} for step, value in enumerate(FALLING)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    runs = read_runs([file])
    runs.settle()
    both, one = runs.by_name.values()
    assert (both.roles.combined, one.roles.combined) == (("eval_a_loss", "eval_b_loss"), ())
    assert [score.value for score in one.scores()] == pytest.approx([value - 3 for value in FALLING])
    assert max(both.scores(), key=lambda score: score.value).step == 3
    assert not both.is_guessed
    assert [result["verdict"] for result in replay(file)] == ["stop", "stop"]
    assert main(["replay", str(file)]) == 0
    assert "1 run is judged by the mean of eval_a_loss, eval_b_loss" in capsys.readouterr().err
    assert main(["replay", str(file), "--eval", "eval_a_loss"]) == 0
    assert "the mean of" not in capsys.readouterr().err


def test_run_is_not_stopped_on_a_guess(tmp_path: Path, replay: Replay) -> None:
    """As in the service, a run whose eval is guessed is stopped only once that is confirmed."""
    scores = (0.70, 0.74, 0.76, 0.75, 0.71, 0.68, 0.66, 0.63, 0.61, 0.60, 0.58, 0.57, 0.56, 0.55)
    file = write_jsonl(tmp_path / "a.jsonl", [{"step": i, "eval_set_a_accuracy": x} for i, x in enumerate(scores)])
    (guessed,), (confirmed,) = replay(file), replay(file, "--confirm")
    assert (guessed["verdict"], guessed["stop_step"]) == ("suspect", None)
    assert "guessed; confirm it" in guessed["reason"]
    assert (confirmed["verdict"], confirmed["stop_step"]) == ("stop", 5)
    assert replay(file, "--eval", "eval_set_a_accuracy") == [confirmed]


def test_unreadable_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1, and the message has the name of the file."""
    assert main(["replay", str(tmp_path / "absent.jsonl")]) == 1
    assert "absent.jsonl: No such file" in capsys.readouterr().err
