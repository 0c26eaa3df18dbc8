"""Every implementation of `block_attention` against its definition, over shapes, lengths and masks of all kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflax.kernels_pallas.block_attention import NO_WINDOW, block_attention, cpu, reference

L, B, T, Hq, Hkv, D, S = 2, 3, 4, 4, 2, 8, 300  # three tiles of the CPU's, the last overlapping the one before it


def arrays(seed: int = 0, n: int = 1):
    draw = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    context = normal(L, B, Hkv, S, D), normal(L, B, Hkv, S, D)
    return normal(B, n, T, Hq, D), *context, normal(B, n, T, Hkv, D), normal(B, n, T, Hkv, D)


RUN = {
    (backend, mask, cap): jax.jit(
        lambda arrays, layer, start, length, pos, hole, blk_len, window, array_mask, backend=backend, mask=mask, cap=cap: (
            backend.attend(
                *arrays,
                layer,
                start,
                length,
                pos,
                array_mask if mask == "array" else mask,
                hole,
                blk_len,
                window,
                D**-0.5,
                cap,
            )
        )
    )
    for backend in (cpu, reference)
    for mask in ("full", "causal", "array")
    for cap in (None, 3.0)
}


@pytest.mark.parametrize("mask", ["full", "causal", "array"])
@pytest.mark.parametrize("cap", [None, 3.0])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_cpu_reads_in_tiles_what_the_definition_reads_whole(mask, cap, data):
    column = st.integers(0, S)
    rows = lambda strategy: jnp.asarray(data.draw(st.lists(strategy, min_size=B, max_size=B)), jnp.int32)[:, None]
    length, start = rows(column), rows(column)
    low = rows(column)
    hole = jnp.stack([low, low + rows(st.integers(0, 40))], axis=-1)
    position = length[..., None] + jnp.arange(T, dtype=jnp.int32)
    window = data.draw(st.sampled_from([1, 3, 130, NO_WINDOW]))
    array_mask = jnp.asarray(np.random.default_rng(data.draw(st.integers(0, 99))).random((B, 1, T, T)) < 0.5)
    given_ = (
        arrays(),
        data.draw(st.integers(0, L - 1)),
        start,
        length,
        position,
        hole,
        rows(st.integers(0, T)),
        window,
    )
    got, expected = (RUN[backend, mask, cap](*given_, array_mask) for backend in (cpu, reference))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_dead_columns_are_not_read(monkeypatch):
    monkeypatch.setattr(cpu, "WHOLE", 0)
    q, k, v, k_blk, v_blk = arrays()
    length = jnp.asarray([[0], [5], [128]], jnp.int32)
    tile = -(-length // cpu.TILE) * cpu.TILE
    dead = (jnp.arange(S) >= tile)[None, :, None, :, None]
    poisoned = tuple(jnp.where(dead, jnp.nan, c) for c in (k, v))
    position = length[..., None] + jnp.arange(T, dtype=jnp.int32)
    run = jax.jit(
        lambda k, v: block_attention(
            q, k, v, k_blk, v_blk, layer=1, ctx_len=length, q_pos=position, mask="causal", scale=D**-0.5
        )
    )
    np.testing.assert_array_equal(run(*poisoned), run(k, v))


@pytest.mark.parametrize("n", [1, 2])
def test_gradients(n, monkeypatch):
    monkeypatch.setattr(cpu, "WHOLE", 0)
    given_, length = arrays(n=n), jnp.asarray([[7], [0], [299]], jnp.int32) * jnp.ones((1, n), jnp.int32)
    position = length[..., None] + jnp.arange(T, dtype=jnp.int32)
    more = {"ctx_start": jnp.minimum(length, 2), "q_pos": position, "blk_len": jnp.full_like(length, T)}

    def of_public(given_):
        out = block_attention(
            *given_, layer=1, ctx_len=length, mask="causal", window=5, scale=D**-0.5, soft_cap=3.0,
            **more,
        )  # fmt: skip
        return jnp.sum(jnp.sin(out))

    def of_definition(given_):
        out = reference.attend(
            *given_, 1, more["ctx_start"], length, position, "causal", None, more["blk_len"], 5, D**-0.5, 3.0
        )
        return jnp.sum(jnp.sin(out))

    for got, expected in zip(
        jax.jit(jax.grad(of_public))(given_), jax.jit(jax.grad(of_definition))(given_), strict=True
    ):
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("whole", [0, cpu.WHOLE])
def test_a_query_that_sees_nothing_gives_zero_and_passes_no_gradient(whole, monkeypatch):
    monkeypatch.setattr(cpu, "WHOLE", whole)
    given_ = arrays()
    nothing = jnp.zeros((B, 1), jnp.int32)
    position = jnp.zeros((B, 1, T), jnp.int32)

    @jax.jit
    def run(given_):
        return block_attention(
            *given_, layer=0, ctx_len=nothing, q_pos=position, mask="full", blk_len=nothing, scale=1.0
        )

    np.testing.assert_array_equal(run(given_), np.zeros((B, 1, T, Hq, D), np.float32))
    for gradient in jax.grad(lambda given_: jnp.sum(run(given_)))(given_):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))
