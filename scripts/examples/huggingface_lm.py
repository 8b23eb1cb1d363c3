"""A causal language model with the Trainer of Hugging Face transformers: a tiny one, on made text, no network."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rollback


class MadeText(Dataset):
    """Windows of an endless sum: after a and b comes a + b, with a little noise."""

    def __init__(self, count: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 64, (count, 32), generator=source)
        for place in range(2, 32):
            ids[:, place] = (ids[:, place - 1] + ids[:, place - 2] + (ids[:, place] == 0)) % 64
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="out/huggingface")
    parser.add_argument("--epochs", type=float, default=2)
    given = parser.parse_args()
    arguments = TrainingArguments(
        given.output_dir, num_train_epochs=given.epochs, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=3e-3, warmup_steps=10, logging_steps=10, eval_strategy="steps", eval_steps=20, save_steps=20,
        load_best_model_at_end=True, report_to="none", use_cpu=not torch.cuda.is_available(), seed=7,
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=MadeText(512, 1), eval_dataset=MadeText(64, 2)
    )
    rollback.protect(trainer)
    trainer.train()
    trainer.save_model(given.output_dir)
    print(f"evaluated: {trainer.evaluate()['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
