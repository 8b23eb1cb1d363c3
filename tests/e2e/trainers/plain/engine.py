"""The loop of a plain script, in a file of its own."""


def train(model, optimizer, loader):
    i = 0
    for (x,) in loader:
        i += 1
        model(x).square().mean().backward()
        i = i % 99
        if i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
