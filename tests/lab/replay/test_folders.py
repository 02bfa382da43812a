"""The folder of a trainer is one run, with its plan; a table says what was read, and why the rest was not."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evalstop_detectors import MetricRole
from evalstop_lab.backtest.cases import assess_outcome, explain_early_end, infer_early_stopping
from evalstop_lab.replay.runs import ReadErrors, Run
from evalstop_lab.replay.sources import read_runs
from evalstop_service.domain.statuses import RunOutcome

from tests.lab.replay.conftest import write_jsonl

RISING = [round(0.2 + 0.05 * index - 0.002 * index**2, 6) for index in range(12)]
STEPS = range(10, 130, 10)


def read_only_run(folder: Path) -> Run:
    runs = read_runs([folder])
    assert runs.settle() == 0
    (run,) = runs.by_name.values()
    return run


def list_problems(file: Path) -> str:
    errors: ReadErrors = []
    read_runs([file], None, errors)
    return "\n".join(map(str, errors))


def list_evals(run: Run) -> list[tuple[int, float]]:
    return [(score.step, score.value) for score in run.scores()]


def write_state(path: Path, history: list[dict[str, Any]], **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"log_history": history, **more}))


def test_plan_stands_beside_the_results_of_ultralytics(tmp_path: Path) -> None:
    """`args.yaml` has the number of epochs, which `results.csv` counts."""
    rows = "".join(f"{epoch},   {value}\n" for epoch, value in enumerate(RISING, start=1))
    (tmp_path / "results.csv").write_text(f"epoch,   metrics/mAP50-95(B)\n{rows}")
    (tmp_path / "args.yaml").write_text("task: detect\nepochs: 100\nclose_mosaic: 10\n")
    run = read_only_run(tmp_path)
    assert (run.total_steps, list_evals(run)) == (100, list(enumerate(RISING, start=1)))


def test_evaluations_of_stable_baselines_are_read(tmp_path: Path) -> None:
    """The mean return of the episodes and its standard error; RL Zoo's files beside it have the planned length."""
    episodes = np.array(RISING)[:, None] + np.array([-0.3, 0.0, 0.3])
    lengths = np.ones((12, 3), dtype=int)
    np.savez(tmp_path / "evaluations.npz", timesteps=np.array(STEPS), results=episodes, ep_lengths=lengths)
    settings = tmp_path / "CartPole-v1"
    settings.mkdir()
    head = "!!python/object/apply:collections.OrderedDict\n"
    (settings / "args.yml").write_text(f"{head}- - - n_eval_envs\n    - 1\n  - - n_timesteps\n    - -1\n")
    (settings / "config.yml").write_text(f"{head}- - - batch_size\n    - 32\n  - - n_timesteps\n    - 100000.0\n")
    run = read_only_run(tmp_path)
    assert (run.name, run.total_steps, run.is_guessed) == (str(tmp_path), 100_000, False)
    assert [score.step for score in run.scores()] == list(STEPS)
    assert [score.value for score in run.scores()] == pytest.approx(RISING)
    assert [score.stderr for score in run.scores()] == pytest.approx([0.3 / 3**0.5] * 12)


def test_hostile_arrays_are_refused(tmp_path: Path) -> None:
    """The size that the archive states is checked first, and a pickle in it is not loaded."""
    file = tmp_path / "evaluations.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("results.npy", "w") as member:
        for _ in range(257):
            member.write(bytes(1 << 20))
    assert "takes more than" in list_problems(file)
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("timesteps.npy", pickled.getvalue())
    assert "give an evaluations.npz" in list_problems(file)


