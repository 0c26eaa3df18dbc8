"""`block_attention` for TPU: gradients.

Two kernels. The first takes the forward pass's walk and gathers dq. The second belongs to a key tile and visits the query tiles that
see it, gathering dk and dv in its own memory: nothing of the size queries x context exists, however many anchors share a context. It
runs twice, over context tiles and over tiles of block keys. Anchors in ascending order make the visits few; any order is correct.

The second kernel works lying down: logits [keys, R], so that what belongs to a query is a row and dk, dv need no transposition.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from dflax.kernels_pallas.block_attention import sizes, tile
from dflax.kernels_pallas.block_attention.fold import (
    Folded,
    Plan,
    fold,
    fold_queries,
    fold_statistics,
    unfold_keys,
    unfold_queries,
)
from dflax.kernels_pallas.block_attention.tpu import PARALLEL, Specs, explicit, plan_for, walk_tiles
from dflax.kernels_pallas.block_attention.walk import ROW_FIELDS, Case, Where, sees_block, sees_context


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
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """Gradients of q, of one layer's k_ctx and v_ctx [B, Hkv, S, D], of k_blk and of v_blk, from the output's."""
    plan = plan_for(q, k_ctx, cut)
    folded = fold(plan, case, where, q, k_blk, v_blk)
    delta = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    statistics = fold_statistics(plan, lse, delta)
    gradient = fold_queries(plan, gradient.astype(q.dtype))
    call = partial(pl.pallas_call, compiler_params=PARALLEL, interpret=interpret)
    dq = _queries_gradient(call, plan, case, folded, k_ctx, v_ctx, gradient, statistics)
    of_keys = lambda keys: _keys_gradient(call, plan, case, folded, keys, gradient, statistics)
    dk_blk, dv_blk = of_keys(_block_keys(plan, folded))
    dk_ctx = dv_ctx = jnp.zeros(k_ctx.shape[1:], k_ctx.dtype)
    if plan.S:
        dk_ctx, dv_ctx = (x[:, :, : plan.S] for x in of_keys(_context_keys(plan, folded, k_ctx, v_ctx)))
    return unfold_queries(plan, dq), dk_ctx, dv_ctx, unfold_keys(plan, dk_blk), unfold_keys(plan, dv_blk)


def _queries_gradient(
    call: Callable,
    plan: Plan,
    case: Case,
    folded: Folded,
    k_ctx: Array,
    v_ctx: Array,
    gradient: Array,
    statistics: Array,
) -> Array:
    specs = Specs(plan)
    k_ctx, v_ctx = (specs.context_or_stub(c) for c in (k_ctx, v_ctx))
    B, Hkv = folded.q.shape[:2]
    queries = specs.queries(plan.head)
    return call(
        partial(_queries_kernel, plan, case),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, Hkv, plan.tiles, specs.steps(folded)),
            in_specs=[queries, queries, specs.statistics(2), specs.row_fields, *specs.walked(case)],
            out_specs=queries,
            scratch_shapes=[pltpu.VMEM((plan.rows, plan.head), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(folded.q.shape, folded.q.dtype),
        name="block_attention_dq",
    )(*specs.scalars(folded), folded.q, gradient, statistics, folded.rows, *specs.arrays(folded, k_ctx, v_ctx))


def _queries_kernel(
    plan, case, layer, window, table, q, do, statistics, rows, k_ctx, v_ctx, k_blk, v_blk, positions, *rest
):
    mask, (dq, total) = (rest[0], rest[1:]) if case.kind == "array" else (None, rest)
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    def absorb(k, v, visible):
        x = tile.logits(case, q[...], k)
        lse, delta = (jnp.transpose(statistics[...])[:, i : i + 1] for i in range(2))
        _, ds = tile.weights(case, x, tile.dot(do[...], v, (1, 1)), visible, lse, delta)
        total[...] += tile.dot(ds.astype(k.dtype), k, (1, 0))

    walk_tiles(plan, case, window, table, rows, k_ctx, v_ctx, k_blk, v_blk, positions, mask, absorb)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        dq[...] = (total[...] * case.scale).astype(dq.dtype)


@dataclass(frozen=True)
class Keys:
    """One kind of keys, the context's or the block's: `tiles` of `width`, and what decides who sees them.

    visits: `Folded.context_visitors` or `block_visitors`, flat. arrays, specs: keys, values, and what `sight` reads beside the rows.
    sight(plan, case, walk, tile, window, row, extra) -> (whether the query tile meets this tile, whether it sees all of it, a function
    that gives who sees whom [width, R]).
    """

    tiles: int
    width: int
    visits: Array
    arrays: list[Array]
    specs: list[pl.BlockSpec]
    sight: Callable[..., tuple[Any, Any, Callable[[], Any]]]

    def visited(self, b: Any, j: Any, step: Any, visits: Any) -> Any:
        """The query tile of a step; past the last visit the last one."""
        base = (b * self.tiles + j) * 2
        return visits[base] + jnp.clip(step, 0, jnp.maximum(visits[base + 1] - 1, 0))


def _context_keys(plan: Plan, folded: Folded, k_ctx: Array, v_ctx: Array) -> Keys:
    spec = pl.BlockSpec(
        (None, None, None, plan.columns, plan.head), lambda b, h, j, step, layer, *_: (layer[0], b, h, j, 0)
    )

    def sight(plan, case, walk, tile_, window, row, extra):
        column = tile_ * plan.columns + lax.broadcasted_iota(jnp.int32, (plan.columns, 1), 0)
        all_seen = walk.sees_all_of_context(tile_, plan.columns)
        return walk.meets_context(tile_), all_seen, lambda: sees_context(row, column)

    return Keys(plan.c_tiles, plan.columns, folded.context_visitors(plan), [k_ctx, v_ctx], [spec, spec], sight)


def _block_keys(plan: Plan, folded: Folded) -> Keys:
    spec = pl.BlockSpec((None, None, plan.keys, plan.head), lambda b, h, j, *_: (b, h, j, 0))
    arrays = [folded.k_blk, folded.v_blk, folded.positions]
    specs = [spec, spec, pl.BlockSpec((None, None, 1, plan.keys), lambda b, h, j, *_: (b, j, 0, 0))]

    def sight(plan, case, walk, tile_, window, row, extra):
        tile_ = lax.rem(tile_, plan.k_tiles)  # within its group

        def visible():
            positions, *mask = extra
            key = tile_ * plan.keys + lax.broadcasted_iota(jnp.int32, (plan.keys, 1), 0)
            sees = sees_block(row, key, positions[...].reshape(plan.keys, 1), window, case.two_sided)
            return sees & (jnp.transpose(explicit(plan, mask[0])) != 0) if mask else sees

        return walk.meets_block(tile_), walk.sees_all_of_block(tile_, plan.keys), visible

    found = Keys(plan.groups * plan.k_tiles, plan.keys, folded.block_visitors(plan), arrays, specs, sight)
    if folded.mask is not None:
        arrays.append(folded.mask)
        specs.append(
            pl.BlockSpec(
                (None, None, None, plan.tokens, plan.keys),
                lambda b, h, j, step, layer, window, table, visits: (
                    b, found.visited(b, j, step, visits), lax.rem(j, plan.k_tiles), 0, 0,
                ),
            )
        )  # fmt: skip
    return found


def _keys_gradient(
    call: Callable, plan: Plan, case: Case, folded: Folded, keys: Keys, gradient: Array, statistics: Array
) -> tuple[Array, Array]:
    """dk and dv, [B, Hkv, tiles * width, D]."""
    B, Hkv = folded.q.shape[:2]

    def of_head(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, *block),
            lambda b, h, j, step, layer, window, table, visits: (b, h, keys.visited(b, j, step, visits), 0, 0),
        )

    rows = pl.BlockSpec(
        (None, None, ROW_FIELDS, plan.rows),
        lambda b, h, j, step, layer, window, table, visits: (b, keys.visited(b, j, step, visits), 0, 0),
    )
    queries = of_head(plan.rows, plan.head)
    out_spec = pl.BlockSpec((None, None, keys.width, plan.head), lambda b, h, j, *_: (b, h, j, 0))
    out = jax.ShapeDtypeStruct((B, Hkv, keys.tiles * keys.width, plan.head), keys.arrays[0].dtype)
    visits = keys.visits.reshape(-1)
    return call(
        partial(_keys_kernel, plan, case, keys),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B, Hkv, keys.tiles, jnp.maximum(keys.visits[..., 1].max(), 1)),
            in_specs=[queries, queries, of_head(2, plan.rows), rows, *keys.specs],
            out_specs=[out_spec, out_spec],
            scratch_shapes=[pltpu.VMEM((keys.width, plan.head), jnp.float32)] * 2,
        ),
        out_shape=[out, out],
        name="block_attention_dkv",
    )(*Specs(plan).scalars(folded), visits, folded.q, gradient, statistics, folded.rows, *keys.arrays)


def _keys_kernel(plan, case, keys, layer, window, table, visits, q, do, statistics, rows, k, v, *rest):
    *extra, dk, dv, dk_sum, dv_sum = rest
    b, j, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    def absorb(visible):
        x = tile.logits(case, k[...], q[...])
        of_weights = tile.dot(v[...], do[...], (1, 1))
        p, ds = tile.weights(case, x, of_weights, visible, statistics[0:1, :], statistics[1:2, :])
        dv_sum[...] += tile.dot(p.astype(q.dtype), do[...], (1, 0))
        dk_sum[...] += tile.dot(ds.astype(q.dtype), q[...], (1, 0))

    walk = Specs(plan).walk(b, keys.visited(b, j, step, visits), table)
    meets, all_seen, visible = keys.sight(plan, case, walk, j, window[0], lambda i: rows[i : i + 1, :], extra)
    meets &= step < visits[(b * keys.tiles + j) * 2 + 1]

    @pl.when(meets & all_seen)
    def _():
        absorb(None)

    @pl.when(meets & jnp.logical_not(all_seen))
    def _():
        absorb(visible())

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        dk[...] = (dk_sum[...] * case.scale).astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)
