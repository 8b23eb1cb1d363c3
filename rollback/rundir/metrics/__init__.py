"""The lines of all judged steps as columns, so that a long run's curve is read in seconds."""
