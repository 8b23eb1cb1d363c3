"""A checkpoint as bytes: shards with tensors and their hashes, the trees that refer to them, the manifest."""
