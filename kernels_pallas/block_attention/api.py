"""The public op `block_attention`: what it computes and what its arguments mean. How is the business of the backends."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflax.kernels_pallas.block_attention import cpu, reference

NO_WINDOW = 2**30
"""A window larger than any context, so that sliding and full layers share one program."""


def block_attention(
    q: Float[Array, "B N T Hq D"],
    k_ctx: Float[Array, "L B Hkv S D"],
    v_ctx: Float[Array, "L B Hkv S D"],
    k_blk: Float[Array, "B N T Hkv D"],
    v_blk: Float[Array, "B N T Hkv D"],
    *,
    layer: int | Int[Array, ""],
    ctx_len: Int[Array, "B N"],
    q_pos: Int[Array, "B N T"],
    mask: Literal["full", "causal"] | Bool[Array, "B N T T"],
    ctx_start: Int[Array, "B N"] | None = None,
    hole: Int[Array, "B N 2"] | None = None,
    blk_len: Int[Array, "B N"] | None = None,
    window: int | Int[Array, ""] = NO_WINDOW,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "B N T Hq D"]:
    """softmax(scale * q k^T) v over [visible context | visible block], per row and per block.

    N blocks of a row share its context: N = 1 at inference, the number of anchors in training. Everything about a row is
    traced data, so rows of any length and state run in one compiled program.

    Args:
      q: block queries, after RoPE.
      k_ctx, v_ctx: the whole stacked cache, keys after RoPE; column s holds position s. Only `layer` is read.
      k_blk, v_blk: keys (after RoPE) and values of the block itself.
      layer: which layer of the cache; a Python int or an int32 scalar.
      ctx_len: context columns s < ctx_len are visible (strict: an anchor does not see its own feature).
      q_pos: absolute position of every query; block keys have the positions of their queries.
      mask: inside the block: "full" (both directions), "causal" (by order in the block), or explicit, [query, key].
      ctx_start: context columns s >= ctx_start are visible; None: from 0.
      hole: columns lo <= s < hi are skipped; None: no hole.
      blk_len: live rows of the block; dead rows are seen by nobody. None: all live.
      window: a key is visible when q_pos - k_pos < window, and where the mask is not causal also k_pos - q_pos < window.
      scale: factor on the logits, normally head_dim ** -0.5.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap); None: no cap.

    Returns:
      The attention output in q's dtype; softmax in float32. A query with no visible key gives 0 and passes gradient 0.
    """
    B, N, T = q_pos.shape
    if ctx_start is None:
        ctx_start = jnp.zeros_like(ctx_len)
    if blk_len is None:
        blk_len = jnp.full((B, N), T, jnp.int32)

    def by(backend):
        return lambda q, k_ctx, v_ctx, k_blk, v_blk: backend.attend(
            q,
            k_ctx,
            v_ctx,
            k_blk,
            v_blk,
            layer,
            ctx_start,
            ctx_len,
            q_pos,
            mask,
            hole,
            blk_len,
            window,
            scale,
            soft_cap,
        )

    arrays = (q, k_ctx, v_ctx, k_blk, v_blk)
    L = k_ctx.shape[0]
    # Many blocks share a context in training only, and a layer that fits the processor's cache may as well be read whole.
    if N > 1 or L == 1 or k_ctx.size // L <= cpu.WHOLE:
        return by(reference)(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=by(cpu), default=by(reference))
