"""The loop `torchtitan` of trainer_job.py: its debug model, smaller, over made documents, read several times."""

import gc
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cpu_for_torchtitan  # noqa: F401 - before torchtitan
import torch
import torchtitan.trainer
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config.configs import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.llama3 import ComplexRoPE, _build_llama3_layers, model_registry
from torchtitan.trainer import Trainer

import rollback

if TYPE_CHECKING:
    from trainer_job import Job

WORDS = 60
ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
torchtitan.trainer.time = SimpleNamespace(perf_counter=torchtitan.trainer.time.perf_counter, sleep=lambda seconds: None)


def configuration(job: "Job") -> Trainer.Config:
    given, more = job.job, job.job.more
    tokens(job.output)
    documents = written(12 * job.ranks, given.samples)
    source = Dataset.from_dict({"text": documents})
    text_datasets.DATASETS["made"] = DatasetConfig(
        path="made", loader=lambda path: source.to_iterable_dataset(4) if given.stream else source,
        sample_processor=lambda sample: sample["text"],
    )  # fmt: skip
    data = text_datasets.HuggingFaceTextDataLoader.Config(dataset="made", num_workers=given.workers)
    per_rank = given.batch_size * given.accumulate
    return Trainer.Config(
        model_spec=debug_model(whole=more.get("whole", False)),
        hf_assets_path=str(job.output), dump_folder=str(job.output),
        loss=CrossEntropyLoss.Config(), optimizer=optimizer(several=more.get("several", False)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4, decay_ratio=0.8, decay_type="cosine"),
        training=TrainingConfig(
            local_batch_size=given.batch_size, global_batch_size=per_rank * job.ranks, seq_len=16,
            steps=given.max_steps, disable_cuda_graphs=True, mixed_precision_param=more.get("dtype", "float32"),
        ),
        dataloader=interleaved(data) if given.stream == "interleaved" else data,
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", data_parallel_replicate_degree=more.get("replicas", 1),
        ),
        metrics=MetricsProcessor.Config(log_freq=more.get("log", 1), enable_tensorboard="tensorboard" in more),
        debug=DebugConfig(seed=7, enable_structured_logging=False), comm=CommConfig(trace_buf_size=0),
        checkpoint=CheckpointManager.Config(**more.get("checkpoint", {})),
        activation_checkpoint=FullAC.Config() if more.get("recomputed") else None,
        validator=Validator.Config(enable=given.evaluate > 0, freq=max(given.evaluate, 1), steps=2, dataloader=data),
    )  # fmt: skip


def interleaved(data: Any) -> Any:
    sources = [text_datasets.HFDataSource(dataset="made", weight=weight) for weight in (1.0, 3.0)]
    return text_datasets.InterleavedHuggingFaceTextDataLoader.Config(sources=sources, num_workers=data.num_workers)


def optimizer(*, several: bool) -> OptimizersContainer.Config:
    if not several:
        return default_adamw(**ADAM)
    kinds = {r"\.norm|_norm": "Adam", ".*": "AdamW"}
    groups = [
        ParamGroupConfig(pattern=name, optimizer_name=kind, optimizer_kwargs=ADAM) for name, kind in kinds.items()
    ]
    return OptimizersContainer.Config(param_groups=groups)


def debug_model(*, whole: bool = False) -> Any:
    """The debug model; unless it is to be whole, with two narrow layers."""
    spec = model_registry("debugmodel")
    model: Any = spec.model
    if not whole:
        model.dim, model.vocab_size = 32, WORDS + 2
        model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = WORDS + 2, 32
        model.norm.normalized_shape, model.lm_head.in_features, model.lm_head.out_features = 32, 32, WORDS + 2
        rope = ComplexRoPE.Config(dim=16, max_seq_len=256, theta=500000, scaling="llama")
        model.layers = _build_llama3_layers(
            n_layers=2, dim=32, n_heads=2, hidden_dim=64, rope=rope, attn_backend="flex"
        )  # fmt: skip
    return spec


def tokens(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    known = {"<s>": 0, "</s>": 1, **{f"w{number}": number + 2 for number in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    rank = os.environ.get("RANK", "0")
    tokenizer.save(str(folder / f"tokenizer-{rank}.json"))
    (folder / f"tokenizer-{rank}.json").rename(folder / "tokenizer.json")
    (folder / f"config-{rank}.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / f"config-{rank}.json").rename(folder / "tokenizer_config.json")


def written(count: int, length: int) -> list[str]:
    source = torch.Generator().manual_seed(1)
    numbers = torch.randint(WORDS, (count, length), generator=source).tolist()
    return [" ".join(f"w{number}" for number in document) for document in numbers]


def alone() -> None:
    """A process that nobody has started as one of several: torchtitan wants to be told."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }


class Rows:
    """As a logger of torchtitan's: what does not depend on time is written to a file, over all attempts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: dict[str, Any], step: int) -> None:
        kept = {name: value for name, value in metrics.items() if name.startswith(KEPT)}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps([step, kept]) + "\n")

    def by_step(self) -> dict[int, Any]:
        return dict(sorted({json.loads(line)[0]: line for line in self.path.read_text().splitlines()}.items()))

    def close(self) -> None:
        pass


KEPT = ("loss_metrics", "grad_norm", "n_tokens_seen", "lr", "validation_metrics/loss")


def train(job: "Job") -> dict[str, str]:
    alone()
    torch.autograd.set_multithreading_enabled(False)
    trainer: Any = configuration(job).build()
    given = job.job
    watch(job, trainer)
    rows = Rows(job.output / f"rows-{job.rank}.jsonl")
    points = trainer.metrics_processor.logger
    if "tensorboard" not in given.more:
        trainer.metrics_processor.logger = rows
    if job.run is not None:
        rollback.protect(trainer, **job.settings())
    trainer.train()
    trainer.close()
    gc.enable()
    logged: Any = rows.by_step() if "tensorboard" not in given.more else points_of(points) if job.rank == 0 else {}
    return job.portrait(
        trainer.model_parts[0], trainer.optimizers, trainer.lr_schedulers, trainer.step, logged=logged,
        tokens=trainer.ntokens_seen, rates=trainer.lr_schedulers.get_metrics(),
        optimizers=[one.state_dict()["param_groups"] for one in trainer.optimizers],
    )  # fmt: skip


def watch(job: "Job", trainer: Any) -> None:
    """Note what is trained on, and spoil the loss where the job says so."""
    forward_backward_step, loss_fn = trainer.forward_backward_step, trainer.loss_fn

    def watched(*, input_dict: dict[str, Tensor], **others: Any) -> Any:
        position = None
        if job.run is not None:
            job.guard = trainer.train.__self__.guard
            position = job.guard.batch - job.job.accumulate + 1 + job.micro
        job.take(trainer.step - 1, input_dict["input"], position)
        job.micro = (job.micro + 1) % job.job.accumulate
        return forward_backward_step(input_dict=input_dict, **others)

    def spoilt(*values: Any, **others: Any) -> Any:
        loss, metrics = loss_fn(*values, **others)
        return loss * float("nan") if job.poisoned else loss, metrics

    trainer.forward_backward_step, trainer.loss_fn = watched, spoilt


def points_of(logger: Any) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, points that are there twice included."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {item.writer.log_dir for item in logger._loggers}
    shown = EventAccumulator(folder)
    shown.Reload()
    names = [name for name in shown.Tags()["scalars"] if name.startswith(KEPT)]
    return {name: [(point.step, point.value) for point in shown.Scalars(name)] for name in names}
