"""Weights in and out: Hugging Face folders, GGUF files, training state."""

from dflax.checkpoint.fill import fill, match, named
from dflax.checkpoint.source import TensorSource

__all__ = ["TensorSource", "fill", "match", "named"]
