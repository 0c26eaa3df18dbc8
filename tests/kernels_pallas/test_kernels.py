"""The Pallas kernels, interpreted on the CPU, against the definition: masks, lengths and shapes of all kinds."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dflax.kernels_pallas.block_attention import gpu, gpu_backward, tpu, tpu_backward
from dflax.kernels_pallas.block_attention.sizes import Sizes
from dflax.kernels_pallas.block_attention.walk import FAR
from tests.kernels_pallas.problems import Shape, arrays, by_definition, where

SIMULATOR = pltpu.InterpretParams()  # memory that nobody wrote is NaN
FORWARD = {
    "tpu": partial(tpu.forward, interpret=True),
    "tpu, simulated": partial(tpu.forward, interpret=SIMULATOR),
    "gpu": partial(gpu.forward, interpret=True),
    "gpu, split": partial(gpu.forward, interpret=True, splits=3),
}
BACKWARD = {
    "tpu": partial(tpu_backward.backward, interpret=True),
    "tpu, simulated": partial(tpu_backward.backward, interpret=SIMULATOR),
    "gpu": partial(gpu_backward.backward, interpret=True),
}
INTERPRETED = ["tpu", "gpu"]

SHAPES = {
    "one token": Shape(T=1, G=4, cut=Sizes(16, 64, 16)),
    "ragged end of the cache": Shape(T=10, G=3, D=48, S=200, hole=True, soft_cap=3.0, cut=Sizes(64, 64, 16)),
    "cut blocks": Shape(T=100, G=1, Hkv=1, kind="causal", cut=Sizes(32, 128, 32)),
    "tree": Shape(T=40, G=2, kind="array", soft_cap=3.0, hole=True, cut=Sizes(32, 128, 16)),
    "no context": Shape(T=33, G=2, Hkv=1, S=0, cut=Sizes(32, 128, 16)),
}
GRADIENTS = {
    "anchors": Shape(N=5, T=5, G=2, D=48, S=100, soft_cap=2.0, kind="causal", cut=Sizes(32, 32, 16)),
    "cut blocks": Shape(T=40, G=3, Hkv=1, S=64, hole=True, cut=Sizes(64, 32, 16)),
    "explicit masks": Shape(N=2, T=20, G=2, Hkv=1, S=64, kind="array", cut=Sizes(32, 32, 16)),
    # tiles as the table has them
    "heads of 128": Shape(B=1, N=2, T=16, G=2, Hkv=1, D=128, S=1100, kind="causal", cut=None),
    "heads of 256": Shape(B=1, N=3, T=9, G=3, Hkv=1, D=256, S=300, hole=True, soft_cap=3.0, cut=None),
    "a tree of 512": Shape(B=1, T=512, G=2, Hkv=1, D=64, S=700, kind="array", hole=True, cut=None),
}
SMALL = Shape(
    B=1, N=3, T=6, G=2, Hkv=1, S=40, kind="array", cut=Sizes(32, 32, 16)
)  # the simulator is slow, and so is bfloat16


@cache
def definition(shape: Shape):
    return jax.jit(partial(by_definition, shape))


@cache
def gradient_of_definition(shape: Shape):
    return jax.jit(
        lambda given, where, upstream: jax.vjp(partial(by_definition, shape, where=where), given)[1](upstream)[0]
    )


def check_forward(shape: Shape, backend: str, seed: int, window: int):
    draw = np.random.default_rng(seed)
    given_, mask = arrays(shape, draw), where(shape, draw, window=window)
    out, lse = FORWARD[backend](*given_, mask, case=shape.case, cut=shape.cut)
    np.testing.assert_allclose(out, definition(shape)(given_, mask), rtol=2e-5, atol=3e-6)
    assert np.isfinite(lse).all()


def check_gradients(shape: Shape, backend: str, seed: int, window: int):
    draw = np.random.default_rng(seed)
    given_, mask = arrays(shape, draw), where(shape, draw, window=window)
    upstream = jnp.asarray(draw.standard_normal(given_[0].shape), jnp.float32)
    saved = FORWARD[backend](*given_, mask, case=shape.case, cut=shape.cut)
    np.testing.assert_allclose(saved[0], definition(shape)(given_, mask), rtol=2e-5, atol=3e-6)
    got = BACKWARD[backend](*given_, mask, *saved, upstream, case=shape.case, cut=shape.cut)
    expected = gradient_of_definition(shape)(given_, mask, upstream)
    for name, mine, whole in zip(("q", "k_ctx", "v_ctx", "k_blk", "v_blk"), got, expected, strict=True):
        if name.endswith("ctx"):  # the definition's is of the whole stack
            np.testing.assert_array_equal(np.delete(whole, int(mask.layer), axis=0), 0.0)
            whole = whole[mask.layer]
        np.testing.assert_allclose(mine, whole, rtol=2e-5, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", INTERPRETED)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 999), window=st.sampled_from([1, 6, 70, FAR]))
def test_forward(backend, name, seed, window):
    check_forward(SHAPES[name], backend, seed, window)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("backend", INTERPRETED)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 999), window=st.sampled_from([1, 6, 70, FAR]))
def test_gradients(backend, name, seed, window):
    check_gradients(GRADIENTS[name], backend, seed, window)


@pytest.mark.parametrize("name", ["one token", "ragged end of the cache"])
@pytest.mark.parametrize("window", [9, 150])  # of most rows whole splits lie before the shorter one
def test_split_context(name, window):
    check_forward(SHAPES[name], "gpu, split", 5, window)


@pytest.mark.parametrize(
    "kind", ["array", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("causal", "full"))]
)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 999), window=st.sampled_from([30, 6, FAR]))
def test_simulated_memory(kind, seed, window):
    check_gradients(replace(SMALL, kind=kind, hole=kind != "causal"), "tpu, simulated", seed, window)


@pytest.mark.parametrize("backend", INTERPRETED)
def test_a_query_that_sees_nothing_gives_zero_and_passes_no_gradient(backend):
    shape = GRADIENTS["anchors"]
    draw = np.random.default_rng(0)
    given_, mask = arrays(shape, draw), where(shape, draw, length=0)
    mask = mask._replace(blk_len=jnp.zeros_like(mask.blk_len))
    saved = FORWARD[backend](*given_, mask, case=shape.case, cut=shape.cut)
    np.testing.assert_array_equal(saved[0], np.zeros_like(saved[0]))
    for gradient in BACKWARD[backend](*given_, mask, *saved, given_[0], case=shape.case, cut=shape.cut):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("backend", INTERPRETED)
def test_bfloat16(backend):
    """Logits and sums in float32: no further from the exact result than the definition in bfloat16, gradients neither."""
    shape = SMALL
    draw = np.random.default_rng(1)
    given_, mask = arrays(shape, draw, jnp.bfloat16), where(shape, draw)
    upstream = jnp.asarray(draw.standard_normal(given_[0].shape), jnp.bfloat16)
    of_layer = lambda q, k_ctx, v_ctx, k_blk, v_blk: (q, k_ctx[mask.layer], v_ctx[mask.layer], k_blk, v_blk)
    by_definition = lambda *given_: (
        definition(shape)(given_[0], mask),
        *of_layer(*gradient_of_definition(shape)(given_[0], mask, given_[1])),
    )
    exact = by_definition(*jax.tree.map(lambda x: x.astype(jnp.float32), (given_, upstream)))
    saved = FORWARD[backend](*given_, mask, case=shape.case, cut=shape.cut)
    got = saved[0], *BACKWARD[backend](*given_, mask, *saved, upstream, case=shape.case, cut=shape.cut)
    size = lambda x: float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))
    for name, mine, plain, want in zip(
        ("out", "q", "k_ctx", "v_ctx", "k_blk", "v_blk"), got, by_definition(given_, upstream), exact, strict=True
    ):
        assert mine.dtype == jnp.bfloat16
        assert size(mine - want) < 1.2 * size(plain - want), name
        assert size(mine - want) < 2**-8 * size(want), name  # the definition's gradients of q and keys are further off


def check_drawn(backend, data):
    pick = lambda *values: data.draw(st.sampled_from(values))
    small = "simulated" in backend
    shape = Shape(
        B=pick(1, 3), N=pick(4, 1), T=data.draw(st.integers(1, 12 if small else 100)), G=pick(2, 1, 3, 4), Hkv=pick(1, 2),
        D=pick(32, 48, 64, 96, 128, 256), S=pick(100, 0, 64, *([] if small else [300])), kind=pick("full", "causal", "array"),
        soft_cap=pick(None, 2.0), hole=pick(True, False),
        cut=pick(Sizes(32, 64, 16), Sizes(64, 128, 32), Sizes(128, 32, 64), None),
    )  # fmt: skip
    seed, window = data.draw(st.integers(0, 999)), pick(1, 5, 50, FAR)
    if backend in BACKWARD:
        check_gradients(shape, backend, seed, window)
    else:
        check_forward(shape, backend, seed, window)


# What fails is shown as drawn: every smaller problem would be a program to compile.
@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_a_few_drawn_shapes(data):
    check_drawn(data.draw(st.sampled_from(["gpu", "tpu", "tpu, simulated", "gpu, split"])), data)


@pytest.mark.slow
@pytest.mark.parametrize("backend", FORWARD)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_drawn_shapes(backend, data):
    check_drawn(backend, data)
