"""`block_attention` for TPU (Pallas, Mosaic): the forward pass.

Grid: batch, kv head, query tile, and the steps of the longest walk as a traced number: a cache of 32768 columns of which 1024 live takes
the steps of 1024. Every tile follows its own walk (`walk.py`) from a table in scalar memory, context first, then the block. Past the end
of its walk a tile's index maps repeat the last index, so nothing is fetched, and nothing is computed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from dflax.kernels_pallas.block_attention import sizes, tile
from dflax.kernels_pallas.block_attention.fold import Folded, Plan, fold, make_plan, unfold_queries, unfold_statistics
from dflax.kernels_pallas.block_attention.walk import (
    ROW_FIELDS,
    TILE_FIELDS,
    Case,
    Walk,
    Where,
    sees_block,
    sees_context,
)

PARALLEL = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


@partial(jax.jit, static_argnames=("case", "cut", "interpret"))
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
    interpret: Any = False,
) -> tuple[Float[Array, "B N T Hq D"], Float[Array, "B N T Hq"]]:
    """The output, and the log of the sum of exponentials of every query and head. `cut`: other sizes than the table's."""
    plan = plan_for(q, k_ctx, cut)
    folded = fold(plan, case, where, q, k_blk, v_blk)
    R, D, Hkv = plan.rows, plan.head, k_ctx.shape[2]
    specs = Specs(plan)
    k_ctx, v_ctx = (specs.context_or_stub(c) for c in (k_ctx, v_ctx))
    kernel = partial(_kernel, plan, case)
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(q.shape[0], Hkv, plan.tiles, specs.steps(folded)),
            in_specs=[specs.queries(D), specs.row_fields, *specs.walked(case)],
            out_specs=[specs.queries(D), specs.statistics(1)],
            scratch_shapes=[
                pltpu.VMEM((R, 1), jnp.float32),
                pltpu.VMEM((R, 1), jnp.float32),
                pltpu.VMEM((R, D), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(folded.q.shape, q.dtype),
            jax.ShapeDtypeStruct((*folded.q.shape[:3], 1, R), jnp.float32),
        ],
        compiler_params=PARALLEL,
        interpret=interpret,
        name="block_attention",
    )(*specs.scalars(folded), folded.q, folded.rows, *specs.arrays(folded, k_ctx, v_ctx))
    return unfold_queries(plan, out), unfold_statistics(plan, lse[:, :, :, 0])


