"""Recordings of denoising runs on the host: files that survive a kill, labels, and one sequence per slot to train on.

Every label is "the top-1 token is the one that the model's own plain decoding (one token per step) wrote there in the end". Stored are
a few numbers per slot and step, never logits; features and the look-ahead are computed from them afterwards, so that their constants
can change without a new recording.
"""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32
from tqdm import tqdm

from dflax import files
from dflax.errors import DflaxError
from dflax.infer.extrapolation import left_coverage
from dflax.models.controller import neighbourhood

UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
"""What numpy raises for archives that were cut or changed."""


@dataclass(frozen=True)
class Traces:
    """Recordings on the host: P prompts, N blocks each, up to S steps of T slots."""

    confidence: Float[np.ndarray, "P N S T"]
    entropy: Float[np.ndarray, "P N S T"]
    margin: Float[np.ndarray, "P N S T"]
    token: Int32[np.ndarray, "P N S T"]
    masked: Bool[np.ndarray, "P N S T"]
    final: Int32[np.ndarray, "P N T"]
    """int32: what plain decoding wrote."""

    @property
    def agrees(self) -> Bool[np.ndarray, "P N S T"]:
        """The label of a step: its own top-1 token is the final one."""
        return agreement(self.token, self.final)

    def pick(self, prompts: np.ndarray) -> "Traces":
        """Of these prompts only, by number or by a mask."""
        return Traces(*(getattr(self, f.name)[prompts] for f in fields(self)))

    def trimmed(self) -> "Traces":
        """Without the steps that no block took."""
        used = np.flatnonzero(self.masked.any(axis=(0, 1, 3)))
        last = int(used[-1]) + 1 if len(used) else 1
        cut = {f.name: getattr(self, f.name)[:, :, :last] for f in fields(self) if f.name != "final"}
        return Traces(**cut, final=self.final)

    def passes(self) -> float:
        """Mean number of steps per block."""
        return float(self.masked.any(axis=3).sum(axis=2).mean())


def agreement(token: Int32[np.ndarray, "P N S T"], final: Int32[np.ndarray, "P N T"]) -> Bool[np.ndarray, "P N S T"]:
    """Where a step's token is the final one."""
    return token == final[:, :, None]


def concatenate(parts: Sequence[Traces]) -> Traces:
    """All prompts of these, with room for the longest."""
    steps = max(part.confidence.shape[2] for part in parts)

    def joined(name: str) -> np.ndarray:
        arrays = [getattr(part, name) for part in parts]
        if name == "final":
            return np.concatenate(arrays)
        return np.concatenate([np.pad(a, ((0, 0), (0, 0), (0, steps - a.shape[2]), (0, 0))) for a in arrays])

    return Traces(**{f.name: joined(f.name) for f in fields(Traces)})


# --- files ---


def recorded(
    folder: str | os.PathLike[str],
    prompts: Sequence[Sequence[int]],
    batch: int,
    record: Callable[[Sequence[Sequence[int]], int], dict[str, Traces]],
    identity: dict[str, Any],
) -> dict[str, Traces]:
    """Recordings of all prompts by kind, each batch of prompts made once and kept in `folder`.

    A call that was killed goes on behind the last whole batch.

    Args:
      record: (the prompts of a batch, its number) -> recordings by kind, of as many prompts.
      identity: what else the recordings depend on; a folder of others is refused.
    """
    folder = Path(folder)
    ids = json.dumps([list(map(int, prompt)) for prompt in prompts])
    told = {"prompts": hashlib.sha256(ids.encode()).hexdigest()[:16], "batch": batch}
    files.bind(folder / "traces.json", {**identity, **told})
    parts: dict[str, list[Traces]] = {}
    bar = tqdm(range(0, len(prompts), batch), desc="traces", unit="batch", disable=not os.isatty(2))
    for number, start in enumerate(bar):
        path = folder / f"traces-{number:05d}.npz"
        if not path.exists():
            _write(path, record(prompts[start : start + batch], number))
        for kind, part in _read(path).items():
            parts.setdefault(kind, []).append(part)
    return {kind: concatenate(part) for kind, part in parts.items()}


HALF = ("entropy", "margin")  # kept as float16; a confidence near 1 needs float32 for its logit


def _write(path: Path, found: dict[str, Traces]) -> None:
    arrays = {}
    for kind, traces in found.items():
        for f in fields(traces):
            array = getattr(traces.trimmed(), f.name)
            arrays[f"{kind}/{f.name}"] = array.astype(np.float16) if f.name in HALF else array
    with files.whole(path) as beside, open(beside, "wb") as file:
        np.savez_compressed(file, **arrays)


def _read(path: Path) -> dict[str, Traces]:
    try:
        with path.open("rb") as file, np.load(file) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except UNREADABLE as error:
        raise DflaxError(f"{path} is damaged ({error}); delete it, the next call makes it again") from error
    kinds = sorted({name.split("/")[0] for name in arrays})
    whole = lambda kind, name: arrays[f"{kind}/{name}"].astype(np.float32) if name in HALF else arrays[f"{kind}/{name}"]
    return {kind: Traces(**{f.name: whole(kind, f.name) for f in fields(Traces)}) for kind in kinds}


# --- one sequence per slot ---


@dataclass(frozen=True)
class Sequences:
    """Slots of traces, R of them over S steps each: what one position looked like from the first step to its commit."""

    confidence: Float[np.ndarray, "R S"]
    entropy: Float[np.ndarray, "R S"]
    margin: Float[np.ndarray, "R S"]
    token: Int32[np.ndarray, "R S"]
    coverage: Float[np.ndarray, "R S"]
    observed: Bool[np.ndarray, "R S"]
    """The slot was still masked: steps behind its commit are not part of it."""
    agrees: Bool[np.ndarray, "R S"]
    position: Float[np.ndarray, "R"]
    """Offset in the block / (T - 1)."""
    around: Float[np.ndarray, "R S around"]
    """`dflax.models.controller.neighbourhood`: nothing where a slot is judged by itself."""

    def __len__(self) -> int:
        return len(self.position)

    def pick(self, chosen: np.ndarray) -> "Sequences":
        return Sequences(*(getattr(self, f.name)[chosen] for f in fields(self)))


def sequences(traces: Traces, neighbours: int = 0) -> Sequences:
    """Every slot of every block as a sequence of its own, with this many neighbours to either side."""
    traces = traces.trimmed()
    P, N, S, T = traces.confidence.shape
    per_slot = lambda array: np.ascontiguousarray(array.transpose(0, 1, 3, 2).reshape(P * N * T, S))
    fixed = jnp.asarray(~traces.masked.reshape(-1, T))
    coverage = np.asarray(left_coverage(fixed)).reshape(P, N, S, T)
    seen = (traces.confidence, traces.entropy, traces.masked, coverage)
    around = np.asarray(neighbourhood(neighbours, *map(jnp.asarray, seen)))
    return Sequences(
        confidence=per_slot(traces.confidence),
        entropy=per_slot(traces.entropy),
        margin=per_slot(traces.margin),
        token=per_slot(traces.token),
        coverage=per_slot(coverage),
        observed=per_slot(traces.masked),
        agrees=per_slot(traces.agrees),
        position=np.tile(np.arange(T, dtype=np.float32) / max(T - 1, 1), P * N),
        around=np.ascontiguousarray(around.transpose(0, 1, 3, 2, 4).reshape(P * N * T, S, -1)),
    )
