"""The attention kernels through the real compilers of TPU v5e, v5p, v6e and an H100, and what they cost inside a loop."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dflax.cache import KVCache
from dflax.kernels_pallas.block_attention import block_attention
from dflax.sharding import make_mesh
from tests.kernels_pallas.calls import CALLS, Call, traced

pytestmark = pytest.mark.aot

KERNEL = {"tpu": 'custom_call_target="tpu_custom_call"', "cuda": 'custom_call_target="__gpu$xla.gpu.triton"'}


def compiled(topology, call: Call, mesh: str = ""):
    mesh_ = make_mesh(mesh, topology.devices if mesh else topology.devices[:1])
    place = lambda axes: NamedSharding(mesh_, P(*axes))
    return traced(call, place).lower().compile()


@pytest.mark.parametrize("name", CALLS)
def test_compiles(topology, name):
    """With the kernels in it, and nothing in memory that grows with queries x context."""
    call = CALLS[name]
    program = compiled(topology, call)
    assert program.as_text().count(KERNEL[topology.chip.platform]) == call.kernels
    width = 4 * (call.D + 128 // max(call.S, 1) + 64)  # float32, and what is kept of a row beside
    queries = call.B * call.N * call.T * call.Hq * width
    masks = 4 * call.B * call.N * call.T**2 if call.mask == "array" else 0
    limit = (6 if call.gradient else 4) * queries + masks + 16 * 2**20
    if (
        topology.chip.platform == "tpu" and call.D < 128
    ):  # XLA keeps arguments of narrow heads columns last, and turns them once a call
        limit += 2 * call.L * call.B * call.Hkv * call.S * 128 * call.dtype(0).itemsize
    assert program.memory_analysis().temp_size_in_bytes < limit


@pytest.mark.parametrize("gradient", [False, True])
def test_a_mesh_needs_no_messages(topology, gradient):
    program = compiled(topology, Call(16, "causal", B=4, gradient=gradient), "data=2,tensor=2")
    text = program.as_text()
    assert text.count(KERNEL[topology.chip.platform]) == (4 if gradient else 1)
    assert not re.search(r"all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter", text)


L, B, HKV, HQ, S, D, T = 4, 4, 8, 32, 4096, 128, 16


def rounds(cache: KVCache, x: jax.Array, n: jax.Array) -> KVCache:
    """A loop as decoding has it: every layer reads its part of the stacked cache, then rows are committed."""

    def body(state):
        i, cache, x = state
        blocks = []
        for layer in range(L):
            q = x.reshape(B, 1, T, HQ, D)
            k = v = q[:, :, :, :HKV]
            position = cache.length[:, None, None] + jnp.arange(T, dtype=jnp.int32)
            x = block_attention(
                q,
                cache.k,
                cache.v,
                k,
                v,
                layer=layer,
                ctx_len=cache.length[:, None],
                q_pos=position,
                mask="causal",
                scale=0.1,
            ).reshape(x.shape)
            blocks.append(k[:, 0])
        new = jnp.stack(blocks)
        path = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        return i + 1, cache.commit(new, new, path, jnp.full((B,), 3, jnp.int32)), x

    return jax.lax.while_loop(lambda state: state[0] < n, body, (jnp.int32(0), cache, x))[1:]


def test_a_loop_copies_no_layer_of_its_cache(topology):
    place = NamedSharding(make_mesh("", topology.devices[:1]), P())
    shape = partial(jax.ShapeDtypeStruct, sharding=place)
    stack = shape((L, B, HKV, S, D), jnp.bfloat16)
    cache = KVCache(stack, stack, shape((B,), jnp.int32))
    program = (
        jax.jit(rounds, donate_argnums=0)
        .lower(cache, shape((B, T, HQ * D), jnp.bfloat16), shape((), jnp.int32))
        .compile()
    )
    layer = B * HKV * S * D * 2
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * L * layer
    assert memory.temp_size_in_bytes < layer // 2
    text = program.as_text()
    assert text.count(KERNEL[topology.chip.platform]) == L
    # Results of a layer's size: operators that move it, in or out of a fusion. Only the commit's own in-place updates have the cache's.
    moved = re.findall(r"= bf16\[(?:1,)?4,8,4096,128\]\S* (\S+?)\(", text)
    assert not set(moved) - {"parameter", "bitcast", "get-tuple-element"}, set(moved)
    assert not re.search(r"= bf16\[4,4,8,4096,128\]\S* (copy|dynamic-slice|transpose|convert)\(", text)
