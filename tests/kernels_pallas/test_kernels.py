"""The Pallas kernels, interpreted on the CPU, against the definition: masks, lengths and shapes of all kinds."""

from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dflax.kernels_pallas.block_attention import tpu
from dflax.kernels_pallas.block_attention.sizes import Sizes
from dflax.kernels_pallas.block_attention.walk import FAR
from tests.kernels_pallas.problems import Shape, arrays, by_definition, where

FORWARD = {
    "tpu": partial(tpu.forward, interpret=True),
    "tpu, simulated": partial(tpu.forward, interpret=pltpu.InterpretParams()),  # memory that nobody wrote is NaN
}

SHAPES = {
    "one token": Shape(T=1, G=4, cut=Sizes(16, 64, 16)),
    "ragged end of the cache": Shape(T=10, G=3, D=48, S=200, hole=True, soft_cap=3.0, cut=Sizes(64, 64, 16)),
    "cut blocks": Shape(T=100, G=1, Hkv=1, kind="causal", cut=Sizes(32, 128, 32)),
    "tree": Shape(T=40, G=2, kind="array", soft_cap=3.0, hole=True, cut=Sizes(32, 128, 16)),
    "anchors": Shape(N=5, T=7, G=2, kind="causal", cut=Sizes(64, 64, 32)),
    "anchors under explicit masks": Shape(N=3, T=4, G=2, Hkv=1, kind="array", S=64, cut=Sizes(16, 32, 16)),
    "no context": Shape(T=33, G=2, Hkv=1, S=0, cut=Sizes(32, 128, 16)),
}
SIMULATED = {
    "anchors": Shape(B=1, N=3, T=7, G=2, Hkv=1, S=100, cut=Sizes(32, 64, 32)),
    "tree": Shape(B=1, T=20, G=2, Hkv=1, S=100, kind="array", hole=True, cut=Sizes(32, 64, 16)),
}


@cache
def definition(shape: Shape):
    return jax.jit(partial(by_definition, shape))


def check(shape: Shape, backend: str, seed: int, window: int, length: int | None = None):
    draw = np.random.default_rng(seed)
    given_, mask = arrays(shape, draw), where(shape, draw, length, window)
    out, lse = FORWARD[backend](*given_, mask, case=shape.case, cut=shape.cut)
    expected = definition(shape)(given_, mask)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=3e-6)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", ["tpu"])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 999), window=st.sampled_from([1, 6, 70, FAR]))
def test_forward(backend, name, seed, window):
    check(SHAPES[name], backend, seed, window)


@pytest.mark.parametrize("name", SIMULATED)
def test_forward_in_simulated_memory(name):
    check(SIMULATED[name], "tpu, simulated", 3, 70)
