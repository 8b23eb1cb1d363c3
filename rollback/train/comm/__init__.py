"""Between the ranks: the pulse, the few blocking collectives, and the recorder of rank 0."""
