"""`block_attention` in plain XLA: the definition that every kernel is tested against, and what runs on CPU."""

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
    k_blk, v_blk = (x.transpose(0, 3, 1, 2, 4) for x in (k_blk, v_blk))
    context = jnp.einsum("bhrd,bhsd->bhrs", q_.reshape(B, Hkv, G * N * T, D), k_ctx, preferred_element_type=jnp.float32)
    context = context.reshape(B, Hkv, G, N, T, S)
    block = jnp.einsum("bhgntd,bhnud->bhgntu", q_, k_blk, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        context, block = (soft_cap * jnp.tanh(x / soft_cap) for x in (context, block))

    sees_context, sees_block = visible(S, ctx_start, ctx_len, q_pos, mask, hole, blk_len, window)
    context += jnp.where(sees_context, 0.0, NEGATIVE)[:, None, None]
    block += jnp.where(sees_block, 0.0, NEGATIVE)[:, None, None]

    top = jnp.maximum(jnp.maximum(context.max(-1, initial=FLOOR), block.max(-1)), FLOOR)
    top = jax.lax.stop_gradient(top)[..., None]
    p_context, p_block = jnp.exp(context - top), jnp.exp(block - top)
    total = p_context.sum(-1) + p_block.sum(-1)
    rows = p_context.astype(q.dtype).reshape(B, Hkv, G * N * T, S)
    out = jnp.einsum("bhrs,bhsd->bhrd", rows, v_ctx, preferred_element_type=jnp.float32).reshape(q_.shape)
    out += jnp.einsum("bhgntu,bhnud->bhgntd", p_block.astype(q.dtype), v_blk, preferred_element_type=jnp.float32)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.transpose(0, 3, 4, 1, 2, 5).reshape(B, N, T, Hq, D).astype(q.dtype)


def visible(S, ctx_start, ctx_len, q_pos, mask, hole, blk_len, window):
    """Who sees whom: (context [B, N, T, S], block [B, N, T, T]), booleans, [query, key]."""
    T = q_pos.shape[-1]
    column = jnp.arange(S, dtype=jnp.int32)
    two_sided = not (isinstance(mask, str) and mask == "causal")
    live = (column >= ctx_start[..., None]) & (column < ctx_len[..., None])
    if hole is not None:
        live &= (column < hole[..., :1]) | (column >= hole[..., 1:])
    distance = q_pos[..., None] - column
    context = live[:, :, None] & (distance < window)
    if two_sided:
        context &= -distance < window

    slot = jnp.arange(T, dtype=jnp.int32)
    distance = q_pos[..., :, None] - q_pos[..., None, :]
    block = (slot < blk_len[..., None])[..., None, :] & (distance < window)
    if two_sided:
        block &= -distance < window
    if isinstance(mask, str):
        if mask == "causal":
            block &= slot[:, None] >= slot
        elif mask != "full":
            raise ValueError(f"mask is {mask!r}; it must be 'full', 'causal' or a boolean array")
    else:
        block &= mask
    return context, block
