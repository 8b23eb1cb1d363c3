"""Supervised fine-tuning with TRL's SFTTrainer, all of a tiny model or (--lora) a LoRA of it; made text, no network."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import rollback

WORDS = ["<pad>", "<end>", *map(str, range(50)), "plus", "is"]


def made_text(count: int) -> Dataset:
    """`3 plus 4 is 7` and the like."""
    pairs = torch.randint(0, 25, (count, 2), generator=torch.Generator().manual_seed(1)).tolist()
    return Dataset.from_dict({"text": [f"{a} plus {b} is {a + b}" for a, b in pairs]})


def made_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="out/sft")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--lora", action="store_true")
    given = parser.parse_args()
    arguments = SFTConfig(
        given.output_dir, num_train_epochs=given.epochs, per_device_train_batch_size=8, learning_rate=3e-3,
        logging_steps=10, save_strategy="no", report_to="none", use_cpu=not torch.cuda.is_available(), bf16=False,
        max_length=16, seed=7,
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, attention_dropout=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config), args=arguments, train_dataset=made_text(256), processing_class=made_tokenizer(),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]) if given.lora else None,
    )  # fmt: skip
    rollback.protect(trainer)
    trainer.train()
    print(f"loss of the last {arguments.logging_steps} steps: {trainer.state.log_history[-2]['loss']}")


if __name__ == "__main__":
    main()
