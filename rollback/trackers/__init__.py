"""Showing a run in TensorBoard or Weights & Biases, from outside of the ranks: training never waits for a tracker.

story         what a run directory tells, in the order in which a tracker should hear it
tensorboard   the curve without the discarded steps
wandb         a run for each stretch of steps, grouped
follow        reading a run directory to its end, or as it grows
process       a process beside the supervisor that does so
"""
