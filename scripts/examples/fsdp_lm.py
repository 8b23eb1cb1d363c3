"""A small GPT, sharded by FSDP2: `rollback launch --nproc 2 fsdp_lm.py`. Runs on CPU in seconds, and on GPUs."""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import rollback

CONTEXT, WIDTH = 64, 96


class Text(Dataset):
    """Windows of the standard library's source, as bytes."""

    def __init__(self, windows: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[: windows * CONTEXT + 1]
        self.bytes = torch.tensor(list(text))

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1]


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each byte from those before it."""
        x, wanted = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), wanted.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    model = Gpt(layers=2).to(device)
    mesh = init_device_mesh(device, (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Text(4096)
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)

    guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, max_steps=args.steps)
    torch.manual_seed(rank)
    loss = torch.zeros(())
    for epoch in guard.epochs(100):
        sampler.set_epoch(epoch)
        for batch in guard:
            loss = model(batch.to(device))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            guard.observe(loss, grad_norm=norm)
            if rank == 0 and guard.step % 20 == 0:
                print(f"step {guard.step}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