def plan_for(q: Array, k_ctx: Array, cut: sizes.Sizes | None) -> Plan:
    _, N, T, Hq, _ = q.shape
    return make_plan(q.shape, k_ctx.shape, cut or sizes.tpu(N * T * Hq // k_ctx.shape[2]), powers=False)


class Specs:
    """Where the kernels that walk from a query tile find their tiles: grid (b, h, t, step), scalars (layer, window, table)."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def scalars(self, folded: Folded) -> tuple[Array, Array, Array]:
        return folded.layer, folded.window, folded.table.reshape(-1)

    def walk(self, b: Any, t: Any, table: Any) -> Walk:
        base = (b * self.plan.tiles + t) * TILE_FIELDS
        return Walk(lambda i: table[base + i])

    def steps(self, folded: Folded) -> Array:
        """Of the longest walk; at least one, which writes the zeros of a query that sees nothing."""
        return jnp.maximum((folded.walk.context_steps + folded.walk.block_steps).max(), 1)

    def context_or_stub(self, c: Array) -> Array:
        """The context, or something to point at where there is none."""
        return c if self.plan.S else jnp.zeros((*c.shape[:3], self.plan.columns, c.shape[4]), c.dtype)

    def queries(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, self.plan.rows, width), lambda b, h, t, *_: (b, h, t, 0, 0))

    def statistics(self, n: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, n, self.plan.rows), lambda b, h, t, *_: (b, h, t, 0, 0))

    @property
    def row_fields(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, ROW_FIELDS, self.plan.rows), lambda b, h, t, *_: (b, t, 0, 0))

    def walked(self, case: Case) -> list[pl.BlockSpec]:
        """Specs of `arrays`: keys and values of context and block, the block's positions and mask."""
        plan = self.plan

        def context(b, h, t, step, layer, window, table):
            walk = self.walk(b, t, table)
            return layer[0], b, h, walk.context_tile(jnp.clip(step, 0, jnp.maximum(walk.context_steps - 1, 0))), 0

        def block_tile(b, t, step, table):
            walk = self.walk(b, t, table)
            step = jnp.clip(step - walk.context_steps, 0, jnp.maximum(walk.block_steps - 1, 0))
            return jnp.minimum(walk.block_tile(step), plan.k_tiles - 1)

        def block(b, h, t, step, layer, window, table):
            return b, h, lax.div(t, plan.q_tiles) * plan.k_tiles + block_tile(b, t, step, table), 0

        def position(b, h, t, step, layer, window, table):
            return b, lax.div(t, plan.q_tiles) * plan.k_tiles + block_tile(b, t, step, table), 0, 0

        def mask(b, h, t, step, layer, window, table):
            return b, t, block_tile(b, t, step, table), 0, 0

        context_spec = pl.BlockSpec((None, None, None, plan.columns, plan.head), context)
        block_spec = pl.BlockSpec((None, None, plan.keys, plan.head), block)
        specs = [context_spec, context_spec, block_spec, block_spec, pl.BlockSpec((None, None, 1, plan.keys), position)]
        if case.kind == "array":
            specs.append(pl.BlockSpec((None, None, None, plan.tokens, plan.keys), mask))
        return specs

    def arrays(self, folded: Folded, k_ctx: Array, v_ctx: Array) -> list[Array]:
        return [k_ctx, v_ctx, *folded.block]


def _kernel(plan, case, layer, window, table, q, rows, k_ctx, v_ctx, k_blk, v_blk, positions, *rest):
    mask, (out, lse, *state) = (rest[0], rest[1:]) if case.kind == "array" else (None, rest)
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _():
        for ref, value in zip(state, tile.nothing(plan.rows, plan.head), strict=True):
            ref[...] = value

    def absorb(k, v, visible):
        x = tile.hide(tile.logits(case, q[...], k), visible)
        for ref, value in zip(state, tile.absorb(tuple(ref[...] for ref in state), x, v), strict=True):
            ref[...] = value

    walk_tiles(plan, case, window, table, rows, k_ctx, v_ctx, k_blk, v_blk, positions, mask, absorb)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        value, sum_ = tile.result(tuple(ref[...] for ref in state))
        out[...] = value.astype(out.dtype)
        lse[...] = sum_.reshape(1, plan.rows)


def walk_tiles(plan, case, window, table, rows, k_ctx, v_ctx, k_blk, v_blk, positions, mask, take):
    """Calls take(k, v, visible [R, n] or None for all) with the tile of this step, if the walk has not ended."""
    step = pl.program_id(3)
    walk = Specs(plan).walk(pl.program_id(0), pl.program_id(2), table)
    in_context = step < walk.context_steps
    column_tile = walk.context_tile(step)
    all_seen = walk.sees_all_of_context(column_tile, plan.columns)

    @pl.when(in_context & all_seen)
    def _():
        take(k_ctx[...], v_ctx[...], None)

    @pl.when(in_context & jnp.logical_not(all_seen))
    def _():
        begin = column_tile * plan.columns
        row = upright(rows)
        column = begin + lax.broadcasted_iota(jnp.int32, (1, plan.columns), 1)
        k, v = k_ctx[...], v_ctx[...]
        if plan.partial:  # what lies past the end of the cache is anything, and 0 * NaN is NaN
            inside = begin + lax.broadcasted_iota(jnp.int32, (plan.columns, 1), 0) < plan.S
            k, v = (jnp.where(inside, x, 0) for x in (k, v))
        take(k, v, sees_context(row, column))

    key_tile = walk.block_tile(step - walk.context_steps)
    in_block = (step >= walk.context_steps) & (step < walk.context_steps + walk.block_steps)
    all_seen = walk.sees_all_of_block(key_tile, plan.keys)

    @pl.when(in_block & all_seen)
    def _():
        take(k_blk[...], v_blk[...], None)

    @pl.when(in_block & jnp.logical_not(all_seen))
    def _():
        key = key_tile * plan.keys + lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
        visible = sees_block(upright(rows), key, positions[...], window[0], case.two_sided)
        if mask is not None:
            visible &= explicit(plan, mask) != 0
        take(k_blk[...], v_blk[...], visible)


def upright(rows):
    """The row fields as columns: row(i) is [R, 1]."""
    columns = jnp.transpose(rows[...])
    return lambda i: columns[:, i : i + 1]


def explicit(plan, mask):
    """The mask [tokens, keys] of a tile for all heads of its kv head: int32 [R, keys]."""
    return jnp.concatenate([mask[...].astype(jnp.int32)] * plan.G, axis=0)
