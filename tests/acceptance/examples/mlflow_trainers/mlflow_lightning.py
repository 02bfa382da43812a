"""Lightning's MLFlowLogger and autologging on a tiny module, with its checkpoints; prints the ids of both runs."""

from __future__ import annotations

import os

import lightning
import mlflow
import mlflow.pytorch
import torch
from lightning.pytorch.loggers import MLFlowLogger

torch.set_num_threads(1)


class LinearModule(lightning.LightningModule):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 1})
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.line(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_accuracy", 1.0 - self.line(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 1)), batch_size=2)
logger = MLFlowLogger(
    experiment_name="lines", run_name="tiny", tracking_uri=os.environ["MLFLOW_TRACKING_URI"], log_model="all"
)
lightning.Trainer(
    max_epochs=3,
    logger=logger,
    accelerator="cpu",
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="output",
).fit(LinearModule(), loader, loader)
assert logger.run_id is not None
assert mlflow.MlflowClient().list_artifacts(logger.run_id) != []
print(logger.run_id)

mlflow.set_experiment("autologged")
mlflow.pytorch.autolog()
lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(LinearModule(), loader, loader)
mlflow.pytorch.autolog(disable=True)
run = mlflow.last_active_run()
assert run is not None
print(run.info.run_id)
