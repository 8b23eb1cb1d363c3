"""What the journals hold, a module for each journal, and the history that folds them. Reads and writes no file."""
