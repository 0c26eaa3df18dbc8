"""The GGUF container: a header of typed keys, a table of tensors, aligned data. Read here because it is small.

The `gguf` package's reader wraps every token of the vocabulary in numpy arrays (4 s for 49K tokens); this one takes 0.2 s. The package
is still what dequantizes (`dflax.checkpoint.gguf`). Format: ggml docs/gguf.md, versions 2 and 3, little endian.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflax.errors import DflaxError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in the file."""

    shape: tuple[int, ...]  # numpy order: the fastest axis last
    kind: int  # a ggml type number
    offset: int  # from the start of the data


@dataclass(frozen=True)
class GGUFFile:
    """An open file: metadata as plain Python values, the table of tensors, the data mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]
    data: np.ndarray  # uint8, from the start of the tensor data


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Reads the header; DflaxError where the file is missing, no GGUF, of an unknown version, or cut short."""
    path = Path(path)
    try:
        raw = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise DflaxError(f"cannot read {path}: {error}") from error
    try:
        metadata, tensors, end = _header(path, raw.data)
    except (struct.error, UnicodeDecodeError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise DflaxError(f"{path} is truncated or damaged in its header ({type(error).__name__}: {error})") from error
    align = metadata.get("general.alignment", 32)
    return GGUFFile(path, metadata, tensors, raw[-(-end // align) * align :])


def _header(path: Path, raw: memoryview) -> tuple[dict[str, Any], dict[str, Stored], int]:
    at = _Cursor(raw)
    if bytes(raw[:4]) != b"GGUF":
        raise DflaxError(f"{path} is no GGUF file (it does not begin with 'GGUF')")
    at.place = 4
    version = at.scalar("I")
    if version not in (2, 3):
        raise DflaxError(f"{path} is GGUF version {version} or big endian; dflax reads little-endian versions 2 and 3")
    num_tensors, num_keys = at.scalar("Q"), at.scalar("Q")
    metadata = {}
    for _ in range(num_keys):
        key = at.string()
        metadata[key] = at.value(at.scalar("I"))
    tensors = {}
    for _ in range(num_tensors):
        name = at.string()
        dims = [at.scalar("Q") for _ in range(at.scalar("I"))]
        tensors[name] = Stored(tuple(reversed(dims)), at.scalar("I"), at.scalar("Q"))
    return metadata, tensors, at.place


class _Cursor:
    def __init__(self, raw: memoryview):
        self.raw = raw
        self.place = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.raw, self.place)
        self.place += struct.calcsize(f"<{code}")
        return (
            float(str(np.float32(value))) if code == "f" and math.isfinite(value) else value
        )  # 1e-5, not 9.999999747e-06

    def string(self) -> str:
        size = self.scalar("Q")
        text = bytes(self.raw[self.place : self.place + size])
        if len(text) != size:
            raise IndexError("a string runs past the end of the file")
        self.place += size
        return text.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in (STRING, ARRAY):
            return [self.value(inner) for _ in range(count)]
        code = f"<{count}{SCALARS[inner]}"
        values = struct.unpack_from(code, self.raw, self.place)
        self.place += struct.calcsize(code)
        return list(values)
