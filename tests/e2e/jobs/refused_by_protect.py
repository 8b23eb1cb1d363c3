"""What `rollback.protect` refuses: `refused_by_protect.py CASE ...` prints a JSON line for each: exit code and message.

With one case, the refusal is left to end the process.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

os.environ["HF_HUB_OFFLINE"] = "1"
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, DistributedType, GradientState
from transformers import Trainer, TrainerCallback, TrainingArguments

import rollback
from rollback.errors import RollbackError

DATA = TensorDataset(torch.zeros(8, 2))


def trainer(data: Any = DATA, **arguments: Any) -> Trainer:
    folder = tempfile.mkdtemp()
    args = TrainingArguments(folder, use_cpu=True, report_to="none", save_strategy="no", **arguments)
    return Trainer(model=nn.Linear(2, 1), args=args, train_dataset=data)


def protected(**arguments: Any) -> Trainer:
    made: Trainer = rollback.protect(trainer(**arguments))
    return made


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


def prepared(data: Any = DATA, *, dispatch: bool | None = False) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    model = nn.Linear(2, 1)
    loader = DataLoader(data, batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def alone_in_each_rank(make: Callable[[], tuple[Any, ...]]) -> None:
    made = make()
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}):  # of the ranks of a launch
        rollback.protect(*made)


def sharded(kind: str, *given: Any) -> None:
    objects = given or prepared()
    with mock.patch.object(Accelerator, "distributed_type", DistributedType[kind]):
        rollback.protect(*objects)


def in_parallel() -> None:
    accelerator, *objects = prepared()
    with mock.patch.object(
        Accelerator, "parallelism_config", mock.Mock(tp_enabled=True, cp_enabled=False), create=True
    ):
        rollback.protect(accelerator, *objects)


def of_version(library: str, version: str) -> Callable[[], None]:
    def refused() -> None:
        given = (trainer(),) if library == "transformers" else prepared()
        with mock.patch.object(importlib.metadata, "version", return_value=version):
            rollback.protect(*given)

    return refused


def of_a_source_tree() -> None:
    """As torchtitan is mostly run; nothing tells Python of its version."""
    given = trainer()
    unknown = importlib.metadata.PackageNotFoundError("transformers")
    with mock.patch.object(importlib.metadata, "version", side_effect=unknown):
        rollback.protect(given)


def with_completions(trained: Any, *, of_batches: int, updates_of: int) -> Any:
    """As TRL's GRPOTrainer has them."""
    trained._buffered_inputs, trained._step, trained.num_iterations = None, 0, 2
    trained.args.steps_per_generation = of_batches // 2
    trained.args.gradient_accumulation_steps = updates_of
    return trained


def with_an_average() -> None:
    kind = type("BEMACallback", (TrainerCallback,), {"__module__": "trl.trainer.callbacks"})
    made = protected()
    made.add_callback(kind())
    made.train()


def with_gpus() -> None:
    made = trainer()
    made.args._n_gpu = 2
    rollback.protect(made)


def trained_twice() -> None:
    made = protected()
    made.train.__self__.guard = None  # as after its first training
    made.train()


def behind_train() -> None:
    made = trainer()
    made.state.global_step = 4  # as it is then
    rollback.protect(made)


class OwnLoop(Trainer):  # type: ignore[misc]
    """As those copied from an earlier transformers, but for what does not count here."""

    by_training_step = True

    def _inner_training_loop(self, *_: Any, **__: Any) -> None:
        self.create_optimizer_and_scheduler(2)
        for batch in self.get_train_dataloader():
            if self.by_training_step:
                self.training_step(self.model, batch)
            else:
                self.model(batch[0]).sum().backward()
            self.optimizer.step()


class OwnSteps(OwnLoop):
    by_training_step = False


def with_own_loop(kind: type[Trainer]) -> None:
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", save_strategy="no")
    made = kind(model=nn.Linear(2, 1), args=args, train_dataset=DATA, data_collator=default_collate)
    rollback.protect(made).train()


class Learner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(x).square().mean()}


def evaluated_before() -> None:
    """On two ranks. The model is left out of DistributedDataParallel then, but by the oldest versions."""
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", save_strategy="no")
    made = Trainer(Learner(), args, lambda rows: {"x": torch.stack([x for (x,) in rows])}, DATA, DATA)
    rollback.protect(made)
    made.evaluate()
    made.train()
    print("the end")


def twice() -> None:
    rollback.protect(protected())


def with_two_loaders() -> None:
    accelerator, model, optimizer, loader = prepared()
    rollback.protect(accelerator, model, optimizer, loader, accelerator.prepare(DataLoader(DATA)))


