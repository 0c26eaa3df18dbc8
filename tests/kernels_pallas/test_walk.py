"""What the kernels visit: no tile too few, none past what is live, and masks only where they are needed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflax.kernels_pallas.block_attention import gpu, reference, sizes, tpu
from dflax.kernels_pallas.block_attention.fold import fold, make_plan
from dflax.kernels_pallas.block_attention.sizes import Sizes
from dflax.kernels_pallas.block_attention.walk import FAR, Walk
from tests.kernels_pallas.problems import Shape, arrays, where

SHAPES = [
    Shape(T=10, G=3, S=200, hole=True, cut=Sizes(64, 32, 16)),
    Shape(T=100, G=1, Hkv=1, S=90, kind="causal", cut=Sizes(32, 32, 32)),
    Shape(N=5, T=7, S=128, hole=True, kind="causal", cut=Sizes(64, 32, 32)),
    Shape(N=3, T=6, S=40, kind="array", cut=Sizes(32, 32, 16)),
    Shape(T=40, S=0, kind="array", cut=Sizes(32, 32, 16)),
]


@partial(jax.jit, static_argnums=(0, 1))
def table(plan, case, mask, q, k_blk, v_blk):
    return fold(plan, case, mask, q, k_blk, v_blk).table


def walks(shape: Shape, mask, powers: bool):
    """The plan, and the walks of all query tiles at once, with an axis for key tiles."""
    q, k_ctx, _, k_blk, v_blk = arrays(shape, np.random.default_rng(0))
    plan = make_plan(q.shape, k_ctx.shape, shape.cut, powers=powers)
    found = np.asarray(table(plan, shape.case, mask, q, k_blk, v_blk))
    return plan, Walk(lambda i: found[..., i, None])


def tiled(visible, plan, width: int):
    """Booleans [B, N, T, keys] -> (any, all) of every tile, [B, tiles, key tiles]; padding speaks for neither."""

    def cut(fill):
        pad = lambda x, axis, size: np.pad(
            x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)], constant_values=fill
        )
        x = pad(np.asarray(visible), 1, plan.groups * plan.blocks)
        x = pad(x.reshape(x.shape[0], plan.groups, plan.span, -1), 2, plan.q_tiles * plan.tokens)
        x = pad(x, 3, -(-x.shape[3] // width) * width)
        return x.reshape(x.shape[0], plan.tiles, plan.tokens, -1, width)

    return cut(False).any((2, 4)), cut(True).all((2, 4))


@pytest.mark.parametrize("powers", [False, True], ids=["tpu", "gpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"N{shape.N}-T{shape.T}-S{shape.S}-{shape.kind}")
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 9999), window=st.sampled_from([1, 6, 70, FAR]))
def test_a_walk_meets_all_that_is_visible(shape, powers, seed, window):
    mask = where(shape, np.random.default_rng(seed), window=window)
    plan, walk = walks(shape, mask, powers)
    if shape.S:
        see = reference.visible_context(
            jnp.arange(shape.S), mask.ctx_start, mask.ctx_len, mask.q_pos, mask.hole, mask.window, shape.case.two_sided
        )
        some, every = tiled(see, plan, plan.columns)
        tile = np.arange(plan.c_tiles)
        meets, all_seen = walk.meets_context(tile), walk.sees_all_of_context(tile, plan.columns)
        assert not (some & ~meets).any()
        assert not (all_seen & ~every).any()
        assert (meets.sum(-1) == walk.context_steps[..., 0]).all()
        past = np.asarray(mask.ctx_len).max(-1)[:, None] <= tile * plan.columns
        before = np.asarray(mask.ctx_start).min(-1)[:, None] >= (tile + 1) * plan.columns
        assert not (meets & (past | before)[:, None]).any()

    explicit = mask.mask if shape.kind == "array" else shape.kind
    own = np.asarray(reference.visible_block(mask.q_pos, explicit, mask.blk_len, mask.window))
    see = np.zeros((*own.shape[:3], plan.blocks, shape.T), bool)
    for n in range(shape.N):
        see[:, n, :, n % plan.blocks] = own[:, n]
    some, every = tiled(see.reshape(*own.shape[:3], plan.span), plan, plan.keys)
    tile = np.arange(plan.k_tiles)
    meets, all_seen = walk.meets_block(tile), walk.sees_all_of_block(tile, plan.keys)
    assert not (some & ~meets).any()
    assert not (all_seen & ~every).any()


def test_a_large_allocation_costs_what_is_live():
    """32768 columns of which 1024 live: the steps of a cache of 1024, on both platforms and with the table's sizes."""
    for powers, cut in ((False, sizes.tpu(64)), (True, sizes.gpu(64, 256))):
        steps = []
        for capacity in (1024, 32768):
            shape = Shape(B=2, T=16, G=4, Hkv=1, D=16, S=capacity, L=1, kind="causal", cut=cut)
            mask = where(shape, np.random.default_rng(0), length=1024)
            mask = mask._replace(ctx_start=jnp.zeros_like(mask.ctx_start), blk_len=jnp.full_like(mask.blk_len, shape.T))
            plan, walk = walks(shape, mask, powers)
            steps.append(walk.context_steps)
        np.testing.assert_array_equal(steps[0], 1024 // plan.columns)
        np.testing.assert_array_equal(*steps)


def test_windows_and_holes_cost_nothing_inside():
    shape = Shape(B=1, T=16, G=4, Hkv=1, D=16, S=4096, L=1, hole=True, cut=sizes.gpu(64, 256))
    mask = where(shape, np.random.default_rng(0), length=4096)
    mask = mask._replace(ctx_start=jnp.zeros((1, 1), jnp.int32), hole=jnp.asarray([[[640, 3200]]], jnp.int32))
    assert walks(shape, mask, True)[1].context_steps.item() == (4096 - (3200 - 640)) // 64
    near = mask._replace(window=jnp.int32(128))
    assert walks(shape, near, True)[1].context_steps.item() == 2


@pytest.mark.parametrize("forward", [tpu.forward, gpu.forward], ids=["tpu", "gpu"])
def test_dead_tiles_are_not_read(forward):
    shape = Shape(B=3, T=5, G=2, S=256, L=2, hole=True, cut=Sizes(32, 64, 16))
    q, k, v, k_blk, v_blk = arrays(shape, np.random.default_rng(1))
    mask = where(shape, np.random.default_rng(2))
    mask = mask._replace(
        ctx_start=jnp.asarray([[70], [0], [0]], jnp.int32),
        ctx_len=jnp.asarray([[130], [60], [250]], jnp.int32),
        hole=jnp.asarray([[[0, 0]], [[0, 0]], [[64, 128]]], jnp.int32),
    )
    dead = np.zeros((3, 256), bool)
    dead[0, :64] = dead[0, 192:] = dead[1, 64:] = dead[2, 64:128] = True
    poisoned = (jnp.where(dead[None, :, None, :, None], jnp.nan, c) for c in (k, v))
    run = lambda k, v: forward(q, k, v, k_blk, v_blk, mask, case=shape.case, cut=shape.cut, interpret=True)[0]
    np.testing.assert_array_equal(run(*poisoned), run(k, v))


def test_tiles_of_the_table_divide_every_head_group():
    """Rows of a tile are whole tokens with all their heads; Triton's are powers of two."""
    for G in range(1, 17):
        for T, N in ((1, 1), (7, 1), (16, 512), (300, 1)):
            for powers in (False, True):
                cut = sizes.gpu(N * T * G, 256) if powers else sizes.tpu(N * T * G)
                plan = make_plan((1, N, T, G, 128), (1, 1, 1, 1000, 128), cut, powers=powers)
                assert plan.tokens * G <= plan.rows <= max(cut.rows, 8 * G, 16)
                assert plan.groups * plan.blocks >= N
                assert plan.q_tiles * plan.tokens >= plan.span
                if powers:
                    assert plan.rows & (plan.rows - 1) == 0
                else:
                    assert plan.tokens % 8 == 0