def test_log_of_llama_factory_and_its_checkpoint_are_one_run(tmp_path: Path) -> None:
    """The run has what the log tells after the last checkpoint."""
    history = [{"step": step, "eval_loss": 1 - value} for step, value in zip(STEPS, RISING, strict=True)]
    rows = [{"current_steps": row["step"], "total_steps": 300, "eval_loss": row["eval_loss"]} for row in history]
    rows += [{"current_steps": 130, "total_steps": 300, "loss": 0.4, "percentage": 43.3}]
    write_jsonl(tmp_path / "trainer_log.jsonl", rows)
    write_state(tmp_path / "checkpoint-80" / "trainer_state.json", history[:8], max_steps=300)
    run = read_only_run(tmp_path)
    assert (run.name, run.total_steps, run.last_step) == (str(tmp_path), 300, 130)
    assert [score.step for score in run.scores()] == list(STEPS)


@pytest.mark.parametrize("sets", ["one", "two"])
def test_training_that_was_logged_twice_is_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sets: str
) -> None:
    """A log whose evals are the first of another's, be it in single precision, is left out; two seeds stay two."""
    for seed, scores in (("a", RISING), ("b", RISING[::-1])):
        history = [
            {"step": step, **more, "eval_x_runtime": 1.0, "eval_y_runtime": 1.0}
            for step, value in zip(STEPS, scores, strict=True)
            for more in (({"eval_x_f1": 0.5}, {"eval_y_f1": value}) if sets == "two" else ({"eval_f1": value},))
        ]
        write_state(tmp_path / seed / "trainer_state.json", history, max_steps=120)
        singles = [{key: float(np.float32(cell)) for key, cell in row.items()} for row in history]
        write_jsonl(tmp_path / seed / "history.jsonl", singles[:4])
    (tmp_path / "data.csv").write_text("prompt,answer\na,b\n")
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "b"}])
    write_jsonl(tmp_path / "losses.jsonl", [{"step": 1, "num_tokens": 5}])
    assert list(read_runs([tmp_path]).by_name) == [str(tmp_path / seed) for seed in "ab"]
    table = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    for row in (
        "trainer_state.json 2 read",
        "*.jsonl 2 not read: another log has the same evals",
        "*.jsonl 1 not read: no metric of it is an eval, proxy, KL or loss",
        "*.jsonl 1 not read: it is no log that is known by its name or rows",
        "*.csv 1 not read: it is no log that is known by its name or rows",
    ):
        assert row in table