def with_a_scheduler_by_its_name() -> None:
    accelerator, model, optimizer, loader = prepared()
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    rollback.protect(accelerator, model, optimizer, loader, scheduler=scheduler)


def without_prepare() -> None:
    accelerator, model, _, loader = prepared()
    rollback.protect(accelerator, model, torch.optim.SGD(model.parameters(), 0.1), loader)


def registered_late() -> None:
    accelerator, *objects = prepared()
    rollback.protect(accelerator, *objects, run="registered")
    accelerator.register_for_checkpointing(objects[0], torch.optim.SGD(objects[0].parameters(), 0.1))


def by_hand(method: str) -> None:
    accelerator, *objects = prepared()
    rollback.protect(accelerator, *objects, run=method)
    getattr(accelerator, method)("something")


CASES: dict[str, Callable[[], object]] = {
    "a stranger": lambda: rollback.protect(SimpleNamespace()),
    "nothing": rollback.protect,
    "an older transformers": of_version("transformers", "4.57.1"),
    "a newer transformers": of_version("transformers", "6.0.0"),
    "a source tree": of_a_source_tree,
    "an older accelerate": of_version("accelerate", "0.34.2"),
    "resume_from_checkpoint": lambda: protected().train(resume_from_checkpoint="out/checkpoint-5"),
    "auto_find_batch_size": lambda: protected(auto_find_batch_size=True),
    "ignore_data_skip": lambda: protected(ignore_data_skip=True),
    "enable_jit_checkpoint": lambda: protected(enable_jit_checkpoint=True),
    "an optimizer for each layer": lambda: protected(optim="galore_adamw_layerwise"),
    "the Trainer with DeepSpeed": lambda: sharded("DEEPSPEED", trainer()),
    "the Trainer with FSDP": lambda: sharded("FSDP", trainer()),
    "the Trainer with DataParallel": with_gpus,
    "completions for several updates": lambda: rollback.protect(
        with_completions(trainer(), of_batches=8, updates_of=4)
    ),
    "completions for an update and a half": lambda: rollback.protect(
        with_completions(trainer(), of_batches=4, updates_of=6)
    ),
    "an average of the weights": with_an_average,
    "hyperparameter_search": lambda: protected().train(trial={"learning_rate": 1.0}),
    "trained twice": trained_twice,
    "behind train": behind_train,
    "a loop of its own": lambda: with_own_loop(OwnLoop),
    "a loop and steps of its own": lambda: with_own_loop(OwnSteps),
    "evaluated before": evaluated_before,
    "twice": twice,
    "an average without a name": lambda: rollback.protect(trainer(), nn.Linear(2, 1)),
    "no setting": lambda: rollback.protect(trainer(), polcy="palm").train(),
    "what the Trainer has by its name": lambda: rollback.protect(trainer(), max_steps=4).train(),
    "a scheduler by its name": with_a_scheduler_by_its_name,
    "the dispatcher": lambda: rollback.protect(*prepared(dispatch=True)),
    "the Trainer with the dispatcher": lambda: protected(accelerator_config={"dispatch_batches": True}).train(),
    "a stream, as it is by default": lambda: rollback.protect(*prepared(Stream(), dispatch=None)),
    "the Trainer with a stream, as it is by default": lambda: rollback.protect(trainer(Stream(), max_steps=2)).train(),
    "DeepSpeed": lambda: sharded("DEEPSPEED"),
    "Megatron": lambda: sharded("MEGATRON_LM"),
    "FSDP": lambda: sharded("FSDP"),
    "tensor parallelism": in_parallel,
    "the Trainer in each of several ranks": lambda: alone_in_each_rank(lambda: (trainer(),)),
    "an Accelerator in each of several ranks": lambda: alone_in_each_rank(prepared),
    "an Accelerator alone": lambda: rollback.protect(prepared()[0]),
    "two loaders": with_two_loaders,
    "without prepare": without_prepare,
    "registered behind it": registered_late,
    "load_state": lambda: by_hand("load_state"),
    "skip_first_batches": lambda: by_hand("skip_first_batches"),
}


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    if len(sys.argv) == 2:
        CASES[sys.argv[1]]()
        return
    for name in sys.argv[1:]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            CASES[name]()
            answer: dict[str, Any] = {"exit_code": 0, "message": "was not refused"}
        except RollbackError as error:
            answer = {"exit_code": int(error.exit_code), "message": str(error)}
        print("CASE", json.dumps({"name": name, "left": sorted(map(str, Path().iterdir())), **answer}))


if __name__ == "__main__":
    main()
