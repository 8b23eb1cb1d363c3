"""Plain scripts that no guard can be put behind, one by its name: `refused.py CASE [UPDATES BEFORE IT SHOWS]`."""

import itertools
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

case, late = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
torch.manual_seed(1)
DATA = TensorDataset(torch.randn(24 + 4 * late, 2))
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader, other = DataLoader(DATA, 4), DataLoader(DATA, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([sample[0] for sample in DATA])


class Own(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


def ahead(batches):
    held = None
    for (x,) in batches:
        if held is not None:
            yield held
        held = x
    yield held


def update(x, by=optimizer):
    model(x).square().mean().backward()
    by.step()
    by.zero_grad()


if case == "two optimizers":
    critic = torch.optim.Adam(model.parameters())
    for (x,) in loader:
        update(x)
        update(x, critic)
elif case == "two loaders":
    for (x,), (y,) in zip(loader, other, strict=False):
        (model(x).square().mean() + model(y).square().mean()).backward()
        optimizer.step()
elif case == "prefetch":
    batches = iter(loader)
    (x,) = next(batches)
    while x is not None:
        loss = model(x).square().mean()
        (x,) = next(batches, (None,))
        loss.backward()
        optimizer.step()
elif case == "a generator that holds a batch back":
    for _epoch in range(2):
        for x in ahead(loader):
            update(x)
elif case == "a loop that trains on the batch before":
    for _epoch in range(2):
        before = None
        for (x,) in loader:
            if before is not None:
                update(before)
            before = x
        update(before)
elif case == "a stream":
    for x in DataLoader(Stream(), 4):
        update(x)
elif case == "a loader of its own":
    for (x,) in Own(DATA, 4):
        update(x)
elif case == "a loader of torchdata":
    from torchdata.stateful_dataloader import StatefulDataLoader

    for (x,) in StatefulDataLoader(DATA, 4):
        update(x)
elif case == "no loader":
    for start in range(0, 24, 4):
        update(DATA.tensors[0][start : start + 4])
elif case == "a list of its batches":
    batches = list(loader)
    for _epoch in range(2):
        for (x,) in batches:
            update(x)
elif case == "a list behind the last epoch":
    for _epoch in range(2):
        for (x,) in loader:
            update(x)
    update(DATA.tensors[0])
elif case == "a list after a pass":
    for (x,) in loader:
        update(x)
    for start in range(0, 24, 4):
        update(DATA.tensors[0][start : start + 4])
elif case == "itertools.cycle":
    for i, (x,) in enumerate(itertools.cycle(loader)):
        if i == 15:
            break
        update(x)
elif case == "an optimizer that comes later":
    for i, (x,) in enumerate(loader):
        if i == late + 3:
            later = torch.optim.Adam(model.parameters())
        update(x, later if i >= late + 3 else optimizer)
elif case == "a second training":
    for _epoch in range(2):
        for (x,) in loader:
            update(x)
    optimizer = torch.optim.Adam(model.parameters())
    for (x,) in loader:
        update(x, optimizer)
elif case == "a count of its own":
    steps = 0
    while steps < 4:
        for (x,) in loader:
            update(x)
            steps += 1
            if steps == 4:
                break
elif case == "a loop in another file":
    import engine

    engine.train(model, optimizer, loader)
elif case == "a count beside next":
    taken, batches = 0, iter(loader)
    while True:
        update(next(batches)[0] * (taken < 99))
        taken += 1
        if taken == 4:
            break
elif case == "a limit of its own":
    for (x,) in itertools.islice(loader, 0, 4):
        update(x)
elif case == "a guard of its own":
    import rollback

    guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader)
    for (x,) in guard:
        update(x)
elif case == "an update of its own":
    for start in range(0, 24, 4):
        model(DATA.tensors[0][start : start + 4]).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
elif case == "a pass that trains nothing":
    seen = (x for (x,) in loader)
    print(f"mean: {sum(x.sum().item() for x in seen):.6f}")
    for _epoch in range(2):
        for (x,) in loader:
            update(x)
elif case == "a scheduler of each epoch":
    for _epoch in range(2):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for (x,) in loader:
            update(x)
            scheduler.step()
elif case == "a loader of each epoch":
    for _epoch in range(2):
        for (x,) in DataLoader(DATA, 4):
            update(x)
elif case == "a loader of each turn":
    turn = 0
    while turn < 2:
        for (x,) in DataLoader(DATA, 4):
            update(x)
        turn += 1
elif case == "one pass over several epochs":
    batches = (batch for _ in range(9) for batch in loader)
    for _epoch in range(3):
        for i, (x,) in enumerate(batches):
            update(x)
            if i == 3:
                break
elif case == "another optimizer behind its first epoch":
    for epoch in range(3):
        if epoch == 1:
            optimizer = torch.optim.Adam(model.parameters())
        for (x,) in loader:
            update(x, optimizer)
elif case == "a batch that it leaves out":

    class Torn(TensorDataset):
        def __getitem__(self, place):
            if place == 13:
                raise OSError("a file that is cut off")
            return super().__getitem__(place)

    torn = DataLoader(Torn(*DATA.tensors), 4)
    for _epoch in range(2):
        batches = iter(torn)
        while True:
            try:
                (x,) = next(batches)
            except StopIteration:
                break
            except:  # noqa: E722
                continue
            update(x)
elif case == "a loader twice in each epoch":
    for _epoch in range(3):
        for _half in "ab":
            for (x,) in loader:
                update(x)
print(f"the end: {model.weight.sum().item():.9f}")
