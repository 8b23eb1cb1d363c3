"""Small jobs in the loops of other libraries, one after another: `trainer_job.py SCENARIOS`, as job.py.

SCENARIOS is a JSON file with a list of scenarios, each with `name`, `toy` (a TrainerJob), and optionally `run`
(default: the supervisor's; null: unprotected), `skips_of` (a run whose skip list is given from the start), `kill`
(`[rank, batch]`: that rank kills itself there, in the first attempt), `told` (`[rank, batch, how]`: there that rank has
the job stopped, in the first attempt: `SIGTERM` to the supervisor, or `rollback stop`), `die` (`[fact, n]`: rank 0
kills itself before the n-th fact of that kind is journalled; with `behind`, behind that), `dies` (`[rank, event,
step]`: that rank kills itself in that event of a Trainer's callbacks, behind so many steps, in the first attempt) and
`log` (of another name).
Each rank writes `<name>-<rank>.json` beside it: its `portrait`. Consumed samples are logged to `<name>-<rank>.log`,
over all attempts.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from scenarios import perform_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset
from toy import SETTINGS, flat, left_out, skip_list

import rollback
from rollback.environment import ENV_SUPERVISOR
from rollback.rundir.paths import RunPaths
from rollback.train.comm.recorder import Recorder

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
JOB = Path(__file__)
LIMIT = 1200.0  # seconds for one start of it, on a machine that does other things as well
MODULES = (
    "transformers.trainer transformers.models.gpt2.modeling_gpt2 accelerate lightning s3fs "
    "torchdata.stateful_dataloader"
)
"""What is imported warm; the last two when a training begins, by Lightning and by Accelerate."""
SHARDED: dict[str, Any] = {
    "fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["GPT2Block"],
    "cpu_ram_efficient_loading": False,
}  # fmt: skip
"""Of Accelerate's plugin; `SHARDED_TRAINER` of TrainingArguments."""
SHARDED_TRAINER: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": "SHARDED_STATE_DICT"},
}


@dataclass(frozen=True)
class TrainerJob:
    """One job. bad_at: positions of batches whose loss is NaN, on rank `bad_rank`. The rest is the library's."""

    loop: str = "trainer"
    """`trainer`, `sft`, `dpo`, `grpo`, `accelerate`, `lightning`, `torchtitan`; `lora`: a script's own loop over a
    model of PEFT's."""
    samples: int = 60
    """A rank's; `torchtitan`: words in a document."""
    batch_size: int = 2
    epochs: float = 2
    max_steps: int = -1
    accumulate: int = 1
    workers: int = 0
    bad_at: tuple[int, ...] = ()
    bad_rank: int = 0
    evaluate: int = 0
    """Every so many steps; `accelerate`: behind each epoch."""
    save: int = 0
    """Every so many steps; `accelerate`: and behind each epoch."""
    stop_at: int = 0
    """The step at which a callback stops the training."""
    stops_when_told: bool = False
    """Whether a callback does so once a handler of the script's own has got SIGTERM."""
    settings: dict[str, Any] = field(default_factory=dict)
    stream: str = ""
    """Where the data are an IterableDataset: `plain`, `drawing` tokens from the process's random states, `datasets`
    or `datasets, shuffled`."""
    scaled: bool = False
    """With the gradient scaler that Accelerate makes for float16 on a GPU. Its first factors are too large."""
    sharded: bool = False
    """By the second version of FSDP: the Trainer's, Accelerate's, or as Lightning's strategy for it has it."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further arguments: TrainingArguments', DataLoaderConfiguration's."""

    def but(self, **changes: Any) -> "TrainerJob":
        return replace(self, **changes)

    def with_settings(self, **settings: Any) -> "TrainerJob":
        return replace(self, settings={**self.settings, **settings})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrainerJob":
        fields: Any = {
            key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()
        }
        return cls(**fields)


