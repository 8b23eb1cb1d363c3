"""The guard in the Trainer of torchtitan."""
