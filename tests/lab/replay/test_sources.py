"""Each source gives the same run, and invalid parts of a source do not prevent reading the rest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import httpx
import pytest
from evalstop_detectors import MetricRole
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay.command import load_policy
from evalstop_lab.replay.judged import judge_run
from evalstop_lab.replay.runs import ReadErrors, Run
from evalstop_lab.replay.servers import read_roles
from evalstop_lab.replay.sources import RequestedRoles, read_runs
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.forked_service import running_service
from tests.lab.replay.conftest import TURNING, property_settings, write_jsonl
from tests.lab.replay.fake_mlflow import TOKEN, run_fake_mlflow

WANDB_FILE = Path(__file__).parents[2] / "data" / "wandb" / "run-offline.wandb"


def list_eval_scores(run: Run) -> list[tuple[int, float]]:
    series = run.series[MetricRole.EVAL]
    return list(zip(series.steps, series.values, strict=True))


def list_observations(run: Run) -> dict[MetricRole, list[tuple[int, str]]]:
    """Steps and values of each role; values are strings, so that NaN equals itself."""
    return {role: list(zip(series.steps, map(repr, series.values), strict=True)) for role, series in run.series.items()}


TURNED = [(10 * index, score) for index, score in enumerate(TURNING)]


def test_offline_wandb_run_is_read() -> None:
    """A file of wandb 0.31 has the trainer's steps, NaN, the GPUs of the config, and the run's name and id."""
    (run,) = read_runs([WANDB_FILE]).by_name.values()
    assert run.name == "grpo-seed3 (ir2a0mcn)"
    assert list_eval_scores(run) == [(50 * index, score) for index, score in enumerate(TURNING)]
    assert len(run.series[MetricRole.PROXY].steps) == 40
    assert [
        step
        for step, value in zip(run.series[MetricRole.LOSS].steps, run.series[MetricRole.LOSS].values, strict=True)
        if math.isnan(value)
    ] == [70]
    assert run.gpus == 8
    assert run.is_guessed
    (named,) = read_runs([WANDB_FILE], RequestedRoles({MetricRole.EVAL: "eval/score"})).by_name.values()
    assert judge_run(load_policy("paper"), named).stop_step == 300


@property_settings
@given(data=st.data())
def test_damaged_wandb_run_is_read_up_to_the_damage(tmp_path: Path, data: st.DataObject) -> None:
    """A truncated or changed file is read up to there, and a changed byte is reported."""
    whole = WANDB_FILE.read_bytes()
    at, cut = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.booleans())
    changed = whole[:at] if cut else whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    (tmp_path / "run-x.wandb").write_bytes(changed)
    errors: ReadErrors = []
    runs = [list_observations(run) for run in read_runs([tmp_path], None, errors).by_name.values()]
    (everything,) = map(list_observations, read_runs([WANDB_FILE]).by_name.values())
    assert all(series == everything[role][: len(series)] for run in runs for role, series in run.items())
    assert cut or errors or runs == [everything]


def test_run_in_several_logs(tmp_path: Path) -> None:
    """A run logged to several files has the metrics of all; of two candidates the first is the eval score."""
    train = [{"run": "a", "step": step, "reward": 1.0} for step, _ in TURNED]
    evals = [{"run": "a", "step": step, "eval/score": score} for step, score in TURNED]
    others = [{"run": "a", "step": 900, "eval/accuracy": 9.0}]
    files = [write_jsonl(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate((train, evals, others))]
    (run,) = read_runs(files).by_name.values()
    assert list_eval_scores(run) == TURNED
    assert len(run.series[MetricRole.PROXY].steps) == len(TURNED)


def test_mlflow_server_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages are read, transient errors are retried, NaN is read, and one experiment can be chosen."""
    with run_fake_mlflow() as address:
        with pytest.raises(UnreadableInput, match=r"401.*key with read access"):
            read_runs([f"mlflow+{address}"])
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
        for source in (f"mlflow+{address}", f"mlflow+{address}?experiment=rlhf"):
            second, first = sorted(read_runs([source]).by_name.values(), key=lambda run: run.name, reverse=True)
            assert (first.name[:6], second.name[:6]) == ("seed1 ", "seed2 ")
            assert (list_eval_scores(first), first.gpus) == (TURNED, 8.0)
            assert math.isnan(second.series[MetricRole.KL].values[2])
        assert len(read_runs([f"mlflow+{address}", f"mlflow+{address}?experiment=rlhf"]).by_name) == 4
        with pytest.raises(UnreadableInput, match="no experiment 'other'; there are Default, rlhf"):
            read_runs([f"mlflow+{address}?experiment=other"])
    with pytest.raises(UnusableArguments, match=r"mlflow\+http"):
        read_runs([address])


