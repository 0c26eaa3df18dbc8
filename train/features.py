"""What the frozen target says of packed rows: features of its tapped layers and its most likely tokens, made online or cached on disk once.

A cache is a folder of flat arrays, written row by row and resumable: a killed run goes on after the last row that `progress.json` counts.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from dflax import files
from dflax.checkpoint import huggingface
from dflax.errors import DflaxError
from dflax.model import Model
from dflax.models.decoder import Decoder
from dflax.models.layers import matmul
from dflax.models.vocabulary import Slices, in_chunks
from dflax.train.data import Packed, fingerprint
from dflax.train.drafter import Rows

HEAD_CHUNK = 128  # positions whose logits exist at a time


def target_rows(
    target: Decoder,
    tokens: Int[Array, "B S"],
    loss_mask: Array,
    ctx_start: Int[Array, "B S"],
    taps: tuple[int, ...],
    soft: int = 0,
    head: Float[Array, "Vd E"] | None = None,
    head_ids: Int[Array, " Vd"] | None = None,
) -> Rows:
    """One pass of the target over packed rows. soft > 0 also gives the `soft` most likely tokens at every position, among the rows
    `head` with ids `head_ids` where given. Nothing is differentiated."""
    block = target.packed(tokens, ctx_start, taps=taps)
    assert block.features is not None
    features, hidden = (jax.lax.stop_gradient(x) for x in (block.features, block.hidden))
    ids, logprobs = _most_likely(hidden, target.head if head is None else head, soft) if soft else (None, None)
    if ids is not None and head_ids is not None:
        ids = head_ids[ids]
    return Rows(tokens, loss_mask, ctx_start, features, ids, logprobs)


def _most_likely(hidden: Float[Array, "B S E"], head: Float[Array, "V E"], k: int) -> tuple[Array, Array]:
    """The k best tokens AT each position (scored by the state before) and their float32 log-probabilities; position 0 repeats its own."""
    B, S, E = hidden.shape
    before = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1).reshape(B * S, E)
    cut = Slices.of(head, B * S)
    part = lambda rows, head: cut.most_likely(matmul, rows, head, k)
    ids, logprobs = cut.run(partial(in_chunks, part, HEAD_CHUNK), before, head)
    return ids.reshape(B, S, k), logprobs.reshape(B, S, k)


def online(
    merge_target: Callable[[Any], Decoder], taps: tuple[int, ...], soft: int, head_ids: np.ndarray | None
) -> Callable[[Any, Any], tuple[Rows, Any]]:
    """`prepare` of `drafter.make_loss`: the batch holds tokens only, frozen is (leaves of the target, Frozen)."""

    def prepare(batch, frozen):
        leaves, shared = frozen
        head = None if head_ids is None else shared.head
        ids = None if head_ids is None else jnp.asarray(head_ids)
        rows = target_rows(
            merge_target(leaves), batch["tokens"], batch["loss_mask"], batch["ctx_start"], taps, soft, head, ids
        )
        return rows, shared

    return prepare


class Picked:
    """Rows of an array on disk as an array of their own, read where it is indexed: of a batch that processes share each reads its part."""

    def __init__(self, array: np.ndarray, rows: np.ndarray):
        self._array, self._rows = array, rows
        self.shape, self.dtype, self.ndim = (len(rows), *array.shape[1:]), array.dtype, array.ndim

    def __getitem__(self, at: Any) -> np.ndarray:
        first, *rest = at if isinstance(at, tuple) else (at,)
        return np.asarray(self._array[self._rows[first]][(slice(None), *rest)])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)


class FeatureStore:
    """Rows on disk (memory-mapped, bfloat16 features, float16 log-probabilities); `rows(indices)` are some of them, not read yet."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        meta, done = _json(self.folder / "meta.json"), _json(self.folder / "progress.json")
        if meta is None or done is None:
            raise DflaxError(f"{self.folder} is no feature cache (meta.json or progress.json is missing)")
        self.meta = meta
        if done["rows"] != meta["rows"]:
            raise DflaxError(
                f"the feature cache {self.folder} is unfinished: {done['rows']} of {meta['rows']} rows; run the same command again"
            )
        self._arrays = {name: _map(self.folder, meta, name, "r") for name in _layout(meta)}

    def __len__(self) -> int:
        return self.meta["rows"]

    def check(self, target: Model, taps: tuple[int, ...], soft: int, draft_ids: np.ndarray | None) -> None:
        """Raises DflaxError if the rows are not what this target says at these taps, with so many soft labels among these ids."""
        wanted = _meta(target, taps, draft_ids)
        for name in ("taps", "width", "target_weights", *(("scored",) if soft else ())):
            if self.meta.get(name, wanted[name]) != wanted[name]:  # caches older than a field go on
                raise DflaxError(
                    f"the feature cache {self.folder} has {name} {self.meta[name]}, wanted is {wanted[name]}; use another folder"
                )
        if self.meta["soft"] < soft:
            raise DflaxError(
                f"the feature cache {self.folder} has {self.meta['soft']} soft labels a position, wanted are {soft}"
            )

    @property
    def scored_ids(self) -> np.ndarray | None:
        """The ids that soft labels were chosen among (a draft vocabulary), int32; None: all."""
        path = self.folder / "scored.npy"
        return np.load(path) if path.exists() else None

    def response_tokens(self) -> np.ndarray:
        """Every supervised token, one after another."""
        return np.asarray(self._arrays["tokens"])[np.asarray(self._arrays["loss_mask"])]

    def rows(self, indices: np.ndarray) -> Rows:
        a: dict[str, Any] = {name: Picked(array, indices) for name, array in self._arrays.items()}
        return Rows(
            a["tokens"], a["loss_mask"], a["ctx_start"], a["features"], a.get("soft_ids"), a.get("soft_logprobs")
        )


