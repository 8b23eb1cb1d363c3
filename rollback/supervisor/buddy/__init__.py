"""A host's memory outlives it (`--replicas 2`): each host keeps another one's part of the newest snapshot, and its end
marks."""
