"""Likely mistakes in the script: what finds them, and what is said of them. Nothing here changes the training."""