def cache_features(
    folder: str | os.PathLike[str],
    target: Model,
    packed: Packed,
    taps: tuple[int, ...],
    soft: int = 0,
    head_ids: np.ndarray | None = None,
    batch: int = 2,
) -> FeatureStore:
    """Runs the target over every packed row once and writes the cache; goes on where an earlier call was killed.

    A cache of other rows, taps or target is refused. On disk: 2 * M * E bytes a token, and 6 a soft label.
    """
    folder = Path(folder)
    R, S = packed.tokens.shape
    meta = {
        "rows": R,
        "length": S,
        "soft": soft,
        "data": fingerprint(packed.tokens, packed.loss_mask, packed.ctx_start),
        **_meta(target, taps, head_ids),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DflaxError(f"cannot write the feature cache {folder}: {error.strerror}") from error
    old = _json(folder / "meta.json")
    before = old or {}
    changed = sorted(name for name in before if before[name] != meta.get(name))  # caches older than a field go on
    if changed:
        raise DflaxError(f"{folder} caches other features ({', '.join(changed)} differ); use another folder")
    progress = _json(folder / "progress.json") if old is not None else None
    done = progress["rows"] if progress else 0
    if old is None:
        if head_ids is not None:
            with files.whole(folder / "scored.npy") as beside, open(beside, "wb") as file:
                np.save(file, head_ids)
        files.write_json(folder / "meta.json", meta)
    if done < R:
        _fill(folder, meta, target, packed, taps, soft, head_ids, batch, done)
    return FeatureStore(folder)


def _fill(folder, meta, target, packed, taps, soft, head_ids, batch, done) -> None:
    arrays = {name: _map(folder, meta, name, "r+") for name in _layout(meta)}
    R = len(packed.tokens)
    ids = None if head_ids is None else jnp.asarray(head_ids)
    head = None if ids is None else target.module.head[ids]

    @jax.jit
    def run(leaves, head, tokens, loss_mask, ctx_start):
        return target_rows(target.merge(leaves), tokens, loss_mask, ctx_start, taps, soft, head, ids)

    for start in tqdm(
        range(done, R, batch), initial=done // batch, total=-(-R // batch), unit="batch", desc="features"
    ):
        index = np.minimum(np.arange(start, start + batch), R - 1)
        made = run(target.leaves, head, packed.tokens[index], packed.loss_mask[index], packed.ctx_start[index])
        live = min(batch, R - start)
        for name, array in arrays.items():
            array[start : start + live] = np.asarray(getattr(made, name))[:live].astype(array.dtype)
        if start // batch % 16 == 15 or start + live == R:
            for array in arrays.values():
                array.flush()
            files.write_json(folder / "progress.json", {"rows": start + live})


def _meta(target: Model, taps: tuple[int, ...], head_ids: np.ndarray | None) -> dict[str, Any]:
    """What a cache says of its target."""
    return {
        "taps": list(taps),
        "width": len(taps) * target.config.hidden_size,
        "scored": None if head_ids is None else fingerprint(head_ids),
        "target": target.name,
        "target_weights": target.fingerprint,
    }


def _layout(meta: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    R, S = meta["rows"], meta["length"]
    layout: dict[str, tuple[tuple[int, ...], Any]] = {
        "tokens": ((R, S), np.int32),
        "loss_mask": ((R, S), np.bool_),
        "ctx_start": ((R, S), np.int32),
        "features": ((R, S, meta["width"]), ml_dtypes.bfloat16),
    }
    if meta["soft"]:
        layout |= {"soft_ids": ((R, S, meta["soft"]), np.int32), "soft_logprobs": ((R, S, meta["soft"]), np.float16)}
    return layout


def _map(folder: Path, meta: dict[str, Any], name: str, mode: Literal["r", "r+"]) -> np.memmap:
    shape, dtype = _layout(meta)[name]
    path = folder / f"{name}.bin"
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if mode == "r+" and (not path.exists() or path.stat().st_size != size):
        with path.open("ab") as file:
            file.truncate(size)
    if not path.exists() or path.stat().st_size != size:
        raise DflaxError(
            f"{path} of the feature cache is missing or has the wrong size; delete the folder and run again"
        )
    return np.memmap(path, np.dtype(dtype), mode, shape=shape)


def _json(path: Path) -> dict[str, Any] | None:
    return huggingface.read_json(path) if path.exists() else None
