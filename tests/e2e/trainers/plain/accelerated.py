"""A plain script over what Accelerate has prepared. Arguments and results as in epochs.py."""

import torch
from accelerate import Accelerator
from epochs import Net, arguments, evaluate, take
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    args = arguments()
    torch.use_deterministic_algorithms(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(7)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(args.samples * accelerator.num_processes, 8, generator=source)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(len(x)))
    validation = DataLoader(data, batch_size=16)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rank = accelerator.process_index
    torch.manual_seed(100 + rank)
    for epoch in range(args.epochs):
        model.train()
        for x, y, ids in loader:
            if take(accelerator.unwrap_model(model), ids, epoch, rank):
                y = y * float("nan")
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.6f}, validation {evaluate(model, validation):.6f}")
    inner = accelerator.unwrap_model(model)
    kept = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**kept, "random": torch.get_rng_state()}, f"{args.out}-{rank}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
