"""Advice about what acts on the training and is in no checkpoint: codes and texts."""

OPTIMIZER_NOT_KEPT = (
    "optimizer-not-kept",
    "an optimizer of the kind {kind} trains in the loop, and the guard was not handed all that it keeps and trains: no "
    "checkpoint has that, so a rollback leaves it as it is and a resume begins it anew. Hand it over by a name of its "
    "own, and its module too: Guard(..., other_optimizer=..., other_model=...)",
)
ATTRIBUTES_NOT_KEPT = (
    "optimizer-attributes",
    "each update changes {names} of the optimizer {kind}, attributes of its own that are not in its state_dict: no "
    "checkpoint has them, so a rollback leaves them as they are and a resume begins them anew. Where updates depend on "
    "them, as a bias correction or a momentum does, keep them in self.state[parameter], or a number in its group: "
    'group["t"] += 1',
)
GENERATOR_NOT_KEPT = (
    "generator-not-kept",
    "in the training {names} draws random numbers, a generator that no checkpoint has: a rollback leaves it as it is, "
    "and a resume begins it anew. If it makes no data, have it kept, in front of the loop: "
    "guard.keep(noise=generator). One that the script seeds in each batch needs nothing",
)
COPIES_NOT_KEPT = (
    "copies-not-kept",
    "the script writes to {names}, copies of the model's weights or a module of its own, and no checkpoint has these: "
    "a rollback leaves them as they are, and a resume begins them anew. Where something depends on them later, as on "
    "an average of the weights, hand over the module, or an object with state_dict and load_state_dict that has them, "
    "by a name of its own: Guard(..., average=average). A copy that is filled anew before each use needs nothing",
)
VARIABLES_NOT_KEPT = (
    "variables-not-kept",
    "the training writes to {names}, tensors of the script's that no checkpoint has: a rollback leaves them as they "
    "are, and a resume begins them anew. If a later batch reads what is written there, as from a queue of features, "
    'make them buffers of a module that is handed over: bank.register_buffer("queue", queue), Guard(..., bank=bank)',
)
NUMBERS_NOT_KEPT = (
    "numbers-not-kept",
    "each update changes {names}, numbers that modules have as attributes, and no checkpoint has these: a rollback "
    "leaves them as they are, and a resume begins them anew. Where the model's outputs depend on them, as on a "
    'temperature that falls, make them buffers: self.register_buffer("t", torch.zeros(()))',
)
SCHEDULER_NOT_KEPT = (
    "scheduler-not-kept",
    "a scheduler changes the learning rate, and the guard was not handed it: after a resume it begins with its first "
    "step, and a rollback does not bring it back. Guard(..., scheduler=scheduler)",
)
GROUP_ADDED = (
    "group-added",
    "the optimizer has got a parameter group since the guard was made (add_param_group), as for layers that are "
    "unfrozen: a rollback to before that ends the attempt, and the next start is refused behind it. Make the optimizer "
    "with all its groups before the guard is made (lr=0 for one whose time comes later): where this job ends, the same "
    "command then goes on",
)
EVALUATION_DRAWS = (
    "evaluation-draws",
    "another loader than the guard's, with persistent_workers=True, is read in the training: only its first pass draws "
    "a seed, from the random states that the training draws from. Behind a resume, or a rollback to before that pass, "
    "the run goes on with other random numbers. Give it a generator of its own: DataLoader(..., "
    "generator=torch.Generator())",
)
