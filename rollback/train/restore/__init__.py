"""From a checkpoint to the live tensors: all ranks verify it and agree on it first."""
