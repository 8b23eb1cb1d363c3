"""A script over Accelerate that saves folders, and begins behind the newest. Arguments and results as in epochs.py.

With --again it draws what it leaves out, and passes over it, as older scripts do.
"""

import copy
import glob
import os

import torch
from accelerate import Accelerator
from epochs import Net, arguments, take
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    args = arguments()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    x = torch.randn(args.samples * accelerator.num_processes, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(len(x)))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    first, left_out = 0, None
    if folders := sorted(glob.glob(f"{args.out}-saved/*")):
        accelerator.load_state(folders[-1])
        first, left_out = divmod(int(folders[-1][-3:]), len(loader))
    for epoch in range(first, args.epochs):
        resumes = left_out is not None and epoch == first
        batches = accelerator.skip_first_batches(loader, left_out) if resumes and not args.again else loader
        for step, (x, y, ids) in enumerate(batches):
            if args.again and resumes and step < left_out:
                continue
            take(accelerator.unwrap_model(model), ids, epoch, accelerator.process_index)
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 3:
                accelerator.save_state(f"{args.out}-saved/{epoch * len(loader) + step + 1:03}")
    kept = copy.deepcopy({"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()})
    accelerator.wait_for_everyone()
    accelerator.load_state(min(glob.glob(f"{args.out}-saved/*"), key=os.path.basename))
    kept |= {"first": accelerator.unwrap_model(model).state_dict()}
    torch.save({**kept, "random": torch.get_rng_state()}, f"{args.out}-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
