"""The frameworks' callbacks, called as the frameworks call them, with the fake service."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clients.fake_service import KEY, FakeServer, FakeService
from tests.clients.runs import FAST_LIMITS, METRICS, list_messages, list_posts, open_run

pytestmark = [
    pytest.mark.real,
    pytest.mark.usefixtures("ended_runs"),
    pytest.mark.nightly,
]  # importing a framework takes up to 30 s

MakeCallback = Callable[..., Any]


@pytest.fixture
def connection(server: FakeServer) -> dict[str, Any]:
    """The arguments by which a callback reports to the fake service."""
    return {"url": server.url, "key": KEY, "metrics": METRICS, "limits": FAST_LIMITS}


@pytest.fixture
def make_keras_callback(connection: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> MakeCallback:
    """Makes Keras's callback of a training called `fit`."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    from evalstop_client.callbacks.keras import EvalStopCallback

    def make(**arguments: Any) -> Any:
        callback = EvalStopCallback(name="fit", **connection, **arguments)
        callback.set_params({"epochs": 4})
        return callback

    return make


def train_epochs(callback: Any, epochs: int = 1, save: Callable[[int], object] = bool) -> None:
    """Call Keras's callback as fit() does during epochs whose checkpoints `save` writes."""
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        save(epoch)
        callback.on_epoch_end(epoch, {"score": 0.5})


def fit_lightning(
    callbacks: list[Any],
    on_step: Callable[[Any], object] = bool,
    resume_from: Path | None = None,
    optimizers: int = 1,
    **options: Any,
) -> None:
    """Fit a model whose score rises, one step an epoch; several optimizers are stepped by hand, each once a batch."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Rising(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            self.log("score", float(self.global_step))
            on_step(self)
            if not self.automatic_optimization:
                several: Any = self.optimizers()
                for optimizer in several:
                    optimizer.step()
            return torch.sum(self.layer(batch[0]))

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.parameters()) for _ in range(optimizers)]

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=callbacks, accelerator="cpu", log_every_n_steps=1, **quiet, **options)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(1, 1)))
    trainer.fit(Rising(), batches, ckpt_path=resume_from)


@pytest.mark.parametrize("path", ["{batch}.keras", "{}.keras", "{epoch.x}.keras", Path("{batch}.keras")])
def test_unknown_checkpoint_path_does_not_end_the_fit(
    make_keras_callback: MakeCallback, service: FakeService, path: str | Path
) -> None:
    """A path of ModelCheckpoint with a placeholder that an epoch's end does not know registers no checkpoint."""
    callback = make_keras_callback(checkpoints=path)
    train_epochs(callback)
    callback.on_train_end()
    assert [kind for kind, _ in list_posts(service)] == ["runs", "observations", "finish"]


def test_only_written_files_are_checkpoints(
    make_keras_callback: MakeCallback, service: FakeService, tmp_path: Path
) -> None:
    """A file that an epoch did not write, as with `save_best_only`, is no checkpoint of that epoch."""
    path = tmp_path / "best.keras"
    path.write_text("of an earlier training")

    def save(epoch: int) -> None:
        if epoch in (1, 3):
            path.write_text(str(epoch))
            os.utime(path, (epoch, epoch))  # clocks of file systems may be coarse

    callback = make_keras_callback(checkpoints=path)
    train_epochs(callback, 4, save)
    callback.on_train_end()
    assert list(service.find_run("fit").checkpoints) == [2, 4]


