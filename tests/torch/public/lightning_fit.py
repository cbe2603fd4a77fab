"""A LightningModule under Lightning's Trainer: mixed precision, clipping, validation, checkpoints."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def training_step(self, batch, place):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x.view(x.size(0), -1)), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, place):
        x, y = batch
        logits = self.net(x.view(x.size(0), -1))
        self.log("val_acc", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        }


data = TensorDataset(torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,)))
trainer = L.Trainer(
    max_epochs=1,
    accelerator="auto",
    devices=1,
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    callbacks=[L.pytorch.callbacks.ModelCheckpoint(dirpath="out")],
)
trainer.fit(Lit(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=32))
