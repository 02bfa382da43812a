"""`evalstop-lab roles` explains a log: what was taken for what, what was refused, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evalstop_lab.cli import main

from tests.lab.replay.conftest import write_jsonl

GRPO = {
    "reward": 1.0,
    "rewards/correct/mean": 1.0,
    "frac_reward_zero_std": 0.1,
    "kl": 0.1,
    "eval_reward": 1.0,
    "lr": 1.0,
}


def test_a_log_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL's reward is the proxy, its eval_reward no eval score, and a run without the eval score is warned of; logs
    alike are one."""
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [{"step": 1, **GRPO}]) for name in "ab"]
    assert main(["roles", *map(str, files), "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["preset"], found["logs"], found["step"]) == ("trl-grpo", 2, "step")
    assert {metric: role["role"] for metric, role in found["roles"].items()} == {"reward": "proxy", "kl": "kl"}
    assert "eval_reward" in found["refused"]
    assert found["ignored"] == ["frac_reward_zero_std", "lr"]
    assert "No metric is the eval score" in found["warnings"][-1]


def test_an_option_corrects_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is asked for plays its role and no other, and then nothing is missing."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"step": 1, **GRPO}])
    assert main(["roles", str(file), "--eval", "reward", "--minimize", "reward", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    eval_role = {"role": "eval", "direction": "minimize", "origin": "declared", "reason": "an option says so"}
    assert found["roles"]["reward"] == eval_role
    assert not any("No metric is the eval score" in words for words in found["warnings"])
    assert main(["roles", str(file)]) == 0
    assert "Warning: No metric is the eval score" in capsys.readouterr().out


def test_what_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be read is named, and the exit code is 1."""
    assert main(["roles", str(tmp_path / "absent.jsonl")]) == 1
    assert "absent.jsonl: No such file" in capsys.readouterr().err
