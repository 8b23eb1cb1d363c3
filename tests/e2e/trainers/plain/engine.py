"""The loop of a plain script, in a file of its own."""


def train(model, optimizer, loader):
    i = 0
    for (x,) in loader:
        i += 1  # noqa: SIM113 - a count of its own is what this file is for
        model(x).square().mean().backward()
        if i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
