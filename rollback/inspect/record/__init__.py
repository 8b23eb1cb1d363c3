"""What the reading commands share: a run's journals read, and what follows from them (its end, its cost)."""
