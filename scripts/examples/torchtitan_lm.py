"""A causal language model with the Trainer of torchtitan: its debug model, on made text, no network."""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

import rollback


def made_text(count: int) -> Dataset:
    """Documents of an endless sum: after a and b comes a + b, with a little noise."""
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (count, 200), generator=source)
    for place in range(2, 200):
        ids[:, place] = (ids[:, place - 1] + ids[:, place - 2] + (ids[:, place] == 0)) % 64
    return Dataset.from_dict({"text": [" ".join(map(str, document)) for document in ids.tolist()]})


def write_tokenizer(folder: Path) -> None:
    """A token for each number."""
    folder.mkdir(parents=True, exist_ok=True)
    words = Tokenizer(models.WordLevel({"<s>": 64, "</s>": 65, **{str(i): i for i in range(64)}}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="out/torchtitan")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    init_logger()
    folder = Path(given.output_dir)
    write_tokenizer(folder)
    DATASETS["made_text"] = DatasetConfig("", lambda path: made_text(512), lambda sample: sample["text"])
    config = llama3_debugmodel()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="made_text")
    config.training = TrainingConfig(local_batch_size=4, seq_len=128, steps=given.steps, disable_cuda_graphs=True)
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    config.debug = DebugConfig(seed=7)
    trainer = config.build()
    rollback.protect(trainer)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