def test_several_evals_of_the_service_are_read_as_their_mean() -> None:
    """The eval score of a run with several evals is the mean that the service stores, of which higher is better."""
    metrics = {"a": {"role": "eval", "direction": "minimize"}, "b": {"role": "eval"}, "kl": {"role": "kl"}}
    roles = read_roles(metrics, {})
    assert roles.columns == {MetricRole.EVAL: "evalstop/score", MetricRole.KL: "kl"}
    assert roles.sign(MetricRole.EVAL) == 1
    assert read_roles({"a": metrics["a"]}, {}).sign(MetricRole.EVAL) == -1


@pytest.mark.real
def test_runs_of_a_service_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a service have their declared roles, unless another metric is named, and their learning rate, without
    observations of superseded attempts; as runs of MLflow they have their planned length, too, and runs of one name
    remain apart."""
    with running_service(tmp_path) as service:
        with httpx.Client(
            base_url=f"{service.url}/api/v1", headers={"Authorization": f"Bearer {service.key}"}, timeout=60
        ) as client:
            metrics = {"odd": {"role": "eval", "direction": "minimize"}}
            body = {"name": "a", "metrics": metrics, "labels": {"gpus": "4"}, "total_steps": 200}
            run_id = client.post("/runs", json=body).raise_for_status().json()["id"]
            points = [{"metric": "odd", "step": step, "value": -score, "stderr": 0.1} for step, score in TURNED]
            points += [{"metric": "lr", "step": 0, "value": 0.1}, {"metric": "loss", "step": 0, "value": 0.1}]
            late = [{"metric": "odd", "step": 80, "value": 9.0}, {"metric": "odd", "step": 90, "value": "NaN"}]
            client.post(f"/runs/{run_id}/observations", json={"observations": points + late}).raise_for_status()
            client.post(f"/runs/{run_id}/resume", json={"step": 70}).raise_for_status()
            mlflow = f"{service.url}/mlflow/api/2.0/mlflow/runs"
            for _ in range(3):  # a sweep that gives its runs one name
                created = client.post(f"{mlflow}/create", json={"experiment_id": "0", "run_name": "sweep"})
                value = {"run_id": created.json()["run"]["info"]["run_id"], "key": "odd", "value": 0.5, "timestamp": 1}
                client.post(f"{mlflow}/log-metric", json=value).raise_for_status()
        monkeypatch.delenv("EVALSTOP_KEY", raising=False)
        with pytest.raises(UnusableArguments, match="EVALSTOP_KEY"):
            read_runs([f"evalstop+{service.url}"])
        monkeypatch.setenv("EVALSTOP_KEY", service.key)
        run = read_runs([f"evalstop+{service.url}"]).by_name["a"]
        by_loss = read_runs([f"evalstop+{service.url}"], RequestedRoles({MetricRole.EVAL: "loss"})).by_name["a"]
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", service.key)
        requested = RequestedRoles({MetricRole.EVAL: "odd"})
        as_mlflow = list(read_runs([f"mlflow+{service.url}/mlflow"], requested).by_name.values())
    assert [run.name.split()[0] for run in as_mlflow] == ["sweep", "sweep", "sweep", "a"]
    assert as_mlflow[-1].total_steps == 200
    assert [(score.step, score.value, score.stderr) for score in run.scores()] == [(*point, 0.1) for point in TURNED]
    assert (run.gpus, run.total_steps) == (4.0, 200)
    assert list(run.series) == [MetricRole.LEARNING_RATE, MetricRole.EVAL]
    assert list_eval_scores(by_loss) == [(0, 0.1)]


CONSOLE_LINES = {
    "verl": "(TaskRunner pid=7) \x1b[36mstep:{step} - critic/score/mean:0.5 - actor/ppo_kl:nan"
    " - val-core/gsm8k/reward/mean@1:np.float64({score})\x1b[0m",
    "openrlhf": "(PPOTrainer pid=7) 2026-01-01 INFO \u2728 Global step {step}: {{'policy_loss': tensor(0.5),"
    " 'reward': {score}, 'ppo_kl': 1e-05, 'text': 'x: 1'}}",
}


@pytest.mark.parametrize("trainer", CONSOLE_LINES)
def test_console_output_is_read(trainer: str, tmp_path: Path) -> None:
    """The lines with metrics are found in a trainer's console output."""
    lines = [
        "step: a word about steps",
        *(CONSOLE_LINES[trainer].format(step=step, score=score) for step, score in TURNED),
    ]
    (tmp_path / "train.log").write_text("\n".join(lines), encoding="utf-8")
    requested = RequestedRoles({MetricRole.EVAL: "reward"}) if trainer == "openrlhf" else None
    (run,) = read_runs([tmp_path / "train.log"], requested).by_name.values()
    assert list_eval_scores(run) == TURNED


