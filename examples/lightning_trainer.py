"""Lightning's Trainer, watched: `python examples/lightning_trainer.py`.

The callback is all that is new. The model has more weights than data and learns the noise by heart: its `val_loss`
turns.
"""

import torch
from evalstop_client.callbacks.lightning import EvalStopCallback
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(1)
truth = torch.randn(64, 1)
points, held_out = torch.randn(40, 64), torch.randn(500, 64)
training = TensorDataset(points, points @ truth + 4 * torch.randn(40, 1))
validation = TensorDataset(held_out, held_out @ truth)


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = mse_loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


watch = EvalStopCallback(
    name="lightning-trainer",
    policy="paper",
    mode="enforce",
)
trainer = Trainer(
    max_steps=5_000,
    max_epochs=-1,
    val_check_interval=10,
    check_val_every_n_epoch=None,
    log_every_n_steps=10,
    callbacks=[watch, ModelCheckpoint("checkpoints", every_n_train_steps=10, save_top_k=-1)],
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Linear(), DataLoader(training, batch_size=40), DataLoader(validation, batch_size=500))
print(f"ended at step {trainer.global_step} of {trainer.max_steps}")
