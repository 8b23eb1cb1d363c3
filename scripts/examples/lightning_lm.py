"""A causal language model with the Trainer of Lightning: a tiny one, on made text, no network."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rollback


def made_text(count: int, seed: int) -> TensorDataset:
    """Windows of an endless sum: after a and b comes a + b, with a little noise."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (count, 32), generator=source)
    for place in range(2, 32):
        ids[:, place] = (ids[:, place - 1] + ids[:, place - 2] + (ids[:, place] == 0)) % 64
    return TensorDataset(ids)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 64)

    def loss(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1] - 1, device=ids.device)
        logits = self.head(self.layers(self.embedding(ids[:, :-1]), mask))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="out/lightning")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    lightning.seed_everything(7)
    trainer = lightning.Trainer(
        max_epochs=given.epochs, accumulate_grad_batches=2, gradient_clip_val=1.0, val_check_interval=0.5,
        callbacks=ModelCheckpoint(f"{given.output_dir}/saved", monitor="val_loss", save_top_k=2),
        log_every_n_steps=10, default_root_dir=given.output_dir, enable_progress_bar=False,
    )  # fmt: skip
    rollback.protect(trainer)
    trainer.fit(Model(), DataLoader(made_text(512, 1), 8, shuffle=True), DataLoader(made_text(64, 2), 8))
    if trainer.is_global_zero:
        print(f"evaluated: {trainer.callback_metrics['val_loss']:.6f}")


if __name__ == "__main__":
    main()
