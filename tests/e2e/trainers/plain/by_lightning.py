"""A plain script that trains by the Trainer of Lightning. Arguments and results as in epochs.py."""

import os

import lightning
import torch
from epochs import Net, arguments, take
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        x, y, ids = batch
        take(self.net, ids, self.current_epoch, self.global_rank)
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    args = arguments()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(7)
    x = torch.randn(args.samples * ranks, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(len(x)))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, deterministic=True,
    )  # fmt: skip
    module = Module()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    trainer.fit(module, loader)
    if args.again:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)
    kept = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(), "steps": trainer.global_step}
    torch.save({**kept, "random": torch.get_rng_state()}, f"{args.out}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
