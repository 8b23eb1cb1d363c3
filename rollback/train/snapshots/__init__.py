"""From tensors to a checkpoint: when, capture, the snapshot in flight, what is kept of it."""
