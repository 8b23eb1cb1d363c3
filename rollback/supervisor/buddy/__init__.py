"""A host's memory outlives it: each host keeps a copy of another one's part of the newest snapshot (`--replicas 2`)."""
