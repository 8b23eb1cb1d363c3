"""A causal language model in a loop of one's own over what Hugging Face Accelerate has prepared; tiny, on made text."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from huggingface_lm import MadeText
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import rollback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(7)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(MadeText(500, 1), batch_size=8, shuffle=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, given.epochs * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = rollback.protect(accelerator, model, optimizer, loader, scheduler)

    loss = torch.zeros(())
    for epoch in range(given.epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
