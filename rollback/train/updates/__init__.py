"""What the script does to gradients and optimizer: hooks, norms, habits, advice."""
