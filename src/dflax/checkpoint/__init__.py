"""Weights in and out: Hugging Face folders, GGUF files, training state."""
