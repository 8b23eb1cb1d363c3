"""The script's updates: optimizer hooks, gradients and their norms."""
