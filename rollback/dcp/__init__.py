"""Checkpoints for torch.distributed.checkpoint (DCP), written by its own writer: the one service that needs torch."""
