"""A plain script that trains by the Trainer of Hugging Face. Arguments and results as in epochs.py."""

import torch
from epochs import Net, arguments, take
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(Net):
    def forward(self, x, y):
        return {"loss": nn.functional.mse_loss(super().forward(x), y)}


class Taking(Trainer):
    def compute_loss(self, model, inputs, *given, **others):
        inner = self.accelerator.unwrap_model(model)
        take(inner, inputs.pop("ids"), int(self.state.epoch), self.args.process_index)
        return super().compute_loss(model, inputs, *given, **others)


def main():
    args = arguments()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    given = TrainingArguments(
        f"{args.out}-saved", use_cpu=True, per_device_train_batch_size=4, num_train_epochs=args.epochs, seed=7,
        gradient_accumulation_steps=args.accumulate, learning_rate=1e-2, logging_steps=5, save_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    x = torch.randn(args.samples * given.world_size, 8, generator=torch.Generator().manual_seed(1))
    data = [{"x": row, "y": row.sum(0, keepdim=True).sin(), "ids": number} for number, row in enumerate(x)]
    trainer = Taking(model=Model(), args=given, train_dataset=data)
    trainer.train()
    if args.again:
        trainer.train()
    kept = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    kept |= {"steps": trainer.state.global_step, "losses": [row.get("loss") for row in trainer.state.log_history]}
    torch.save({**kept, "random": torch.get_rng_state()}, f"{args.out}-{given.process_index}.pt")


if __name__ == "__main__":
    main()
