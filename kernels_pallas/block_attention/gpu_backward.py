"""`block_attention` for GPU: gradients.

As on TPU (`tpu_backward.py`) two kernels. One program per query tile follows the forward pass's walk and gathers dq; one program per
key tile, of the context and of the block, loops over the query tiles that see it and gathers dk and dv. Both hold their sums in registers.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from dflax.kernels_pallas.block_attention import sizes, tile
from dflax.kernels_pallas.block_attention.fold import (
    Folded,
    Plan,
    fold,
    fold_queries,
    fold_statistics,
    make_plan,
    unfold_keys,
    unfold_queries,
)
from dflax.kernels_pallas.block_attention.gpu import (
    WHOLE,
    context_or_stub,
    load_context,
    load_explicit,
    sizes_for,
    walk_tiles,
)
from dflax.kernels_pallas.block_attention.walk import (
    ROW_FIELDS,
    TILE_FIELDS,
    Case,
    Walk,
    Where,
    sees_block,
    sees_context,
)


@partial(jax.jit, static_argnames=("case", "cut", "interpret"))
def backward(
    q: Float[Array, "B N T Hq D"],
    k_ctx: Float[Array, "L B Hkv S D"],
    v_ctx: Float[Array, "L B Hkv S D"],
    k_blk: Float[Array, "B N T Hkv D"],
    v_blk: Float[Array, "B N T Hkv D"],
    where: Where,
    out: Float[Array, "B N T Hq D"],
    lse: Float[Array, "B N T Hq"],
    gradient: Float[Array, "B N T Hq D"],
    *,
    case: Case,
    cut: sizes.Sizes | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """Gradients of q, of one layer's k_ctx and v_ctx [B, Hkv, S, D], of k_blk and of v_blk, from the output's."""
    cut = cut or sizes_for(q, k_ctx, backward=True)
    plan = make_plan(q.shape, k_ctx.shape, cut, powers=True)
    folded = fold(plan, case, where, q, k_blk, v_blk)
    delta = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    statistics = fold_statistics(plan, lse, delta)
    gradient = fold_queries(plan, gradient.astype(q.dtype))
    parameters = triton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages)
    call = partial(pl.pallas_call, compiler_params=parameters, interpret=interpret)
    of_queries = (folded.q, gradient, statistics, folded.rows)
    dq = _queries_gradient(call, plan, case, folded, k_ctx, v_ctx, of_queries)
    dk_blk, dv_blk = _block_gradient(call, plan, case, folded, of_queries)
    dk_ctx = dv_ctx = jnp.zeros(k_ctx.shape[1:], k_ctx.dtype)
    if plan.S:
        dk_ctx, dv_ctx = (
            x[:, :, : plan.S, : plan.D] for x in _context_gradient(call, plan, case, folded, k_ctx, v_ctx, of_queries)
        )
    return unfold_queries(plan, dq), dk_ctx, dv_ctx, unfold_keys(plan, dk_blk), unfold_keys(plan, dv_blk)


def _queries_gradient(
    call: Any, plan: Plan, case: Case, folded: Folded, k_ctx: Array, v_ctx: Array, of_queries: tuple[Array, ...]
) -> Array:
    B, Hkv = folded.q.shape[:2]
    tiles = lambda *block: pl.BlockSpec((None, None, None, *block), lambda t, h, b: (b, h, t, 0, 0))
    queries = tiles(plan.rows, plan.head)
    inputs = [folded.layer, folded.window, folded.table, *of_queries, *(context_or_stub(c) for c in (k_ctx, v_ctx))]
    inputs += folded.block
    specs = [
        WHOLE,
        WHOLE,
        pl.BlockSpec((None, None, TILE_FIELDS), lambda t, h, b: (b, t, 0)),
        queries,
        queries,
        tiles(2, plan.rows),
        pl.BlockSpec((None, None, ROW_FIELDS, plan.rows), lambda t, h, b: (b, t, 0, 0)),
    ]
    return call(
        partial(_queries_kernel, plan, case),
        grid=(plan.tiles, Hkv, B),
        in_specs=specs + [WHOLE] * (len(inputs) - len(specs)),
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(folded.q.shape, folded.q.dtype),
        name="block_attention_dq",
    )(*inputs)


def _queries_kernel(plan, case, layer, window, table, q, do, statistics, rows, k_ctx, v_ctx, *rest):
    *block, dq = rest
    query, gradient, lse, delta = q[...], do[...], statistics[0, :][:, None], statistics[1, :][:, None]

    def absorb(total, k, v, all_seen, visible):
        x = tile.logits(case, query, k)
        _, ds = tile.weights(case, x, tile.dot(gradient, v, (1, 1)), None, lse, delta)
        ds = lax.cond(all_seen, lambda ds: ds, lambda ds: jnp.where(visible(), ds, 0.0), ds)
        return total + tile.dot(ds.astype(k.dtype), k, (1, 0))

    total = walk_tiles(
        plan, case, layer, window, table, rows, k_ctx, v_ctx, *block,
        split=0, splits=1, take=absorb, state=jnp.zeros((plan.rows, plan.head), jnp.float32),
    )  # fmt: skip
    dq[...] = (total * case.scale).astype(dq.dtype)


def _context_gradient(
    call: Any, plan: Plan, case: Case, folded: Folded, k_ctx: Array, v_ctx: Array, of_queries: tuple[Array, ...]
) -> tuple[Array, Array]:
    """dk and dv, [B, Hkv, c_tiles * columns, head]."""
    inputs = [folded.layer, folded.table, folded.context_visitors(plan), *of_queries, k_ctx, v_ctx]
    kernel = partial(_context_kernel, plan, case)
    return _keys_call(call, plan, folded, kernel, inputs, plan.c_tiles, plan.columns, k_ctx.dtype)


def _block_gradient(
    call: Any, plan: Plan, case: Case, folded: Folded, of_queries: tuple[Array, ...]
) -> tuple[Array, Array]:
    """dk and dv of the block's keys as they are folded."""
    inputs = [folded.window, folded.table, folded.block_visitors(plan), *of_queries, *folded.block]
    kernel, tiles = partial(_block_kernel, plan, case), plan.groups * plan.k_tiles
    return _keys_call(call, plan, folded, kernel, inputs, tiles, plan.keys, folded.k_blk.dtype)


