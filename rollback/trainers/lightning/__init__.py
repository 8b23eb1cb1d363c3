"""The guard in the Trainer of Lightning."""
