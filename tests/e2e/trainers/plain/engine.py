"""The loop of a plain script, in a file of its own."""


class Seen:
    batches = 0


def note(*all_seen):
    for seen in all_seen:
        seen.batches += 1


def train(model, optimizer, loader):
    seen = Seen()
    for (x,) in loader:
        note(seen)
        model(x).square().mean().backward()
        if seen.batches % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
