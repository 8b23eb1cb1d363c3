"""What the operating system gives: files, small JSON, processes, control groups. Knows nothing of a run's record."""
