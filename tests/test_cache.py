"""The two ways to write a cache, against what they say in words."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflax.cache import KVCache

L, B, T, HKV, D = 2, 3, 4, 2, 3


@partial(jax.jit, static_argnames="layer")
def put(cache: KVCache, x, path, n, layer):
    if layer is None:
        return cache.commit(x, -x, path, n)
    return cache.write(layer, x[0], -x[0], n)


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("capacity", [9, 3])  # the second shorter than a block
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_arrive_in_order_and_never_past_the_end(layer, capacity, data):
    ints = lambda high, *shape: np.asarray(
        data.draw(st.lists(st.integers(0, high), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))), np.int32
    ).reshape(shape)
    length, n = ints(capacity, B), ints(T, B)
    path = ints(T - 1, B, T) if layer is None else np.tile(np.arange(T, dtype=np.int32), (B, 1))
    layers = range(L) if layer is None else [layer]
    draw = np.random.default_rng(0)
    x = draw.standard_normal((len(layers), B, T, HKV, D)).astype(np.float32)
    k = draw.standard_normal((L, B, HKV, capacity, D)).astype(np.float32)
    v = k + 1
    expected = k.copy(), v.copy()
    for i, of_layer in enumerate(layers):
        for b in range(B):
            for slot in range(n[b]):
                if length[b] + slot < capacity:
                    for kept, sign in zip(expected, (1, -1), strict=True):
                        kept[of_layer, b, :, length[b] + slot] = sign * x[i, b, path[b, slot]]
    got = put(KVCache(jnp.asarray(k), jnp.asarray(v), jnp.asarray(length)), x, path, n, layer)
    np.testing.assert_array_equal(got.k, expected[0])
    np.testing.assert_array_equal(got.v, expected[1])
    np.testing.assert_array_equal(got.length, length if layer is not None else np.minimum(length + n, capacity))
