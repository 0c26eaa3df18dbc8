"""What the decoding loop carries from round to round, and the few sizes its arrays come in."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dflax.cache import KVCache
from dflax.config import DrafterConfig, ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopState:
    """B responses being written. Row b ends at its anchor: the newest token, whose key and value are not in the cache yet.

    Shapes do not depend on the block size, so one state may go through rounds of different sizes. A finished row commits
    nothing and stays as it is, bit for bit. (Fields are annotated Any: jit describes arguments by trees of other leaves than arrays.)
    """

    cache: KVCache
    """Of the target, S columns. Its length is the cursor: the position of the row's anchor."""
    draft_cache: KVCache | None
    """Of the drafter, S columns: its keys and values of the same positions; None without a drafter."""
    last_fused: Float[Any, "B E"] | None
    """[B, E]: context vector of the token before the anchor, for drafters that take features by their input; else None."""
    tokens: Int32[Any, "B S"]
    """int32 [B, S]: prompt and response up to the anchor at column cursor; 0 behind it."""
    end: Int32[Any, "B"]
    """int32 [B]: prompt length + token budget, at most S: columns at or past it are never written."""
    done: Bool[Any, "B"]
    """bool [B]: the budget is used up or a stop token was written."""
    rounds: Int32[Any, "B"]
    """int32 [B]: rounds the row took part in before it was done."""
    acceptance: Int32[Any, "B S"]
    """int32 [B, S]: tokens that each of these rounds gained, accepted drafts + 1; not yet cut to the budget and at a stop
    token, which only the last round of a row can need."""

    @property
    def cursor(self) -> Int32[Array, "B"]:
        """int32 [B]: position of the anchor."""
        return self.cache.length

    @classmethod
    def start(
        cls,
        prompts: Int32[Array, "B S"],
        end: Int32[Array, "B"],
        target: ModelConfig,
        drafter: DrafterConfig | None,
        dtype: jnp.dtype,
    ) -> "LoopState":
        """Before prefill: right-padded prompts, empty caches of the prompts' S columns."""
        B, S = prompts.shape
        fused = drafter is not None and drafter.fused
        return cls(
            cache=KVCache.empty(target, B, S, dtype),
            draft_cache=None if drafter is None else KVCache.empty(drafter, B, S, dtype),
            last_fused=jnp.zeros((B, target.hidden_size), dtype) if fused else None,
            tokens=prompts,
            end=end,
            done=jnp.zeros((B,), bool),
            rounds=jnp.zeros((B,), jnp.int32),
            acceptance=jnp.zeros((B, S), jnp.int32),
        )


CHUNKS = (32, 64, 128, 256)
"""Sizes that prompts are prefilled in: as many of the largest as fit, then the smallest that holds the rest."""


def chunks(length: int) -> list[tuple[int, int]]:
    """(start, size) of the prefill chunks for prompts of up to `length` tokens."""
    out, start = [], 0
    while start < length:
        size = next((size for size in CHUNKS if size >= length - start), CHUNKS[-1])
        out.append((start, size))
        start += size
    return out


def capacity(columns: int) -> int:
    """S for prompt + budget of `columns` tokens: the next multiple of 128 up to 1024, of 512 above."""
    step = 128 if columns <= 1024 else 512
    return -(-columns // step) * step
