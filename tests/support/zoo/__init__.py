"""A zoo of data loaders, written after torch's and torchdata's documentation, and what befalls a training on each.

kinds       what a loader kind is: how it is made, how its batches are read, what is expected of each trial
mapstyle    `DataLoader`s over data sets that are read by index, and their samplers
iterable    `DataLoader`s over `IterableDataset`s, wrappers, lists, generators, callables
stateful    torchdata's loaders and nodes, and hand-written loaders with a state of their own
attempt     one attempt of a tiny training, in a process forked warm
trials      the trials, and the judgement on what was trained on
"""