def test_other_formats_of_rows_are_read(tmp_path: Path) -> None:
    """Files of verl's logger and W&B's history as JSON give the same run."""
    verl = [{"step": step, "data": {"val-core/gsm8k/reward/mean@1": score, "text": "x"}} for step, score in TURNED]
    (tmp_path / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verl))
    history = [{"_step": 2 * i, "train/global_step": step, "loss": 1.0} for i, (step, _) in enumerate(TURNED)]
    evals = [{"_step": 2 * i + 1, "eval/score": score, "_runtime": 3600.0} for i, (_, score) in enumerate(TURNED)]
    rows = [row for pair in zip(history, evals, strict=True) for row in pair]
    (tmp_path / "history.json").write_text(json.dumps(rows))
    by_file = {name: read_runs([tmp_path / name]).by_name for name in ("verl.jsonl", "history.json")}
    assert [list_eval_scores(next(iter(runs.values()))) for runs in by_file.values()] == [TURNED] * 2
    assert next(iter(by_file["history.json"].values())).seconds == 3600


def test_invalid_rows_do_not_prevent_reading_others(tmp_path: Path) -> None:
    """A lenient reader reports each invalid file and line once, and reads all valid rows."""
    good = [json.dumps({"step": step, "eval": score}) for step, score in TURNED]
    (tmp_path / "half.jsonl").write_text(
        "\n".join([*good[:3], "{broken", *good[3:], '{"step": -1, "eval": 1}', good[0][:9]])
    )
    (tmp_path / "table.csv").write_text("step,eval\n" + "\n".join(f"{a},{b}" for a, b in TURNED) + "\n70,high\n80\n")
    (tmp_path / "trainer_state.json").write_text("{")
    names = ("half.jsonl", "table.csv", "trainer_state.json", "absent.jsonl")
    errors: ReadErrors = []
    runs = read_runs([tmp_path / name for name in names], None, errors)
    assert [list_eval_scores(run) for run in runs.by_name.values()] == [TURNED] * 2
    messages = [str(error).split(f"{tmp_path}/")[1] for error in errors]
    assert [item.split(": ")[0] for item in messages if "none of" not in item] == [
        "half.jsonl, line 4", "half.jsonl, line 10", "half.jsonl, line 11", "table.csv, line 10", "table.csv, line 11",
        "trainer_state.json", "absent.jsonl",
    ]  # fmt: skip
