"""What the source of a training script says: where its training loop is, how a guard would be written into it. Pure.

Nothing of the script is run. Not here: what is seen while it runs (`rollback.trainers.adopt`).
"""
