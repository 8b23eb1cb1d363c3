"""The guard in the Trainer of Hugging Face transformers, and in what is derived from it."""
