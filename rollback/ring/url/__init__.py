"""A ring at a URL, on any fsspec file system. Its format is in docs/format.md, "A ring at a URL"."""
