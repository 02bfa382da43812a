"""Every format that replay reads says the same of the same run."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evalstop_lab.cli import main

from tests.lab.replay.conftest import TURNING, Replay, rows, write_jsonl

STOPPED = {"verdict": "stop", "stop_step": 60, "suspect_step": 50, "best_step": 30}


def told(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in STOPPED}


def write_events(folder: Path, scalars: dict[str, list[tuple[int, float]]], as_tensor: bool = False) -> Path:
    """A real TensorBoard event file, by tensorboard's own writer."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util import tensor_util

    writer = EventFileWriter(str(folder))
    for tag, points in scalars.items():
        for step, value in points:
            stored: dict[str, Any] = {"simple_value": value}
            if as_tensor:
                plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars")
                stored = {
                    "tensor": tensor_util.make_tensor_proto(value),
                    "metadata": summary_pb2.SummaryMetadata(plugin_data=plugin),
                }
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, **stored)])
            writer.add_event(event_pb2.Event(wall_time=float(step), step=step, summary=summary))
    writer.close()
    return folder


def test_json_lines_of_several_runs(tmp_path: Path, replay: Replay) -> None:
    """Rows of runs may be mixed; each run has one object, in the order in which they began."""
    mixed = [row for pair in zip(rows("a"), rows("b", range(8)), strict=True) for row in pair]
    first, second = replay(write_jsonl(tmp_path / "runs.jsonl", mixed))
    assert (first["run"], told(first)) == ("a", STOPPED)
    assert first["reason"] == "k_decline: 3 consecutive declines of eval, k = 3"
    assert first["detectors"]["k_decline"] == {
        "detector": "k_decline",
        "kind": "count",
        "value": 3.0,
        "turn_step": 30,
        "note": "3 consecutive declines of eval, k = 3",
        "outlook": None,
        "suspect_at": 2.0,
        "stop_at": 3.0,
    }
    assert (second["verdict"], second["stop_step"], second["suspect_step"], second["best_step"]) == (
        "continue",
        None,
        None,
        70,
    )
    assert set(first) == {"run", "verdict", "stop_step", "suspect_step", "best_step", "reason", "ground", "detectors"}


def test_csv(tmp_path: Path, replay: Replay) -> None:
    """A CSV says the same; empty cells are evals that are missing, and other columns do not matter."""
    lines = ["run,step,eval,note", *(f'a,{10 * i},{score},"x, y"' for i, score in enumerate(TURNING)), "a,75,,"]
    (tmp_path / "runs.csv").write_text("\ufeff" + "\r\n".join(lines) + "\n", encoding="utf-8")
    (result,) = replay(tmp_path / "runs.csv")
    assert (result["run"], told(result)) == ("a", STOPPED)


def test_csv_of_one_run(tmp_path: Path, replay: Replay) -> None:
    """Without a column `run` the run is called as its file."""
    (tmp_path / "seed3.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in [("step", "eval"), (0, 1.0), (10, 2.0)]))
    (result,) = replay(tmp_path / "seed3.tsv")
    assert (result["run"], result["best_step"]) == (str(tmp_path / "seed3"), 10)


def test_trainer_state(tmp_path: Path, replay: Replay) -> None:
    """A trainer's log history is one run, called by its folder; a loss may be the eval score when it is minimized."""
    history: list[dict[str, Any]] = [{"step": 10 * i, "eval_loss": 1 - score} for i, score in enumerate(TURNING)]
    history += [{"step": 10 * i, "loss": 0.5, "epoch": 0.1, "grad_norm": float("nan")} for i in range(8)]
    file = tmp_path / "checkpoint-70" / "trainer_state.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"max_steps": 140, "log_history": history}))
    for path in (file, tmp_path):
        (result,) = replay(path, "--eval", "eval_loss", "--minimize", "eval_loss")
        assert (result["run"], told(result)) == (str(file.parent), STOPPED)
    (unturned,) = replay(file, "--eval", "eval_loss")
    assert unturned["stop_step"] == 30  # the loss of a model that gets better declines


def test_a_planned_end_is_known_to_the_detectors(tmp_path: Path, replay: Replay) -> None:
    """max_steps of a trainer's state, a field of any row, or --total-steps tell how far a run is."""
    policy = tmp_path / "half.json"
    member = {"detector": "fixed_progress", "params": {"fraction": 0.5}}
    policy.write_text(json.dumps({"name": "half", "members": [member], "eval_required": False}))
    history = [{"step": 10 * i, "loss": 0.5} for i in range(8)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"max_steps": 100, "log_history": history}))
    log = write_jsonl(tmp_path / "runs.jsonl", [{"run": "a", **row} for row in history])
    assert [item["stop_step"] for item in replay(tmp_path / "trainer_state.json", "--policy", policy)] == [50]
    assert [item["stop_step"] for item in replay(log, "--policy", policy, "--total-steps", "40")] == [20]
    assert [item["stop_step"] for item in replay(log, "--policy", policy)] == [None]
    log = write_jsonl(
        tmp_path / "told.jsonl", [{"run": "a", **row} for row in history] + [{"run": "a", "step": 0, "total_steps": 60}]
    )
    assert [item["stop_step"] for item in replay(log, "--policy", policy, "--total-steps", "40")] == [30]
    table = tmp_path / "told.csv"
    table.write_text(
        "step,loss,total_steps\n" + "".join(f"{row['step']},0.5,{20 if row['step'] else ''}\n" for row in history)
    )
    assert [item["stop_step"] for item in replay(table, "--policy", policy)] == [10]