def test_checkpoints_in_an_object_store_are_found_as_keras_writes_them(
    make_keras_callback: MakeCallback, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras writes to gs:// through TensorFlow's gfile, which says whether an epoch wrote its file."""
    written: dict[str, int] = {}
    gfile = SimpleNamespace(exists=written.__contains__, stat=lambda path: SimpleNamespace(mtime_nsec=written[path]))
    monkeypatch.setitem(sys.modules, "tensorflow.io.gfile", gfile)

    def save(epoch: int) -> None:
        if epoch in (1, 3):
            written["gs://bucket/best.keras"] = epoch

    callback = make_keras_callback(checkpoints="gs://bucket/best.keras")
    train_epochs(callback, 4, save)
    callback.on_train_end()
    assert service.find_run("fit").checkpoints == dict.fromkeys((2, 4), "gs://bucket/best.keras")


@pytest.mark.parametrize(
    ("job", "restarted"),
    [({"SLURM_JOB_ID": "4711"}, {"SLURM_RESTART_COUNT": "1"}), ({"EVALSTOP_KUBERNETES_NAME": "train"}, {})],
)
def test_restarted_job_that_starts_from_scratch_supersedes(
    make_keras_callback: MakeCallback,
    server: FakeServer,
    service: FakeService,
    monkeypatch: pytest.MonkeyPatch,
    job: dict[str, str],
    restarted: dict[str, str],
) -> None:
    """A job that was started again without a checkpoint attaches to its run, whose earlier values no longer count."""
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with open_run(server, name="fit", metrics=METRICS) as before:  # it never ended: its node failed
        before.log({"score": 0.25}, step=1)
        assert before.flush()
        for name, value in restarted.items():
            monkeypatch.setenv(name, value)
        callback = make_keras_callback()
        train_epochs(callback)
        callback.on_train_end()
    assert [run.name for run in service.runs.values()] == ["fit"]
    assert service.find_run("fit").observations == {(1, "score", 1): 0.25, (2, "score", 1): 0.5}


def test_fit_in_a_loop_is_one_run(make_keras_callback: MakeCallback, service: FakeService) -> None:
    """Each `fit` of the same model goes on where the last one ended; one of another model is a run of its own."""
    import keras

    callback = make_keras_callback()
    callback.set_params({"epochs": 1})
    callback.set_model(keras.Sequential())
    for _ in range(3):
        train_epochs(callback)
        callback.on_train_end()
    callback.set_model(keras.Sequential())
    train_epochs(callback)
    callback.on_train_end()
    stored = [(run.name, [step for _, _, step in run.observations]) for run in service.runs.values()]
    assert stored == [("fit", [1, 2, 3]), ("fit-2", [1])]


def test_training_after_a_failed_one_is_another_run(make_keras_callback: MakeCallback, service: FakeService) -> None:
    """A training that raised, of which no callback hears, is reported as failed once the next one begins."""
    for _ in range(2):  # as in a notebook, where a cell fails and is run again
        callback = make_keras_callback()
        train_epochs(callback)
    callback.on_train_end()
    assert [(run.name, run.status) for run in service.runs.values()] == [("fit", "failed"), ("fit-2", "completed")]
    assert len(service.find_run("fit-2").observations) == 1


@pytest.mark.filterwarnings("ignore")  # advice of Lightning's on workers and srun
def test_each_save_registers_the_file_that_it_wrote(
    connection: dict[str, Any], service: FakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that Lightning overwrites is registered at each step; after a resume, older files are not registered. The
    client warns where files are deleted or overwritten."""
    from evalstop_client.callbacks.lightning import EvalStopCallback
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(epochs: int, filename: str, keep: int, resume_from: Path | None = None) -> None:
        watch = EvalStopCallback(name=filename, **connection)
        saving = ModelCheckpoint(tmp_path, filename=filename, monitor="score", mode="max", save_top_k=keep)
        fit_lightning([watch, saving], resume_from=resume_from, max_epochs=epochs)

    def list_checkpoints(name: str) -> list[tuple[int, str]]:
        return [(step, Path(uri).name) for step, uri in service.find_run(name).checkpoints.items()]

    fit(3, "best", 1)
    assert list_checkpoints("best") == [(1, "best.ckpt"), (2, "best.ckpt"), (3, "best.ckpt")]
    deletes, overwrites = list_messages(caplog)
    assert "save_top_k=1" in deletes
    assert "steps 1 and 2 have one uri" in overwrites
    caplog.clear()
    fit(2, "{step}", -1)
    fit(3, "{step}", -1, tmp_path / "step=2.ckpt")
    assert list_messages(caplog) == []
    assert list_checkpoints("{step}") == [(step, f"step={step}.ckpt") for step in (1, 2, 3)]


@pytest.mark.filterwarnings("ignore")  # advice of Lightning's on workers
def test_planned_length_is_in_steps_or_left_out(connection: dict[str, Any], service: FakeService) -> None:
    """With manual optimization Lightning plans batches and counts the steps of all optimizers: half of the truth.

    It plans an accumulation of gradients that changes as it begins.
    """
    from evalstop_client.callbacks.lightning import EvalStopCallback
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    for name, optimizers, others in (("one", 1, []), ("gan", 2, []), ("eased", 1, [{0: 2, 1: 1}])):
        callbacks = [EvalStopCallback(name=name, **connection), *map(GradientAccumulationScheduler, others)]
        fit_lightning(callbacks, optimizers=optimizers, max_epochs=3, enable_checkpointing=False)
    posts = list_posts(service)
    assert [body.get("total_steps") for kind, body in posts if kind == "runs"] == [3, None, None]
    assert max(body["step"] for kind, body in posts if kind == "observations") == 6


@pytest.mark.filterwarnings("ignore")  # advice of Lightning's on workers
def test_trainer_without_loggers_keeps_its_folder(
    connection: dict[str, Any], service: FakeService, tmp_path: Path
) -> None:
    """A module that writes to the trainer's folder, or draws if there is a logger, trains as without the callback."""
    from evalstop_client.callbacks.lightning import EvalStopCallback

    folders: list[str | None] = []

    def draw(module: Any) -> None:
        folders.append(module.trainer.log_dir)
        if module.logger is not None:
            module.logger.experiment.add_scalar("score", 0.5)

    watch = EvalStopCallback(name="fit", **connection)
    fit_lightning([watch], draw, max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=False)
    assert folders == [str(tmp_path)]
    assert service.find_run("fit").status == "completed"


def test_checkpoint_in_an_object_store_keeps_its_uri(tmp_path: Path) -> None:
    """A path that is a uri, as Lightning's may be, is registered as it is; another one is a file's."""
    from evalstop_client.callbacks.arguments import to_uri

    assert to_uri("s3://bucket/a run/step=2.ckpt") == "s3://bucket/a run/step=2.ckpt"
    assert to_uri(tmp_path / "a run") == f"file://{tmp_path}/a run"


def test_a_count_of_steps_is_not_what_chooses_the_best_checkpoint() -> None:
    """`ModelCheckpoint(monitor="global_step", mode="max")` keeps the last checkpoints, often beside one of the best."""
    from evalstop_client.callbacks.arguments import choose_monitor

    last = [("global_step", "max"), ("epoch", "max"), ("step", "max"), ("trainer/global_step", "max"), (None, "min")]
    assert choose_monitor(last) == (None, "")
    assert choose_monitor([*last, ("val/loss", "min")]) == ("val/loss", "minimize")


@pytest.mark.filterwarnings("ignore")  # advice of Lightning's on workers
def test_metric_of_the_best_checkpoint_is_declared(
    connection: dict[str, Any], service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers, Lightning and Keras choose their best checkpoint by is a label of the run, unless `metrics`
    sets the roles or the trainer watches its own loss."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    from evalstop_client.callbacks import keras, lightning, transformers
    from keras.callbacks import ModelCheckpoint as KerasCheckpoint
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from transformers import TrainerControl, TrainerState, TrainingArguments

    def declare(name: str) -> str | None:
        labels: dict[str, str] = next(body for kind, body in list_posts(service) if body.get("name") == name)["labels"]
        return labels.get("evalstop.eval")

    def train(name: str, metric: str, **given: Any) -> None:
        trainer = transformers.EvalStopCallback(**{**connection, "metrics": "auto", **given})
        arguments = TrainingArguments(str(tmp_path), run_name=name, metric_for_best_model=metric)
        trainer.on_train_begin(arguments, TrainerState(), TrainerControl())
        trainer.on_train_end(arguments, TrainerState(), TrainerControl())

    by_name = {**connection, "metrics": "auto"}
    train("hf-loss", "loss")
    train("hf-wer", "eval_wer")
    train("hf-given", "loss", metrics=METRICS, labels={"team": "a"})
    stopping = EarlyStopping("score", mode="max", strict=False, check_on_train_epoch_end=True)
    fit_lightning(
        [lightning.EvalStopCallback(name="lit", **by_name), stopping], max_epochs=1, enable_checkpointing=False
    )
    saving = ModelCheckpoint(tmp_path, monitor="train_loss", save_top_k=-1)
    watch = lightning.EvalStopCallback(name="lit-loss", labels={"team": "a"}, **by_name)
    fit_lightning([watch, saving, stopping], max_epochs=0 + 1)
    for name, best_only in (("keras", True), ("keras-all", False)):
        checkpoint = KerasCheckpoint(tmp_path / "k.keras", monitor="val_acc", mode="max", save_best_only=best_only)
        callback = keras.EvalStopCallback(name=name, checkpoints=checkpoint, labels={"team": "a"}, **by_name)
        callback.set_params({"epochs": 1})
        train_epochs(callback)
        callback.on_train_end()
    names = ("hf-loss", "hf-wer", "hf-given", "lit", "lit-loss", "keras", "keras-all")
    assert [declare(name) for name in names] == [
        "eval_loss:minimize",
        "eval_wer:maximize",
        None,
        "score:maximize",
        "score:maximize",
        "val_acc:maximize",
        None,
    ]


@pytest.mark.parametrize(
    ("schedule", "stops_early", "planned"),
    [("constant", True, None), ("constant_with_warmup", True, None), ("constant", False, 300), ("cosine", True, 300)],
)
def test_plan_of_transformers_is_reported_unless_early_stopping_ends_a_constant_rate(
    connection: dict[str, Any], service: FakeService, tmp_path: Path, schedule: str, stops_early: bool, planned: int
) -> None:
    """`max_steps` is only an upper bound where early stopping is to end a run whose learning rate stays constant."""
    from evalstop_client.callbacks.transformers import EvalStopCallback
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

    arguments = TrainingArguments(str(tmp_path), run_name="planned", lr_scheduler_type=schedule)
    callbacks: list[Any] = [EarlyStoppingCallback()] if stops_early else []
    state = TrainerState(max_steps=300, stateful_callbacks=callbacks)
    watch = EvalStopCallback(**connection)
    watch.on_train_begin(arguments, state, TrainerControl())
    watch.on_train_end(arguments, state, TrainerControl())
    opened = next(body for kind, body in list_posts(service) if body.get("name") == "planned")
    assert opened.get("total_steps") == planned
