"""Showing a run in TensorBoard or Weights & Biases, from outside of the ranks: training never waits for a tracker."""