def test_a_changed_measurement(tmp_path: Path, replay: Replay) -> None:
    """Where the version of the eval changes in a log, scores are compared anew."""
    log = [{**row, "eval_version": "v1" if row["step"] < 60 else "v2"} for row in rows()]
    (plain,), (versioned,) = (
        replay(write_jsonl(tmp_path / f"{name}.jsonl", lines))
        for name, lines in (("plain", rows()), ("versioned", log))
    )
    assert told(plain) == STOPPED
    assert told(versioned) == {"verdict": "continue", "stop_step": None, "suspect_step": 50, "best_step": 60}


def test_a_planned_end_that_is_none(tmp_path: Path, refused: Callable[..., str]) -> None:
    """A planned length below 1 is named with its line."""
    log = write_jsonl(tmp_path / "runs.jsonl", [{"step": 1, "eval": 0.5}, {"step": 2, "eval": 0.6, "total_steps": 0}])
    assert "line 2: total_steps is 0; give a whole number from 1" in refused(1, log)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_tensorboard_events(tmp_path: Path, replay: Replay, as_tensor: bool) -> None:
    """Each folder with event files is a run; scalars are read however they were written."""
    points = [(10 * i, score) for i, score in enumerate(TURNING)]
    write_events(tmp_path / "logs" / "x", {"score/gold": points, "lr": [(0, 0.1)]}, as_tensor)
    write_events(tmp_path / "logs" / "y", {"score/gold": points[:4], "score/gold_stderr": [(0, 0.1)]}, as_tensor)
    first, second = replay(tmp_path / "logs", "--eval", "score/gold")
    assert (first["run"], told(first)) == (str(tmp_path / "logs" / "x"), STOPPED)
    assert (second["run"], second["verdict"], second["best_step"]) == (str(tmp_path / "logs" / "y"), "continue", 30)


def test_a_tag_that_is_not_there(tmp_path: Path, refused: Callable[..., str]) -> None:
    """The tags that are there are named, so that one can be chosen."""
    write_events(tmp_path, {"score/gold": [(0, 1.0)]})
    assert "score/gold; say which is which with --eval" in refused(1, tmp_path)


def test_standard_input(monkeypatch: pytest.MonkeyPatch, replay: Replay) -> None:
    """A dash reads JSON lines from standard input."""
    text = "\n".join(json.dumps(row) for row in rows())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert [told(item) for item in replay("-")] == [STOPPED]


def test_several_files(tmp_path: Path, replay: Replay) -> None:
    """The rows of a run may stand in several files, in any order."""
    late = write_jsonl(tmp_path / "late.jsonl", rows()[4:])
    early = write_jsonl(tmp_path / "early.jsonl", rows()[:4][::-1])
    assert [told(item) for item in replay(late, early)] == [STOPPED]


def test_columns_by_name(tmp_path: Path, replay: Replay) -> None:
    """Roles are given to columns by name, with their standard errors beside them."""
    log = [{"step": row["step"], "gold": row["eval"], "gold_stderr": 0.1, "rm": 1.0} for row in rows()]
    (result,) = replay(write_jsonl(tmp_path / "seed1.jsonl", log), "--eval", "gold", "--proxy", "rm")
    assert (result["run"], told(result)) == (str(tmp_path / "seed1"), STOPPED)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there is a table, in which a run's name stands as it is."""
    log = write_jsonl(tmp_path / "runs.jsonl", rows("[red]a[/red]"))
    assert main(["replay", str(log), "--policy", "paper"]) == 0
    out = capsys.readouterr().out
    assert "[red]a[/red]" in out
    assert "1 of 1 runs stopped" in out
