"""The script's updates: optimizer hooks, gradient norms, habits, advice."""
