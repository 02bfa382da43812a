"""Replay gives the verdicts of the monitor, and the same result for the same run in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evalstop_detectors import POLICIES, MetricRole, Policy, Score, Scores, choose_best, start, step
from evalstop_lab.cli import main
from evalstop_lab.replay.runs import Roles, Run
from evalstop_lab.replay.sources import read_runs
from evalstop_lab.worlds.world import World, draw_world, plan_worlds

from tests.lab.replay.conftest import TURNING, Replay, build_rows, list_rows, write_jsonl

STOPPED = {"verdict": "stop", "stop_step": 60, "suspect_step": 50, "best_step": 30}


def select_verdict(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in STOPPED}


def write_events(folder: Path, scalars: dict[str, list[tuple[int, float]]], as_tensor: bool = False) -> Path:
    """Write a TensorBoard event file with tensorboard's own writer."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util import tensor_util

    writer = EventFileWriter(str(folder))
    for tag, points in scalars.items():
        for at, value in points:
            stored: dict[str, Any] = {"simple_value": value}
            if as_tensor:
                plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars")
                stored = {
                    "tensor": tensor_util.make_tensor_proto(value),
                    "metadata": summary_pb2.SummaryMetadata(plugin_data=plugin),
                }
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, **stored)])
            writer.add_event(event_pb2.Event(wall_time=float(at), step=at, summary=summary))
    writer.close()
    return folder


def test_json_lines_of_several_runs(tmp_path: Path, replay: Replay) -> None:
    """Rows of several runs may be mixed; the output has one object per run, in the order of their first rows."""
    mixed = [row for pair in zip(build_rows("a"), build_rows("b", range(8)), strict=True) for row in pair]
    first, second = replay(write_jsonl(tmp_path / "runs.jsonl", mixed))
    assert (first["run"], select_verdict(first)) == ("a", STOPPED)
    assert first["reason"] == "k_decline: 3 consecutive declines of eval, k = 3"
    assert first["evidence"][0] == {
        "detector": "k_decline",
        "roles": ["eval"],
        "kind": "count",
        "value": 3.0,
        "suspect_at": 2.0,
        "stop_at": 3.0,
        "turn_step": 30,
        "note": "3 consecutive declines of eval, k = 3",
    }
    assert (second["verdict"], second["stop_step"], second["suspect_step"], second["best_step"]) == (
        "continue",
        None,
        None,
        70,
    )
    keys = {"run", "verdict", "stop_step", "suspect_step", "best_step", "reason", "evidence", "calls"}
    assert set(first) == keys
    assert first["calls"] == {"k_decline": first["stop_step"], "posterior": 70}


def test_csv_is_read(tmp_path: Path, replay: Replay) -> None:
    """Empty cells are missing evals, and other columns are ignored."""
    lines = ["run,step,eval,note", *(f'a,{10 * i},{score},"x, y"' for i, score in enumerate(TURNING)), "a,75,,"]
    (tmp_path / "runs.csv").write_text("\ufeff" + "\r\n".join(lines) + "\n", encoding="utf-8")
    (result,) = replay(tmp_path / "runs.csv")
    assert (result["run"], select_verdict(result)) == ("a", STOPPED)


def test_csv_of_one_run_is_named_by_its_file(tmp_path: Path, replay: Replay) -> None:
    """Without a column `run` the run has the name of its file."""
    (tmp_path / "seed3.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in [("step", "eval"), (0, 1.0), (10, 2.0)]))
    (result,) = replay(tmp_path / "seed3.tsv")
    assert (result["run"], result["best_step"]) == (str(tmp_path / "seed3"), 10)


def test_trainer_state_is_read(tmp_path: Path, replay: Replay) -> None:
    """A trainer's log history is one run, named by its folder; a minimized loss may be the eval score."""
    history: list[dict[str, Any]] = [{"step": 10 * i, "eval_loss": 1 - score} for i, score in enumerate(TURNING)]
    history += [{"step": 10 * i, "loss": 0.5, "epoch": 0.1, "grad_norm": float("nan")} for i in range(8)]
    file = tmp_path / "checkpoint-70" / "trainer_state.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"max_steps": 140, "log_history": history}))
    for path, folder in ((file, file.parent), (tmp_path, tmp_path)):
        (result,) = replay(path, "--eval", "eval_loss", "--minimize", "eval_loss")
        assert (result["run"], select_verdict(result)) == (str(folder), STOPPED)


@pytest.mark.parametrize(("best", "is_worst"), [(0.48, True), (0.35, False), (None, False)])
def test_worst_checkpoint_kept_as_the_best_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], best: float | None, is_worst: bool
) -> None:
    """A trainer that took a higher error rate for better is warned of."""
    scores = (0.48, 0.44, 0.41, 0.39, 0.37, 0.36, 0.35, 0.35)
    history = [{"step": step, "eval_wer": score, "eval_loss": 1.0} for step, score in enumerate(scores)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"best_metric": best, "log_history": history}))
    read_runs([tmp_path])
    assert ("eval_wer: higher is declared better, but by its name" in capsys.readouterr().err) is is_worst


