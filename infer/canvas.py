"""What the denoising loop carries from pass to pass, and how its caches are kept."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from dflax.cache import KVCache
from dflax.errors import DflaxError

KINDS = ("none", "prefix", "dual")


@dataclass(frozen=True)
class Cache:
    """What of a canvas is not computed again in every pass.

    "none": nothing is kept. "prefix": keys and values before the active block; passes compute the block and all behind it. "dual": keys
    and values of the whole canvas; passes compute the block only, the rest is as old as the last full pass (Fast-dLLM). Where the
    published loops differ, each way is a switch; the defaults are sound.
    """

    kind: Literal["none", "prefix", "dual"] = "none"
    refresh_every: int | None = None
    """A full pass at least every so many steps of a block; None: at its first step only. 1 computes everything always."""
    suffix_lengths: int = 4
    """Of a prefix cache: lengths of block and suffix that short passes come in. More compute less behind the last block and take longer
    to compile."""
    count_empty_pass: bool = False
    """Count the pass that older Fast-dLLM code makes, to no effect, when the full pass already completes a block."""
    unconditional_first: bool = False
    """Fast-dLLM for Dream: the full pass writes the block's first token whatever its confidence and no other, and short passes see
    the block alone, where the first slot's logits are missing. Otherwise the window begins one column before the block."""
    stale_suffix: bool = False
    """Keys of a truncated suffix stay visible until the next full pass (published Learn2PD with a dual cache)."""

    @classmethod
    def of(cls, value: "Cache | str") -> "Cache":
        """A Cache, or its kind by name; DflaxError if it is none."""
        if value in KINDS:
            return cls(value)  # pyright: ignore[reportArgumentType] - the check is the line before
        if not isinstance(value, Cache) or value.kind not in KINDS:
            raise DflaxError(f"cache is {value!r}; it must be {', '.join(KINDS)} or a dflax.Cache of such a kind")
        cache = value
        every = cache.refresh_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise DflaxError(f"refresh_every is {every!r}; it must be a whole number of at least 1, or None")
        if (
            isinstance(cache.suffix_lengths, bool)
            or not isinstance(cache.suffix_lengths, int)
            or cache.suffix_lengths < 1
        ):
            raise DflaxError(f"suffix_lengths is {cache.suffix_lengths!r}; it must be a whole number of at least 1")
        if cache.count_empty_pass and cache.kind == "none":
            raise DflaxError("count_empty_pass is about short passes; without cache there are none to count")
        if every == 1 and cache.unconditional_first:
            raise DflaxError(
                "unconditional_first with refresh_every 1 writes the first token of a block again and again; refresh later"
            )
        if every is not None and cache.kind == "none":
            raise DflaxError(
                f"refresh_every is {every}, but with cache none every pass is a full one; choose prefix or dual"
            )
        return cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CanvasState:
    """B canvases being denoised. Row b: prompt, then the generated region, block by block from left to right.

    Without cache every row is in a block of its own pace; with one, rows wait at a block's edge for the next full pass. The tokens of a
    finished row never change again, nor what is counted of it; its cache and its policy's memory may. (Fields are annotated Any: jit
    describes arguments by trees of other leaves than arrays.)
    """

    cache: KVCache | None
    """Keys and values of S columns, of 2 B rows under guidance; None where nothing is kept."""
    tokens: Int32[Any, "B S"]
    """int32 [B, S]: prompt, written tokens, the mask token elsewhere."""
    shown: Int32[Any, "B S"] | None
    """int32 [B, S]: tokens that passes see in place of masks, -1 where they see the mask; None for a policy that does not draft."""
    start: Int32[Any, "B"]
    """int32 [B]: prompt length, the first column of the generated region."""
    length: Int32[Any, "B"]
    """int32 [B]: columns that exist. Truncation lowers it, nothing raises it."""
    cached_length: Int32[Any, "B"]
    """int32 [B]: `length` at the last full pass."""
    block: Int32[Any, "B"]
    """int32 [B]: number of the active block, -1 before the first full pass."""
    step: Int32[Any, "B"]
    """int32 [B]: steps taken in the active block."""
    entry: Int32[Any, "B"]
    """int32 [B]: masked slots of the active block when it was entered."""
    nfe: Int32[Any, "B"]
    """int32 [B]: forward passes that the row took part in; its noise is keyed by them."""
    empty: Int32[Any, "B"]
    """int32 [B]: passes without effect that `Cache.count_empty_pass` counts beside them."""
    commit_step: Int32[Any, "B S"]
    """int32 [B, S]: number of the pass (from 0, empty ones counted) that wrote the column; -1 where none did."""
    age: Int32[Any, ""]
    """int32: passes since and with the last full one; 0: the next is full."""
    passes: Int32[Any, "2"]
    """int32 [2]: full and short passes of the batch."""
    done: Bool[Any, "B"]
    """bool [B]: nothing below `length` is masked."""
    policy: Any
    """The policy's state."""
    trend: Any
    """The look-ahead's state; None without one."""


def visible(state: CanvasState, mask_token_id: int) -> Int32[Array, "B S"]:
    """What the model sees of each canvas."""
    if state.shown is None:
        return state.tokens
    return jnp.where((state.tokens == mask_token_id) & (state.shown >= 0), state.shown, state.tokens)


def masked_columns(state: CanvasState, mask_token_id: int) -> Bool[Array, "B S"]:
    """What is not written yet, within each canvas."""
    column = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    inside = (column >= state.start[:, None]) & (column < state.length[:, None])
    return inside & (state.tokens == mask_token_id)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ActiveBlock:
    """The active block of every row: its columns [B, T], which of them exist, what stands there, and what is masked."""

    column: Int32[Any, "B T"]
    live: Bool[Any, "B T"]
    tokens: Int32[Any, "B T"]
    masked: Bool[Any, "B T"]


def active_block(state: CanvasState, block_length: int, mask_token_id: int) -> ActiveBlock:
    """The active blocks. Rows that are done or have not begun have none masked."""
    S = state.tokens.shape[1]
    column = first_column(state, block_length)[:, None] + jnp.arange(block_length, dtype=jnp.int32)
    live = (column < state.length[:, None]) & (state.block[:, None] >= 0)
    tokens = jnp.take_along_axis(state.tokens, jnp.clip(column, 0, S - 1), axis=1)
    masked = live & (tokens == mask_token_id) & ~state.done[:, None]
    return ActiveBlock(column, live, tokens, masked)


def first_column(state: CanvasState, block_length: int) -> Int32[Array, "B"]:
    """Where the active blocks begin."""
    return state.start + jnp.maximum(state.block, 0) * block_length


def columns(longest: int) -> int:
    """S for canvases of up to `longest` columns: few sizes, so that other lengths seldom compile anything."""
    step = 32 if longest <= 256 else 64 if longest <= 1024 else 128
    return -(-longest // step) * step
