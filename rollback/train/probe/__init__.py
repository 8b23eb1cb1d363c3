"""Asks the model about a rise, with batches of the healthy time."""