def test_output_folder_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Histories of checkpoints that a later one continues are left out and counted; two seeds stay two runs."""
    for seed, scores in (("seed-1", TURNING), ("seed-2", (0.1, 0.4, *TURNING[::-1][2:]))):
        history = [{"step": row["step"], "eval_f1": row["eval"]} for row in build_rows(eval_scores=scores)]
        for folder, evals in (("", 8), ("checkpoint-10", 2), ("checkpoint-50", 6), ("checkpoint-70", 8)):
            path = tmp_path / seed / folder / "trainer_state.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"max_steps": 70, "log_history": history[:evals]}))
    runs = read_runs([tmp_path]).by_name
    assert [Path(name).relative_to(tmp_path).parts[0] for name in runs] == ["seed-1", "seed-2"]
    assert [len(run.series[MetricRole.EVAL].steps) for run in runs.values()] == [8, 8]
    assert "6   not read: another trainer_state.json continues it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "header", "options"),
    [
        ("results.csv", "epoch,metrics/mAP50-95(B)", []),
        ("progress.csv", "rollout/ep_rew_mean,time/total_timesteps,eval/mean_reward", []),
        ("metrics.csv", "epoch,step,val_acc", []),
        ("metrics.csv", "batch,eval", ["--step", "batch"]),
    ],
)
def test_tables_of_trainers_are_read_by_their_steps(
    tmp_path: Path, replay: Replay, file: str, header: str, options: list[str]
) -> None:
    """The CSV of Ultralytics, stable-baselines3 and Lightning is found in its folder and read by its own steps; any
    column may be named as that of the steps."""
    rows = [f"{row['step']},{row['eval']}" for row in build_rows()]
    rows = [f"0,{row}" for row in rows] if header.count(",") == 2 else rows
    (tmp_path / file).write_text("\n".join([header, *rows]))
    (result,) = replay(tmp_path, *options)
    assert (result["run"], result["stop_step"]) == (str(tmp_path), 60)


def test_planned_length_is_read_from_the_log(tmp_path: Path) -> None:
    """The planned length comes from max_steps of a trainer's state, or from a field of any row."""
    history = [{"step": 10 * i, "loss": 0.5} for i in range(8)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"max_steps": 100, "log_history": history}))
    rows = [{"run": "a", **row} for row in history]
    (tmp_path / "planned.csv").write_text("step,loss,total_steps\n0,0.5,\n10,0.5,20\n")
    planned = write_jsonl(tmp_path / "planned.jsonl", [*rows, {"run": "a", "step": 0, "total_steps": 60}])
    for log, total_steps in (
        (tmp_path / "trainer_state.json", 100),
        (planned, 60),
        (tmp_path / "planned.csv", 20),
        (write_jsonl(tmp_path / "runs.jsonl", rows), None),
    ):
        (run,) = read_runs([log]).by_name.values()
        assert run.total_steps == total_steps
        run.total_steps = run.total_steps or 40
        assert run.observations()[1].progress == 10 / run.total_steps


def test_scores_of_different_eval_versions_are_not_compared(tmp_path: Path, replay: Replay) -> None:
    """From a change of the eval version in a log, scores are compared only with later ones."""
    log = [{**row, "eval_version": "v1" if row["step"] < 60 else "v2"} for row in build_rows()]
    (plain,), (versioned,) = (
        replay(write_jsonl(tmp_path / f"{name}.jsonl", lines))
        for name, lines in (("plain", build_rows()), ("versioned", log))
    )
    assert select_verdict(plain) == STOPPED
    assert select_verdict(versioned) == {"verdict": "continue", "stop_step": None, "suspect_step": 50, "best_step": 60}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_tensorboard_events_are_read(tmp_path: Path, replay: Replay, as_tensor: bool) -> None:
    """Each folder with event files is a run; scalars may be simple values or tensors."""
    points = [(10 * i, score) for i, score in enumerate(TURNING)]
    write_events(tmp_path / "logs" / "x", {"score/gold": points, "lr": [(0, 0.1)]}, as_tensor)
    write_events(tmp_path / "logs" / "y", {"score/gold": points[:4], "score/gold_stderr": [(0, 0.1)]}, as_tensor)
    first, second = replay(tmp_path / "logs", "--eval", "score/gold")
    assert (first["run"], select_verdict(first)) == (str(tmp_path / "logs" / "x"), STOPPED)
    assert (second["run"], second["verdict"], second["best_step"]) == (str(tmp_path / "logs" / "y"), "continue", 30)