class Text(Dataset[Any]):
    """Made text: sample i begins with token i."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(600, 900, (count, 12), generator=torch.Generator().manual_seed(1))
        self.ids[:, 0] = torch.arange(count)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


class Stream(IterableDataset[Any]):
    """The same text, in order. drawing: with tokens drawn while it is read."""

    def __init__(self, count: int, *, drawing: bool) -> None:
        self.text, self.drawing = Text(count), drawing

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(len(self.text)):
            sample = {name: item.clone() for name, item in self.text[index].items()}
            if self.drawing:
                sample["input_ids"][-1] = torch.randint(600, 900, ())
            yield sample


class Job:
    """A job as it runs on one rank."""

    def __init__(self, job: TrainerJob, run: Path | None, scenario: dict[str, Any], folder: Path) -> None:
        self.job, self.run, self.folder = job, run, folder
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.log = folder / f"{scenario.get('log', scenario['name'])}-{self.rank}.log"
        self.output = folder / f"{scenario['name']}-output"
        first = os.environ.get("ROLLBACK_ATTEMPT", "1") == "1"
        self.kill = scenario.get("kill") if first else None
        self.told = scenario.get("told") if first else None
        self.dies = scenario.get("dies") if first else None
        self.guard: Any = None
        self.poisoned = self.was_told = False
        self.micro = 0
        if job.stops_when_told:
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "was_told", True))

    def model(self) -> nn.Module:
        """A GPT-2 of two layers, with dropout."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=1000, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        model: nn.Module = GPT2LMHeadModel(config)
        model.register_forward_hook(self.spoil)
        return model

    def data(self) -> Any:
        count = self.job.samples * self.ranks
        if self.job.stream.startswith("datasets"):
            import datasets

            ids = Text(count).ids.tolist()
            stream = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).to_iterable_dataset(num_shards=2)
            shuffled = stream.shuffle(seed=3, buffer_size=8) if self.job.stream == "datasets, shuffled" else stream
            return shuffled.with_format("torch")
        return Stream(count, drawing=self.job.stream == "drawing") if self.job.stream else Text(count)

    def spoil(self, module: nn.Module, given: Any, output: Any) -> Any:
        if self.poisoned and module.training and torch.is_grad_enabled():  # not while TRL generates
            asked = ("loss", "log_probs")  # the latter is what TRL asks for, if not for logits alone
            for name in [name for name in asked if getattr(output, name, None) is not None] or ["logits"]:
                setattr(output, name, getattr(output, name) * float("nan"))
        return output

    def take(self, step: int, ids: Tensor, position: int | None) -> None:
        """A batch is about to be trained on."""
        if self.guard is not None:
            self.guard._loop.checkpoints.snapshots.wait()  # as `Toy.patient`
            if self.kill == [self.rank, position]:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.told and self.told[:2] == [self.rank, position]:
                self.have_it_stopped(self.told[2])
                self.told = None
        self.poisoned = position in self.job.bad_at and self.rank == self.job.bad_rank
        line = json.dumps([step, self.micro, ids[:, 0].tolist()]) + "\n"
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(line)

    def have_it_stopped(self, how: str) -> None:
        """It is on its way when this returns: training must not be over before."""
        if how == "SIGTERM":
            os.kill(int(os.environ[ENV_SUPERVISOR].partition(":")[0]), signal.SIGTERM)
            while not self.guard._loop.requests.stop.requested:
                os.sched_yield()
        else:
            subprocess.Popen([sys.executable, "-m", "rollback", "stop", str(self.run), "--why", "maintenance"])
            while not list(RunPaths(self.guard.run).requests.glob("*.json")):
                os.sched_yield()

    # transformers ----------------------------------------------------------------------------------------------------

    def train_by_trainer(self) -> dict[str, str]:
        import transformers

        return self.train_by(
            transformers.Trainer, model=self.model(), args=self.arguments(transformers.TrainingArguments),
            train_dataset=self.data(), eval_dataset=Text(8),
        )  # fmt: skip

    def train_by_sft(self) -> dict[str, str]:
        """TRL's trainer, of a LoRA. What it counts for its logs is its own."""
        import datasets
        import trl
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        data = datasets.Dataset.from_dict({"input_ids": Text(self.job.samples * self.ranks).ids.tolist()})
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
        return self.train_by(
            trl.SFTTrainer, model=self.llama(), args=self.arguments(trl.SFTConfig), train_dataset=data,
            eval_dataset=data, peft_config=self.adapter(),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
        )  # fmt: skip

    def train_by_dpo(self) -> dict[str, str]:
        """TRL's trainer, with a reference model that follows the trained one."""
        import datasets
        import trl

        texts = self.texts()
        data = datasets.Dataset.from_dict(
            {"prompt": texts, "chosen": [f"w{i % 90 + 5}" for i in range(len(texts))], "rejected": ["w7"] * len(texts)}
        )
        return self.train_by(
            trl.DPOTrainer, model=self.llama(), ref_model=self.llama(), args=self.arguments(trl.DPOConfig),
            train_dataset=data, processing_class=self.words(),
        )  # fmt: skip

    def train_by_grpo(self) -> dict[str, str]:
        """TRL's trainer, whose completions serve several batches."""
        import datasets
        import trl

        def variety(completions: list[str], **_: Any) -> list[float]:
            return [float(sum(map(int, text.replace("w", "").split())) % 97) for text in completions]

        texts = self.texts()
        return self.train_by(
            trl.GRPOTrainer, model=self.llama(), args=self.arguments(trl.GRPOConfig), reward_funcs=variety,
            train_dataset=datasets.Dataset.from_dict({"prompt": texts, "number": list(range(len(texts)))}),
            processing_class=self.words(),
        )  # fmt: skip

    def texts(self) -> list[str]:
        """Text i begins with word i."""
        return [f"w{i + 10} w{i * 7 % 500 + 10} w{i * 3 % 400 + 10}" for i in range(self.job.samples * self.ranks)]

    def words(self) -> Any:
        """A tokenizer: word i has the number i."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(
            models.WordLevel({"<pad>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, 1000)}}, unk_token="<pad>")
        )
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")

    def llama(self) -> nn.Module:
        """A Llama of two layers, with dropout, of more than a MiB: what a LoRA of it leaves as it is is stored once."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1000, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            attention_dropout=0.1, max_position_embeddings=16, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        )  # fmt: skip
        model: nn.Module = LlamaForCausalLM(config)
        model.register_forward_hook(self.spoil)
        return model

    def adapter(self) -> Any:
        from peft import AdaLoraConfig, LoraConfig

        if self.job.more.get("adapter") == "adalora":
            return AdaLoraConfig(
                init_r=6, target_r=2, tinit=4, tfinal=10, deltaT=2, total_step=60, target_modules=["q_proj", "v_proj"]
            )
        return LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])

    def train_by_lora(self) -> dict[str, str]:
        from peft import get_peft_model
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler

        data = Text(self.job.samples * self.ranks)
        inner: Any = get_peft_model(self.llama(), self.adapter())
        model = DistributedDataParallel(inner) if self.ranks > 1 else inner
        optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], 1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
        sampler: Any = DistributedSampler(data, self.ranks, self.rank)
        loader: Any = DataLoader(data, batch_size=self.job.batch_size, sampler=sampler)
        batches, passes, steps = loader, range(int(self.job.epochs)), 0
        if self.run is not None:
            self.guard = batches = rollback.Guard(
                model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, **self.settings()
            )
            passes = self.guard.epochs(int(self.job.epochs))
        torch.manual_seed(100 + self.rank)
        for epoch in passes:
            sampler.set_epoch(epoch)
            for batch in batches:
                steps = self.guard.step if self.guard is not None else steps
                self.take(steps, batch["input_ids"], self.guard.batch if self.guard is not None else None)
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                if self.job.more.get("adapter") == "adalora":
                    inner.base_model.update_and_allocate(steps)
                optimizer.zero_grad()
                steps += 1
                if self.guard is not None:
                    self.guard.observe(loss)
        if self.guard is not None:
            steps = self.guard.step
            self.guard.close()
        return self.portrait(inner, optimizer, scheduler, steps)

    def train_by(self, kind: Any, **given: Any) -> dict[str, str]:
        import transformers

        watched, job = self, self.job

        class Watched(kind):  # type: ignore[misc]
            def training_step(self, model: Any, inputs: Any, *more: Any, **others: Any) -> Tensor:
                position = None
                if watched.run is not None:
                    watched.guard = self.train.__self__.guard
                    position = watched.guard.batch - self.current_gradient_accumulation_steps + 1 + watched.micro
                ids = (
                    inputs["input_ids"] if isinstance(inputs, dict)
                    else torch.tensor([[sample["number"]] for sample in inputs])
                )  # fmt: skip
                watched.take(self.state.global_step, ids, position)
                watched.micro = 0 if self.accelerator.sync_gradients else watched.micro + 1
                loss: Tensor = super().training_step(model, inputs, *more, **others)
                return loss

        class Stopping(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                stops = state.global_step == job.stop_at or watched.was_told
                control.should_training_stop = control.should_training_stop or stops

        class Dying(transformers.TrainerCallback):  # type: ignore[misc]
            pass

        def die(_: Any, args: Any, state: Any, *more: Any, **others: Any) -> None:
            if [rank, step] == [watched.rank, state.global_step]:
                os.kill(os.getpid(), signal.SIGKILL)

        rank, event, step = self.dies or (None, "never", 0)
        setattr(Dying, event, die)
        trainer: Any = Watched(callbacks=[Stopping(), Dying()], **given)
        self.scale(trainer.accelerator)
        if self.run is not None:
            rollback.protect(trainer, **self.settings())
        newest = transformers.trainer_utils.get_last_checkpoint(self.output) if self.output.exists() else None
        output = trainer.train(resume_from_checkpoint=newest)  # as many scripts do: None where a run begins
        reference = getattr(trainer, "ref_model", None)
        return self.portrait(
            trainer.model, trainer.optimizer, trainer.lr_scheduler, trainer.state.global_step,
            logs=dict(enumerate(self.untimed(trainer.state.log_history))), epoch=trainer.state.epoch,
            best=trainer.state.best_metric, loss=output.training_loss, flos=trainer.state.total_flos,
            tokens=trainer.state.num_input_tokens_seen, saved=self.saved(),
            reference=reference.state_dict() if reference is not None else {},
        )  # fmt: skip

    def scale(self, accelerator: Any) -> None:
        if self.job.scaled:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=20)

    def arguments(self, kind: Any) -> Any:
        job = self.job
        evaluation = {"eval_strategy": "steps", "eval_steps": job.evaluate, "metric_for_best_model": "loss"}
        saving = {"save_strategy": "steps", "save_steps": job.save} if job.save else {"save_strategy": "no"}
        return kind(
            **{
                "output_dir": str(self.output), "per_device_train_batch_size": job.batch_size, "seed": 7,
                "num_train_epochs": job.epochs, "max_steps": job.max_steps, "learning_rate": 1e-3, "logging_steps": 5,
                "gradient_accumulation_steps": job.accumulate, "report_to": "none", "use_cpu": True,
                "disable_tqdm": True, "dataloader_pin_memory": False, "dataloader_num_workers": job.workers,
                "include_num_input_tokens_seen": "all", "ddp_find_unused_parameters": False, **saving,
                **(evaluation if job.evaluate else {}), **(SHARDED_TRAINER if job.sharded else {}), **job.more,
            }
        )  # fmt: skip

    def untimed(self, logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in log.items() if not name.endswith(("time", "per_second"))} for log in logs
        ]

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.output.glob("checkpoint-*"))

    # accelerate ------------------------------------------------------------------------------------------------------

    def train_by_accelerate(self) -> dict[str, str]:
        from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
        from accelerate.utils import ProjectConfiguration
        from torch.utils.data import DataLoader

        job = self.job
        torch.manual_seed(7)
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=job.accumulate, dataloader_config=DataLoaderConfiguration(**job.more),
            project_config=ProjectConfiguration(str(self.output), automatic_checkpoint_naming=True, total_limit=3),
            fsdp_plugin=FullyShardedDataParallelPlugin(**SHARDED) if job.sharded else None,
        )  # fmt: skip
        self.scale(accelerator)
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        how: Any = {"batch_size": job.batch_size, "shuffle": not job.stream, "num_workers": job.workers}
        loader: Any = DataLoader(self.data(), **how)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
        held_out = DataLoader(
            Text(8), batch_size=job.batch_size, num_workers=job.workers, persistent_workers=job.workers > 0
        )
        validation: Any = accelerator.prepare(held_out) if job.evaluate else ()
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        if self.run is not None:
            prepared = rollback.protect(accelerator, *prepared, **self.settings())
            self.guard = prepared[2].guard
        model, optimizer, loader, scheduler = prepared
        torch.manual_seed(100 + self.rank)
        steps = 0
        epochs: Any = range(int(job.epochs))
        for _ in self.guard.epochs(len(epochs)) if self.guard is not None and job.evaluate else epochs:
            for batch in loader:
                steps = self.guard.step if self.guard is not None else steps
                self.take(steps, batch["input_ids"], self.guard.batch if self.guard is not None else None)
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                steps += accelerator.sync_gradients
                if job.save and accelerator.sync_gradients and steps % job.save == 0:
                    accelerator.save_state()
                self.micro = 0 if accelerator.sync_gradients else self.micro + 1
            for batch in validation:
                with torch.no_grad():
                    model(**batch)
            if job.save:
                accelerator.save_state()
        if self.guard is not None:
            steps = self.guard.step
            self.guard.close()
        accelerator.wait_for_everyone()  # rank 0 saves
        saved = self.output.glob("checkpoints/*/model.safetensors")
        return self.portrait(
            accelerator.unwrap_model(model), optimizer, scheduler, steps,
            saved={path.parent.name: load_file(path) for path in sorted(saved)},
        )  # fmt: skip

    # lightning -------------------------------------------------------------------------------------------------------

    def train_by_lightning(self) -> dict[str, str]:
        import lightning_loop

        return lightning_loop.train(self)

    # torchtitan ------------------------------------------------------------------------------------------------------

    def train_by_torchtitan(self) -> dict[str, str]:
        import torchtitan_loop

        return torchtitan_loop.train(self)

    # All -------------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        return {"run": self.run, **SETTINGS, "snapshot_every": 5, **self.job.settings}

    def portrait(self, model: Any, optimizer: Any, scheduler: Any, steps: int, **more: Any) -> dict[str, str]:
        """What there is at the end, by name, as texts that differ if a bit does."""
        is_sharded = any(isinstance(item, DTensor) for item in model.parameters())
        assert self.job.loop == "torchtitan" or self.job.sharded == is_sharded
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        consumed: dict[int, list[list[int]]] = {}
        for line in self.log.read_text().splitlines():
            step, micro, ids = json.loads(line)
            consumed[step] = [*(consumed[step] if micro else []), ids]
        drawn = {"torch": torch.get_rng_state()}
        consumed = {step: batches for step, batches in sorted(consumed.items()) if step < steps}
        return flat({**state, "random": drawn, "consumed": consumed, "steps": steps, **more})


def perform(scenario: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState
    from sharded_on_cpu import sharded_on_cpu

    torch.use_deterministic_algorithms(True)
    job = TrainerJob.from_json(scenario["toy"])
    if scenario.get("skips_of"):
        given = Path(scenario["skips_of"])
        job = job.with_settings(skip=skip_list(given), skip_samples=left_out(given))
    run = scenario.get("run", os.environ.get("ROLLBACK_RUN"))
    kind, nth = scenario.get("die", ["", 0])
    note, seen = Recorder.note, [0]

    def die(self: Recorder, fact: Any, *more: Any) -> None:
        seen[0] += type(fact).__name__ == kind
        dies = rank == 0 and seen[0] == nth > 0 and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1"
        if dies and not scenario.get("behind"):
            os.kill(os.getpid(), signal.SIGKILL)
        note(self, fact, *more)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    Recorder.note = die  # type: ignore[method-assign, assignment]
    try:
        loop = Job(job, Path(run) if run else None, scenario, folder)
        with sharded_on_cpu() if job.sharded else contextlib.nullcontext():
            return {"portrait": getattr(loop, f"train_by_{job.loop}")()}
    finally:
        Recorder.note = note  # type: ignore[method-assign]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


if __name__ == "__main__":
    perform_all(perform)
