"""Which checkpoints this run has, and how one that lies elsewhere is fetched. Knows nothing of how they are made."""
