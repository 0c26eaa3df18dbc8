"""`block_attention` for decoding on a CPU: the context is read row by row and tile by tile, and only where it is live.

XLA's CPU backend copies what a dot reads out of a stacked cache. The reference so copies a whole layer, dead columns and all, before
it multiplies: at 52 rows of 640 columns that was nine tenths of the time. Here a tile is copied while it is hot in the processor's
cache, with an online softmax over tiles, and the work follows the live context.
"""

import jax
import jax.numpy as jnp

from dflax.kernels_pallas.block_attention import reference
from dflax.kernels_pallas.block_attention.reference import FLOOR, NEGATIVE

TILE = 128
"""Columns that are read together."""

WHOLE = 2**16
"""Keys of a layer, in elements, up to which the reference is as fast and compiles sooner."""


def attend(
    q, k_ctx, v_ctx, k_blk, v_blk, layer, ctx_start, ctx_len, q_pos, mask, hole, blk_len, window, scale, soft_cap
):
    """As `reference.attend`, but for gradients: loops of traced length have none."""
    B, N, T, Hq, D = q.shape
    Hkv, S = k_ctx.shape[2:4]
    G, width = Hq // Hkv, min(TILE, S)
    two_sided = reference.mask_is_two_sided(mask)
    rows = (
        (q * scale).reshape(B, N, T, Hkv, G, D).transpose(0, 3, 4, 1, 2, 5)
    )  # head groups before rows, as in the reference

    def row(b, parts):
        pick = lambda x: jax.lax.dynamic_index_in_dim(x, b, 0, False)
        own, start, length, position = pick(rows), pick(ctx_start), pick(ctx_len), pick(q_pos)
        gap = None if hole is None else pick(hole)
        heads = own.reshape(Hkv, G * N * T, D).astype(jnp.float32)

        def tile(i, carry):
            top, total, out = carry
            first = jnp.minimum(i * width, S - width)  # the last tile may overlap the one before it
            take = lambda c: jax.lax.dynamic_slice(c, (layer, b, 0, first, 0), (1, 1, Hkv, width, D))[0, 0]
            k, v = take(k_ctx).astype(jnp.float32), take(v_ctx).astype(jnp.float32)
            logits = jnp.einsum("hrd,hsd->hrs", heads, k)
            if soft_cap is not None:
                logits = soft_cap * jnp.tanh(logits / soft_cap)
            column = first + jnp.arange(width, dtype=jnp.int32)
            seen = reference.visible_context(column, start, length, position, gap, window, two_sided)
            seen &= column >= i * width
            logits = logits.reshape(Hkv, G, N, T, width) + jnp.where(seen, 0.0, NEGATIVE)
            above = jnp.maximum(top, logits.max(-1))
            p, shrink = jnp.exp(logits - above[..., None]), jnp.exp(top - above)
            mixed = jnp.einsum("hrs,hsd->hrd", p.reshape(Hkv, G * N * T, width), v).reshape(out.shape)
            return above, total * shrink + p.sum(-1), out * shrink[..., None] + mixed

        shape = (Hkv, G, N, T)
        nothing = jnp.full(shape, FLOOR), jnp.zeros(shape), jnp.zeros((*shape, D))
        low = jnp.maximum(start.min(), position.min() - window + 1)
        found = jax.lax.fori_loop(jnp.maximum(low, 0) // width, -(-length.max() // width), tile, nothing)
        return jax.tree.map(
            lambda all_rows, one: jax.lax.dynamic_update_index_in_dim(all_rows, one, b, 0), parts, found
        )

    shape = (B, Hkv, G, N, T)
    context = jax.lax.fori_loop(0, B, row, (jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((*shape, D))))
    return reference.with_block(rows, context, k_blk, v_blk, q_pos, mask, blk_len, window, soft_cap).astype(q.dtype)
