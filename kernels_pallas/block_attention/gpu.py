"""`block_attention` for GPU (Pallas, Triton): the forward pass.

One program per query tile: it loops over its own walk (`walk.py`), context first, then the block, with the online softmax in registers.
At small batch that is too few programs for the chip, and the context is split among several per tile: each takes an equal share of
the *live* context tiles, the last one also the block, and XLA joins what they found. Caches are read where they lie, through pointers:
the last tile and a head_dim that is no power of two are masked in the load.

This file and `gpu_backward.py` are all that knows of Triton.
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
from dflax.kernels_pallas.block_attention.fold import Plan, fold, make_plan, power, unfold_queries, unfold_statistics
from dflax.kernels_pallas.block_attention.walk import (
    ROW_FIELDS,
    TILE_FIELDS,
    Case,
    Walk,
    Where,
    sees_block,
    sees_context,
)

PROGRAMS = 2 * 132
"""How many programs keep an H100 busy: two for each of its processors."""

WHOLE = pl.BlockSpec()
"""An array that is read through pointers."""


@partial(jax.jit, static_argnames=("case", "cut", "splits", "interpret"))
def forward(
    q: Float[Array, "B N T Hq D"],
    k_ctx: Float[Array, "L B Hkv S D"],
    v_ctx: Float[Array, "L B Hkv S D"],
    k_blk: Float[Array, "B N T Hkv D"],
    v_blk: Float[Array, "B N T Hkv D"],
    where: Where,
    *,
    case: Case,
    cut: sizes.Sizes | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N T Hq D"], Float[Array, "B N T Hq"]]:
    """The output, and the log of the sum of exponentials of every query and head. `cut`, `splits`: not those of the table and rule."""
    B, Hkv = q.shape[0], k_ctx.shape[2]
    cut = cut or sizes_for(q, k_ctx)
    plan = make_plan(q.shape, k_ctx.shape, cut, powers=True)
    folded = fold(plan, case, where, q, k_blk, v_blk)
    splits = splits or enough_splits(plan, B * Hkv)
    grid = (plan.tiles, Hkv, B, splits)
    queries = pl.BlockSpec((None, None, None, plan.rows, plan.head), lambda t, h, b, split: (b, h, t, 0, 0))
    inputs = [folded.layer, folded.window, folded.table, folded.q, folded.rows]
    inputs += [context_or_stub(c) for c in (k_ctx, v_ctx)]
    inputs += folded.block
    specs = [
        WHOLE,
        WHOLE,
        pl.BlockSpec((None, None, TILE_FIELDS), lambda t, h, b, split: (b, t, 0)),
        queries,
        pl.BlockSpec((None, None, ROW_FIELDS, plan.rows), lambda t, h, b, split: (b, t, 0, 0)),
    ]
    out, lse = pl.pallas_call(
        partial(_kernel, plan, case, splits),
        grid=grid,
        in_specs=specs + [WHOLE] * (len(inputs) - len(specs)),
        out_specs=[
            pl.BlockSpec((None, None, None, None, plan.rows, plan.head), lambda t, h, b, split: (split, b, h, t, 0, 0)),
            pl.BlockSpec((None, None, None, None, plan.rows), lambda t, h, b, split: (split, b, h, t, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *folded.q.shape), q.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, *folded.q.shape[:4]), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="block_attention",
    )(*inputs)
    out, lse = (out[0], lse[0]) if splits == 1 else _join(out, lse)
    return unfold_queries(plan, out.astype(q.dtype)), unfold_statistics(plan, lse)


def sizes_for(q: Array, k_ctx: Array, *, backward: bool = False) -> sizes.Sizes:
    _, N, T, Hq, D = q.shape
    return sizes.gpu(N * T * Hq // k_ctx.shape[2], power(D) * k_ctx.dtype.itemsize, backward=backward)


def enough_splits(plan: Plan, heads: int) -> int:
    """Programs per query tile for `heads` kv heads in all rows: enough to fill the chip, but four context tiles each."""
    wanted = -(-PROGRAMS // (heads * plan.tiles))
    return max(1, min(wanted, plan.c_tiles // 4))


def context_or_stub(c: Array) -> Array:
    """The context, or something to point at where there is none."""
    return c if c.shape[3] else jnp.zeros((*c.shape[:3], 1, c.shape[4]), c.dtype)


def _join(out: Array, lse: Array) -> tuple[Array, Array]:
    """What the splits found, [splits, ...], as one."""
    top = lse.max(0)
    weight = jnp.exp(lse - top)
    total = weight.sum(0)
    return (out * weight[..., None]).sum(0) / total[..., None], top + jnp.log(total)


def load_context(plan: Plan, ref: Any, layer: Any, b: Any, h: Any, column_tile: Any) -> Array:
    """A tile of the cache, [columns, head]; zeros past its ends."""
    column = (column_tile * plan.columns + jnp.arange(plan.columns, dtype=jnp.int32))[:, None]
    feature = jnp.arange(plan.head, dtype=jnp.int32)[None, :]
    masks = ([column < plan.S] if plan.partial else []) + ([feature < plan.D] if plan.head != plan.D else [])
    if not masks:
        return triton.load(ref.at[layer, b, h, column, feature])
    mask = jnp.broadcast_to(masks[0] if len(masks) == 1 else masks[0] & masks[1], (plan.columns, plan.head))
    return triton.load(ref.at[layer, b, h, column, feature], mask=mask, other=0.0)


def load_explicit(plan: Plan, mask: Any, b: Any, t: Any, key_tile: Any, *, upright: bool) -> Array:
    """The explicit mask of a query tile against a key tile: [R, keys], or [keys, R] where queries lie."""
    token = lax.rem(jnp.arange(plan.rows, dtype=jnp.int32), jnp.int32(plan.tokens))
    key = jnp.arange(plan.keys, dtype=jnp.int32)
    token, key = (token[:, None], key[None, :]) if upright else (token[None, :], key[:, None])
    return triton.load(mask.at[b, t, key_tile, token, key]) != 0


def _kernel(plan, case, splits, layer, window, table, q, rows, k_ctx, v_ctx, *rest):
    *block, out, lse = rest
    query = q[...]

    def absorb(state, k, v, all_seen, visible):
        x = tile.logits(case, query, k)
        x = lax.cond(all_seen, lambda x: x, lambda x: tile.hide(x, visible()), x)
        return tile.absorb(state, x, v)

    state = walk_tiles(
        plan, case, layer, window, table, rows, k_ctx, v_ctx, *block,
        split=pl.program_id(3), splits=splits, take=absorb, state=tile.nothing(plan.rows, plan.head),
    )  # fmt: skip
    value, sum_ = tile.result(state)
    out[...] = value.astype(out.dtype)
    lse[...] = sum_[:, 0]


def walk_tiles(
    plan,
    case,
    layer,
    window,
    table,
    rows,
    k_ctx,
    v_ctx,
    k_blk,
    v_blk,
    positions,
    mask=None,
    *,
    split,
    splits,
    take,
    state,
):
    """Folds take(state, k, v, whether all rows see all of it, a function that gives who sees whom [R, n]) over this program's walk.

    Grid (t, h, b, ...). The context's steps are shared among `splits` programs; the last one has the block too.
    """
    t, h, b = (pl.program_id(axis) for axis in range(3))
    walk = Walk(lambda i: table[i])
    layer, window = layer[0], window[0]
    row = lambda i: rows[i, :][:, None]

    def context_step(step, state):
        column_tile = walk.context_tile(step)
        k, v = (load_context(plan, ref, layer, b, h, column_tile) for ref in (k_ctx, v_ctx))
        column = (column_tile * plan.columns + jnp.arange(plan.columns, dtype=jnp.int32))[None, :]
        all_seen = walk.sees_all_of_context(column_tile, plan.columns)
        return take(state, k, v, all_seen, lambda: sees_context(row, column))

    def block_step(step, state):
        key_tile = walk.block_tile(step)
        at = lax.div(t, jnp.int32(plan.q_tiles)) * plan.k_tiles + key_tile
        k, v = (ref[b, h, pl.ds(at * plan.keys, plan.keys), :] for ref in (k_blk, v_blk))

        def visible():
            key = (key_tile * plan.keys + jnp.arange(plan.keys, dtype=jnp.int32))[None, :]
            sees = sees_block(row, key, positions[b, at, 0, :][None, :], window, case.two_sided)
            return sees if mask is None else sees & load_explicit(plan, mask, b, t, key_tile, upright=True)

        return take(state, k, v, walk.sees_all_of_block(key_tile, plan.keys), visible)

    share = lax.div(walk.context_steps + (splits - 1), jnp.int32(splits))
    begin = jnp.minimum(split * share, walk.context_steps)
    end = jnp.minimum(begin + share, walk.context_steps)
    state = lax.fori_loop(begin, end, context_step, state)
    blocks = jnp.where(split == splits - 1, walk.block_steps, jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), blocks, block_step, state)
