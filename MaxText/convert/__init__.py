"""Weights of other programs, in and out: Hugging Face folders and GGUF files ↔ checkpoints."""
