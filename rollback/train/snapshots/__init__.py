"""From tensors to a checkpoint and back: capture, the snapshot in flight, the catalogue, restore."""
