"""`dflax export`: weights as the folder that PyTorch engines read (config.json, model.safetensors, tokenizer)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from dflax.model import load


@dataclass(frozen=True)
class ExportConfig:
    """Write a model or a trained drafter as a Hugging Face folder.

    The source is the folder of a finished training run, a checkpoint folder, a .gguf file (dequantized), a
    hub id or a built-in name. The folder appears whole or not at all.
    """

    source: Positional[str]
    """A training run's folder, a checkpoint, a hub id or a built-in name."""
    out: Positional[Path]
    """The folder to write."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights written."""


def run(config: ExportConfig) -> Path:
    """Writes the folder and returns it."""
    inner = Path(config.source) / "model"  # where a training run leaves its result
    source = inner if (inner / "config.json").is_file() else config.source
    load(source, dtype=config.dtype).save(config.out)
    return config.out
