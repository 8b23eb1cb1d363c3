"""What runs inside torchrun's process. Private names of torch are used here and nowhere else."""
