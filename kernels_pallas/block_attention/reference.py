"""`block_attention` in plain XLA: the definition that every kernel is tested against, and what runs where there is none."""

import jax
import jax.numpy as jnp

# Finite, so that a row with nothing visible stays free of NaN in value and gradient. Its maximum is held far above what hides a key,
# so that every exponential of it is 0 without a second mask.
NEGATIVE, FLOOR = -1e30, -1e29


def attend(
    q, k_ctx, v_ctx, k_blk, v_blk, layer, ctx_start, ctx_len, q_pos, mask, hole, blk_len, window, scale, soft_cap
):
    """See `block_attention`; arguments in the same shapes, every optional one filled in except `hole` and `soft_cap`."""
    B, N, T, Hq, D = q.shape
    Hkv = k_blk.shape[3]
    G = Hq // Hkv
    S = k_ctx.shape[3]
    k_ctx, v_ctx = (
        c[layer] if isinstance(layer, int) else jax.lax.dynamic_index_in_dim(c, layer, 0, False) for c in (k_ctx, v_ctx)
    )

    # Head groups before rows: all queries of a kv head are then the rows of one matrix product with its context.
    q_ = (q * scale).reshape(B, N, T, Hkv, G, D).transpose(0, 3, 4, 1, 2, 5)
    logits = jnp.einsum("bhrd,bhsd->bhrs", q_.reshape(B, Hkv, G * N * T, D), k_ctx, preferred_element_type=jnp.float32)
    logits = logits.reshape(B, Hkv, G, N, T, S)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    column = jnp.arange(S, dtype=jnp.int32)
    sees = visible_context(column, ctx_start, ctx_len, q_pos, hole, window, mask_is_two_sided(mask))
    logits += jnp.where(sees, 0.0, NEGATIVE)[:, None, None]

    top = jax.lax.stop_gradient(logits.max(-1, initial=FLOOR))
    p = jnp.exp(logits - top[..., None])
    rows = p.astype(q.dtype).reshape(B, Hkv, G * N * T, S)
    out = jnp.einsum("bhrs,bhsd->bhrd", rows, v_ctx, preferred_element_type=jnp.float32).reshape(q_.shape)
    context = top, p.sum(-1), out
    return with_block(q_, context, k_blk, v_blk, q_pos, mask, blk_len, window, soft_cap).astype(q.dtype)


def with_block(q_, context, k_blk, v_blk, q_pos, mask, blk_len, window, soft_cap):
    """The block's own part, joined with the context's.

    q_: scaled queries [B, Hkv, G, N, T, D]. context: of what the queries see of it, the largest logit (at least FLOOR) and the sum of
    exponentials relative to it, both [B, Hkv, G, N, T], and the values weighted by these, [B, Hkv, G, N, T, D]. Returns float32
    [B, N, T, Hq, D].
    """
    B, Hkv, G, N, T, D = q_.shape
    # Blocks before head groups: all queries of a block and kv head are the rows of one product, which XLA's CPU backend needs to be fast.
    rows = q_.swapaxes(2, 3).reshape(B, Hkv, N, G * T, D)
    below, total, out = (x.swapaxes(2, 3) for x in context)
    k_blk, v_blk = (x.transpose(0, 3, 1, 2, 4) for x in (k_blk, v_blk))
    logits = jnp.einsum("bhnrd,bhnud->bhnru", rows, k_blk, preferred_element_type=jnp.float32)
    logits = logits.reshape(B, Hkv, N, G, T, T)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits += jnp.where(visible_block(q_pos, mask, blk_len, window), 0.0, NEGATIVE)[:, None, :, None]

    top = jax.lax.stop_gradient(jnp.maximum(below, logits.max(-1)))
    shrink, p = jnp.exp(below - top), jnp.exp(logits - top[..., None])
    total = total * shrink + p.sum(-1)
    p = p.astype(q_.dtype).reshape(B, Hkv, N, G * T, T)
    own = jnp.einsum("bhnru,bhnud->bhnrd", p, v_blk, preferred_element_type=jnp.float32)
    out = out * shrink[..., None] + own.reshape(out.shape)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, N, T, Hkv * G, D)


def mask_is_two_sided(mask):
    """Whether a window counts in both directions under this mask."""
    if isinstance(mask, str) and mask not in ("full", "causal"):
        raise ValueError(f"mask is {mask!r}; it must be 'full', 'causal' or a boolean array")
    return not (isinstance(mask, str) and mask == "causal")


def visible_context(column, ctx_start, ctx_len, q_pos, hole, window, two_sided):
    """Who sees which of the context columns `column` [s]: booleans [..., N, T, s] for ctx_start, ctx_len [..., N] and q_pos [..., N, T]."""
    live = (column >= ctx_start[..., None]) & (column < ctx_len[..., None])
    if hole is not None:
        live &= (column < hole[..., :1]) | (column >= hole[..., 1:])
    distance = q_pos[..., None] - column
    sees = live[..., None, :] & (distance < window)
    return sees & (-distance < window) if two_sided else sees


def visible_block(q_pos, mask, blk_len, window):
    """Who sees whom inside the block: booleans [B, N, T, T], [query, key]."""
    slot = jnp.arange(q_pos.shape[-1], dtype=jnp.int32)
    distance = q_pos[..., :, None] - q_pos[..., None, :]
    sees = (slot < blk_len[..., None])[..., None, :] & (distance < window)
    if mask_is_two_sided(mask):
        sees &= -distance < window
    if not isinstance(mask, str):
        return sees & mask
    return sees & (slot[:, None] >= slot) if mask == "causal" else sees