def test_log_without_a_known_tag_is_refused(tmp_path: Path, failing_replay: Callable[..., str]) -> None:
    """The message lists the tags, so that one can be chosen."""
    write_events(tmp_path, {"score/gold": [(0, 1.0)]})
    assert "score/gold; set the columns with --eval" in failing_replay(1, tmp_path)


def test_run_in_several_files(tmp_path: Path, replay: Replay) -> None:
    """The rows of a run may be in several files, in any order."""
    late = write_jsonl(tmp_path / "late.jsonl", build_rows()[4:])
    early = write_jsonl(tmp_path / "early.jsonl", build_rows()[:4][::-1])
    assert [select_verdict(item) for item in replay(late, early)] == [STOPPED]


def test_options_set_the_columns(tmp_path: Path, replay: Replay) -> None:
    """Options set the columns of roles; their standard errors are found by the suffix."""
    log = [{"step": row["step"], "gold": row["eval"], "gold_stderr": 0.1, "rm": 1.0} for row in build_rows()]
    (result,) = replay(write_jsonl(tmp_path / "seed1.jsonl", log), "--eval", "gold", "--proxy", "rm")
    assert (result["run"], select_verdict(result)) == (str(tmp_path / "seed1"), STOPPED)


def test_table_shows_names_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json a table is printed, and names of runs are not interpreted as markup."""
    log = write_jsonl(tmp_path / "runs.jsonl", build_rows("[red]a[/red]"))
    assert main(["replay", str(log), "--policy", "paper"]) == 0
    out = capsys.readouterr().out
    assert "[red]a[/red]" in out
    assert "1 of 1 runs stopped" in out


IN_MAKE_TEST = ("default", "paper", "reversible")


def compute_expected_verdict(policy: Policy, world: World) -> dict[str, Any]:
    """The verdict of evalstop_detectors on the world's observations, up to the first stop.

    The policy `reversible` continues after a stop, because a parked run may return; a replay reports the first stop.
    """
    state = start(policy)
    for item in world.observations():
        state, verdict = step(policy, state, item)
        if verdict.stops:
            break
    stop_step = state.verdict.step if state.verdict.stops else None
    return {
        "run": world.name,
        "verdict": state.verdict.verdict,
        "stop_step": stop_step,
        "suspect_step": state.suspect_step,
        "reason": state.verdict.reason,
        "best_step": choose_best_step(world, stop_step),
        "evidence": [item.value for item in state.verdict.evidence],
    }


def choose_best_step(world: World, stop_step: int | None) -> int | None:
    """The step of the best eval up to the stop."""
    scores = [
        Score(item.step, item.value, item.stderr)
        for item in world.observations()
        if item.role is MetricRole.EVAL and (stop_step is None or item.step <= stop_step)
    ]
    best = choose_best(Scores().add_scores(scores).add_checkpoints(dict.fromkeys((score.step for score in scores), "")))
    return None if best is None else best.step


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.nightly) for name in sorted(POLICIES)],
)
def test_replay_equals_the_monitor(tmp_path: Path, replay: Replay, name: str) -> None:
    """Drawn runs in a file with shuffled rows get verdict, evidence and best step of the monitor at its first stop."""
    worlds = [draw_world(*recipe, length=60) for recipe in plan_worlds(15, 7)]
    rows = [row for world in worlds for row in list_rows(world)]
    random.Random(1).shuffle(rows)
    log = write_jsonl(tmp_path / "worlds.jsonl", rows)
    results = {item["run"]: item for item in replay(log, "--policy", name)}
    for world in worlds:
        result, expected = results[world.name], compute_expected_verdict(POLICIES[name], world)
        result = result | {"evidence": [item["value"] for item in result["evidence"]]}
        assert {key: result[key] for key in expected} == expected
    assert {item["run"]: item for item in replay(log, "--policy", name, "--jobs", 2)} == results


def test_minimized_metrics_change_their_sign_except_the_kl() -> None:
    """Detectors get metrics of which higher is better; a KL is a distance and keeps its sign, as others that are no
    qualities."""
    run = Run("a", roles=Roles(minimized=frozenset({"kl", "loss", "proxy"})))
    for role in MetricRole:
        run.add(role, 1, 2.0, 0.5)
    assert [(item.role, item.value) for item in run.observations()] == [
        ("learning_rate", 2.0),
        ("entropy", 2.0),
        ("length", 2.0),
        ("truncated", 2.0),
        ("gradient_norm", 2.0),
        ("kl", 2.0),
        ("loss", -2.0),
        ("proxy", -2.0),
        ("eval", 2.0),
        ("paired", 2.0),
    ]
