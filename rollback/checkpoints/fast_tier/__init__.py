"""What lies in a host's memory and outlives its processes: slots with checkpoints, the ranks' end marks."""
