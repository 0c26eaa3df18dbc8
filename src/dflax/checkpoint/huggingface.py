"""Hugging Face folders: config.json beside model.safetensors, one file or shards with an index; read lazily, written whole.

This is the interchange format both ways: what is written here loads in the PyTorch engines.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, so that safetensors can hand it out
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflax import files
from dflax.errors import DflaxError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
READABLE = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")  # what is missing here is quantized


class SafetensorsSource:
    """The tensors of a folder (a `TensorSource`). A single model.safetensors wins over an index."""

    def __init__(self, folder: str | os.PathLike[str]):
        folder = _folder(folder)
        if (folder / SINGLE).is_file():
            files = {SINGLE: None}
        elif (folder / INDEX).is_file():
            files = _by_shard(folder / INDEX)
        else:
            raise DflaxError(
                f"{folder} has neither {SINGLE} nor {INDEX}; dflax reads safetensors folders and .gguf files"
            )
        self._files = {}
        self._home: dict[str, str] = {}
        for file, promised in files.items():
            opened = _open(folder / file)
            self._files[file] = opened
            held = set(opened.keys())
            if promised is not None and (lost := sorted(promised - held)):
                raise DflaxError(f"{INDEX} promises {lost[0]} in {file}, but it is not there; fetch the folder again")
            self._home.update(dict.fromkeys(held, file))
        for name in self._home:
            kind = self._slice(name).get_dtype()
            if kind not in READABLE:
                raise DflaxError(f"{folder}: {name} is stored as {kind}; dflax does not read quantized safetensors")

    def _slice(self, name: str) -> Any:
        if name not in self._home:
            raise DflaxError(f"the checkpoint has no tensor {name}")
        return self._files[self._home[name]].get_slice(name)

    def names(self) -> list[str]:
        return sorted(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        tensor = self._slice(name)
        return tensor[index] if index else self._files[self._home[name]].get_tensor(name)

    def close(self) -> None:
        self._files.clear()
        self._home.clear()


def config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a folder."""
    path = _folder(folder) / "config.json"
    if not path.is_file():
        raise DflaxError(f"{folder} has no config.json; a Hugging Face model folder has one")
    return read_json(path)


def generation_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """generation_config.json of a folder, {} where there is none."""
    path = _folder(folder) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def save(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray | jax.Array],
    hf_config: Mapping[str, Any],
    write_more: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Writes config.json and model.safetensors; whoever looks finds the old files or the new, never half of one.

    Everything is written beside its place and renamed: a new folder in one step, an existing folder (whose other files stay)
    file by file, weights first. write_more: puts further files (of a tokenizer, say) into the folder that it is given.
    """
    folder = Path(folder)
    beside = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)  # left by a killed process of the same number
        beside.mkdir()
        try:
            host = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
            save_file(host, beside / SINGLE, metadata={"format": "pt"})  # "pt": the PyTorch readers insist on the mark
            (beside / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
            shutil.copymode(beside / "config.json", beside / SINGLE)  # safetensors makes files for their owner only
            write_more(beside)
            written = sorted(path.name for path in beside.iterdir())
            for name in written:
                files.sync(beside / name)
            if folder.exists():
                for name in sorted(written, key=lambda name: name != SINGLE):
                    os.replace(beside / name, folder / name)
            else:
                os.rename(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise DflaxError(f"cannot write the checkpoint {folder}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; DflaxError names the file and the place of a fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DflaxError(f"cannot read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise DflaxError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DflaxError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _folder(folder: str | os.PathLike[str]) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise DflaxError(f"{folder} is not a folder")
    return folder


def _by_shard(index: Path) -> dict[str, set[str]]:
    home = read_json(index).get("weight_map")
    if not isinstance(home, dict) or not all(isinstance(file, str) for file in home.values()):
        raise DflaxError(f"{index} has no weight_map of tensor names to file names")
    shards: dict[str, set[str]] = {}
    for name, file in home.items():
        shards.setdefault(file, set()).add(name)
    for file in shards:
        if Path(file).name != file:
            raise DflaxError(f"{index} names the shard {file!r}; shards lie in the folder itself")
        if not (index.parent / file).is_file():
            raise DflaxError(f"{index} names the shard {file}, which is missing; fetch the folder again")
    return shards


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise DflaxError(f"{path} is truncated or no safetensors file ({error})") from error
