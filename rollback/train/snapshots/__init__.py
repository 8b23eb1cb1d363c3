"""From tensors to a checkpoint: capture, the snapshot in flight, the catalogue."""