def _keys_call(
    call: Any, plan: Plan, folded: Folded, kernel: Any, inputs: list[Array], tiles: int, width: int, dtype: Any
) -> tuple[Array, Array]:
    B, Hkv = folded.q.shape[:2]
    out = jax.ShapeDtypeStruct((B, Hkv, tiles * width, plan.head), dtype)
    spec = pl.BlockSpec((None, None, width, plan.head), lambda j, h, b: (b, h, j, 0))
    return call(
        kernel,
        grid=(tiles, Hkv, B),
        in_specs=[WHOLE] * len(inputs),
        out_specs=[spec, spec],
        out_shape=[out, out],
        name="block_attention_dkv",
    )(*inputs)


def _context_kernel(plan, case, layer, table, visits, q, do, statistics, rows, k_ctx, v_ctx, dk, dv):
    j, h, b = (pl.program_id(axis) for axis in range(3))
    k, v = (load_context(plan, ref, layer[0], b, h, j) for ref in (k_ctx, v_ctx))
    column = (j * plan.columns + jnp.arange(plan.columns, dtype=jnp.int32))[:, None]

    def sight(t):
        all_seen = Walk(lambda i: table[b, t, i]).sees_all_of_context(j, plan.columns)
        return all_seen, lambda: sees_context(lambda i: rows[b, t, i, :][None, :], column)

    _visit(case, b, h, visits[b, j, 0], visits[b, j, 1], q, do, statistics, k, v, sight, dk, dv)


def _block_kernel(plan, case, window, table, visits, q, do, statistics, rows, k_blk, v_blk, positions, *rest):
    *mask, dk, dv = rest
    j, h, b = (pl.program_id(axis) for axis in range(3))
    k, v = (ref[b, h, pl.ds(j * plan.keys, plan.keys), :] for ref in (k_blk, v_blk))
    own = lax.rem(j, jnp.int32(plan.k_tiles))  # within its group
    key = (own * plan.keys + jnp.arange(plan.keys, dtype=jnp.int32))[:, None]
    position = positions[b, j, 0, :][:, None]
    window = window[0]

    def sight(t):
        def visible():
            sees = sees_block(lambda i: rows[b, t, i, :][None, :], key, position, window, case.two_sided)
            return sees & load_explicit(plan, mask[0], b, t, own, upright=False) if mask else sees

        return Walk(lambda i: table[b, t, i]).sees_all_of_block(own, plan.keys), visible

    _visit(case, b, h, visits[b, j, 0], visits[b, j, 1], q, do, statistics, k, v, sight, dk, dv)


def _visit(case, b, h, first, count, q, do, statistics, k, v, sight, dk, dv):
    """Sums over the query tiles first .. first + count; logits lie down, [keys, R], so that the sums need no transposition."""

    def step(t, sums):
        query, gradient = q[b, h, t, :, :], do[b, h, t, :, :]
        lse, delta = (statistics[b, h, t, i, :][None, :] for i in range(2))
        x = tile.logits(case, k, query)
        p, ds = tile.weights(case, x, tile.dot(v, gradient, (1, 1)), None, lse, delta)
        all_seen, visible = sight(t)

        def hidden(p, ds):
            sees = visible()
            return jnp.where(sees, p, 0.0), jnp.where(sees, ds, 0.0)

        p, ds = lax.cond(all_seen, lambda p, ds: (p, ds), hidden, p, ds)
        dk_sum, dv_sum = sums
        dk_sum += tile.dot(ds.astype(query.dtype), query, (1, 0))
        return dk_sum, dv_sum + tile.dot(p.astype(gradient.dtype), gradient, (1, 0))

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk_sum, dv_sum = lax.fori_loop(first, first + count, step, (zeros, zeros))
    dk[...] = (dk_sum * case.scale).astype(dk.dtype)
    dv[...] = dv_sum.astype(dv.dtype)
