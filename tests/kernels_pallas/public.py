"""One problem through the public function, by definition and by kernels. Also run by test_public.py in a process with four devices."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dflax.kernels_pallas.block_attention import block_attention
from dflax.sharding import make_mesh
from tests.kernels_pallas.interpreted import interpreted

L, B, N, T, Hq, Hkv, D, S = 3, 2, 3, 4, 4, 2, 8, 24
CUT = {  # q and the block; the context; what is known of rows
    "data=2,tensor=2": (P("data", None, None, "tensor"), P(None, "data", "tensor"), P("data")),
    "tensor=4": (P(), P(), P()),  # two kv heads: every device computes both
}


def check(platform, layer, mesh=""):
    """Output and all gradients; the kernels on the mesh. layer: an int is fixed in the program, an array is data of it."""
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    block, context = (B, N, T, Hkv, D), (L, B, Hkv, S, D)
    given = normal(B, N, T, Hq, D), normal(*context), normal(*context), normal(*block), normal(*block)
    length = jnp.asarray([[3, 9, 20], [0, S, 7]], jnp.int32)
    upstream = normal(*given[0].shape)

    def gradients(given, length, layer):
        position = length[..., None] + jnp.arange(T, dtype=jnp.int32)
        attend = lambda *given: block_attention(
            *given, layer=layer, ctx_len=length, q_pos=position, mask="causal", scale=D**-0.5, soft_cap=3.0, window=9
        )
        out, back = jax.vjp(attend, *given)
        return out, *back(upstream)

    def run(given, length):  # a new function, which nobody traced before
        if isinstance(layer, int):
            return jax.jit(lambda *given: gradients(*given, layer))(given, length)
        return jax.jit(lambda *given: gradients(*given))(given, length, layer)

    expected = run(given, length)
    if mesh:
        of_block, of_context, of_rows = CUT[mesh]
        devices = make_mesh(mesh, jax.devices()[:4])
        put = lambda x, spec: jax.device_put(x, NamedSharding(devices, spec))
        specs = (of_block, of_context, of_context, of_block, of_block)
        given, length = tuple(map(put, given, specs)), put(length, of_rows)
    with interpreted(platform) as traced:
        got = run(given, length)
    assert traced == [given[0].shape] * 2  # forward and backward
    for name, mine, whole in zip(("out", "q", "k_ctx", "v_ctx", "k_blk", "v_blk"), got, expected, strict=True):
        np.testing.assert_allclose(mine, whole, rtol=2e-5, atol=5e-6, err_msg=name)


if __name__ == "__main__":
    check(sys.argv[1], jnp.int32(1), sys.argv[2])