def test_gzipped_logs_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text in gzip's format is read as it is without, up to where it is cut off; the table names it."""
    rows = [{"step": step, "eval": step**0.5} for step in range(2000)]
    (tmp_path / "plain").mkdir()
    plain = write_jsonl(tmp_path / "plain" / "a.jsonl", rows)
    packed = gzip.compress(plain.read_bytes())
    for folder, data in (("whole", packed), ("cut", packed[: len(packed) // 2])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl.gz").write_bytes(data)
    expected = list_evals(read_only_run(tmp_path / "plain"))
    assert list_evals(read_only_run(tmp_path / "whole")) == expected
    cut = list_evals(read_only_run(tmp_path / "cut"))
    assert "its compression ends early" in list_problems(tmp_path / "cut")
    assert 0 < len(cut) < len(expected)
    assert cut == expected[: len(cut)]
    assert capsys.readouterr().err.count("*.jsonl.gz") == 3


def test_gzipped_trainer_state_is_read(tmp_path: Path) -> None:
    """A state in gzip's format is one run with those of its checkpoints; one that is cut off is named."""
    history = [{"step": step, "eval_f1": value} for step, value in zip(STEPS, RISING, strict=True)]
    write_state(tmp_path / "checkpoint-40" / "trainer_state.json", history[:4], max_steps=120)
    packed = gzip.compress(json.dumps({"log_history": history, "max_steps": 120}).encode())
    (tmp_path / "trainer_state.json.gz").write_bytes(packed)
    run = read_only_run(tmp_path)
    assert (run.name, run.total_steps, list_evals(run)) == (str(tmp_path), 120, list(zip(STEPS, RISING, strict=True)))
    for cut in (packed[:40], b"{"):
        (tmp_path / "trainer_state.json.gz").write_bytes(cut)
        assert "give a readable file" in list_problems(tmp_path / "trainer_state.json.gz")


def test_console_is_found_by_its_lines(tmp_path: Path) -> None:
    """verl's output is read in a folder, with the length that it prints; other text is not."""
    lines = [f"(TaskRunner pid=7) step:{step} - val-core/gsm8k/acc/mean@1:{value}" for step, value in enumerate(RISING)]
    (tmp_path / "train.log").write_text("\n".join(["Ray starts", "Total training steps: 435", *lines]))
    (tmp_path / "notes.txt").write_text("one step at a time\n")
    run = read_only_run(tmp_path)
    assert (run.name, run.total_steps, list_evals(run)) == (str(tmp_path / "train"), 435, list(enumerate(RISING)))


@pytest.mark.parametrize(("best", "at", "column"), [(0.9, 30, "eval_odd"), (0.1, 10, "eval_odd"), (0.5, 20, "eval_f1")])
def test_metric_of_the_best_model_is_the_eval(tmp_path: Path, best: float, at: int, column: str) -> None:
    """The metric whose highest or lowest value is the state's `best_metric` comes before recognized ones."""
    odd, f1 = (0.1, 0.5, 0.9, 0.6), (0.3, 0.4, 0.7, 0.8)
    history = [{"step": 10 + 10 * i, "eval_odd": odd[i], "eval_f1": f1[i]} for i in range(4)]
    write_state(tmp_path / "trainer_state.json", history, best_metric=best, best_global_step=at)
    run = read_only_run(tmp_path)
    assert (run.roles.columns[MetricRole.EVAL], run.is_guessed) == (column, False)
    assert (column in run.roles.minimized) is (best == 0.1)


def test_eval_of_the_loaded_best_model_is_no_eval_of_the_run(tmp_path: Path) -> None:
    """After the training `load_best_model_at_end` loads the best model, whose evals are logged at the last step."""
    values = [0.3, 0.6, 0.9, 0.7, 0.5]
    history: list[dict[str, Any]] = [{"step": 10 * place, "eval_f1": value} for place, value in enumerate(values, 1)]
    history += [{"step": 50, "train_runtime": 9.0}, {"step": 50, "eval_f1": 0.9}]
    write_state(tmp_path / "trainer_state.json", history, best_metric=0.9, best_model_checkpoint="out/checkpoint-30")
    assert list_evals(read_only_run(tmp_path)) == [(10 * place, value) for place, value in enumerate(values, 1)]
    write_state(tmp_path / "trainer_state.json", [*history[:4], *history[5:]])
    assert list_evals(read_only_run(tmp_path))[-1] == (50, 0.9)


def test_run_that_its_early_stopping_ended_is_undecided(tmp_path: Path) -> None:
    """The counter in the trainer's state has reached the patience; below it the run has run to its end."""
    history = [{"step": step, "eval_f1": value} for step, value in zip(STEPS, RISING, strict=True)]
    history += [{"step": step, "eval_f1": RISING[-1] - 0.00001 * (step - 120)} for step in (130, 140, 150)]
    for name, counter in (("stopped", 3), ("whole", 2)):
        item = {
            "args": {"early_stopping_patience": 3, "early_stopping_threshold": 0.0},
            "attributes": {"early_stopping_patience_counter": counter},
        }
        callbacks = {"EarlyStoppingCallback": item, "TrainerControl": {"args": {}}}
        write_state(tmp_path / name / "trainer_state.json", history, stateful_callbacks=callbacks)
    stopped, whole = (read_only_run(tmp_path / name) for name in ("stopped", "whole"))
    assert "after 3 evals without an improvement" in explain_early_end(stopped)
    assert assess_outcome(stopped).run_outcome is RunOutcome.UNDECIDED
    assert assess_outcome(whole).run_outcome is RunOutcome.HEALTHY


@pytest.mark.parametrize(
    ("rates", "stops_early", "is_told"),
    [
        ([0.1, 0.2, 0.2, 0.2], True, False),
        ([0.1, 0.2, 0.2, 0.2], False, True),
        ([0.1, 0.2, 0.15, 0.1], True, True),
        ([0.2], True, True),
    ],
)
def test_plan_counts_unless_early_stopping_ends_a_constant_rate(
    tmp_path: Path, rates: list[float], stops_early: bool, is_told: bool
) -> None:
    """Detectors are not told the length of a run with a constant learning rate that early stopping is to end."""
    history: list[dict[str, Any]] = [{"step": 5 + index, "learning_rate": rate} for index, rate in enumerate(rates)]
    history += [{"step": step, "eval_f1": value} for step, value in zip(STEPS, RISING, strict=True)]
    callbacks: dict[str, Any] = {"EarlyStoppingCallback": {}} if stops_early else {}
    write_state(tmp_path / "trainer_state.json", history, max_steps=900, stateful_callbacks=callbacks)
    run = read_only_run(tmp_path)
    assert run.total_steps == 900
    assert (run.observations()[0].progress is not None) is is_told


@pytest.mark.parametrize(
    ("lengths", "plan", "is_inferred"),
    [(range(10, 30), None, True), ([15] * 20, None, False), (range(10, 30), 1, False)],
)
def test_early_stopping_is_inferred_from_many_runs(lengths: list[int], plan: int | None, is_inferred: bool) -> None:
    """Runs of different lengths that end three evals after their best were stopped by a patience, unless they ran as
    long as planned; runs of one length say nothing."""
    runs = []
    for number, length in enumerate(lengths):
        run = Run(str(number), None if plan is None else length)
        for step in range(length):
            run.add(MetricRole.EVAL, step, float(min(step, length - 4)) - 0.1 * (step >= length - 3), None)
        runs.append(run)
    infer_early_stopping(runs)
    assert {bool(run.stopped_early) for run in runs} == {is_inferred}


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # advice on workers
def test_folder_that_lightning_writes_is_read(tmp_path: Path) -> None:
    """Its CSVLogger's `metrics.csv` lies in `lightning_logs/version_0`, with `max_steps` in `hparams.yaml`."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    class Scored(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return torch.sum(self.layer(batch[0]))

        def validation_step(self, batch: list[torch.Tensor]) -> None:
            self.log("val_acc", RISING[self.current_epoch])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters())

    logger = CSVLogger(str(tmp_path))
    logger.log_hyperparams({"max_steps": 40})
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(accelerator="cpu", max_epochs=12, logger=logger, enable_checkpointing=False, **quiet)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 1)))
    trainer.fit(Scored(), batches, batches)
    run = read_only_run(tmp_path)
    assert (run.name, run.total_steps) == (str(tmp_path / "lightning_logs" / "version_0"), 40)
    assert [score.step for score in run.scores()] == list(range(1, 24, 2))
    assert [score.value for score in run.scores()] == pytest.approx(RISING)


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_folder_that_transformers_writes_is_read(tmp_path: Path) -> None:
    """The states of its checkpoints are one run, whose eval chose the best model and ended the training early."""
    import torch
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.layer(x)
            return {"loss": ((scores - labels) ** 2).mean(), "logits": scores}

    qualities = iter([0.1, 0.3, 0.5, 0.4, 0.3, 0.2])
    arguments = TrainingArguments(
        str(tmp_path),
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        max_steps=100,
        metric_for_best_model="quality",
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(8)]
    trainer = Trainer(
        Model(),
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=lambda _: {"quality": next(qualities)},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train()
    run = read_only_run(tmp_path)
    assert (run.name, run.total_steps, run.roles.columns[MetricRole.EVAL]) == (str(tmp_path), 100, "eval_quality")
    assert list_evals(run) == [(2, 0.1), (4, 0.3), (6, 0.5), (8, 0.4), (10, 0.3), (12, 0.2)]
    assert not run.is_guessed
    assert "after 3 evals without an improvement" in explain_early_end(run)
