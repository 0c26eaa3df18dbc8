"""Every caller of the op, in shapes of life: for tests that lower and compile without running."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from dflax.kernels_pallas.block_attention import block_attention


@dataclass(frozen=True)
class Call:
    """One call of the op: static shapes and which arguments are given."""

    T: int
    mask: Literal["full", "causal", "array"] = "full"
    B: int = 2
    N: int = 1
    S: int = 4096
    L: int = 2
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    hole: bool = False
    gradient: bool = False
    soft_cap: float | None = None
    dtype: jnp.dtype = jnp.bfloat16

    @property
    def kernels(self) -> int:
        """Forward; for gradients also dq, and dk with dv of the block and, if there is one, of the context."""
        return (3 + (self.S > 0)) if self.gradient else 1


CALLS = {
    "drafter": Call(16),
    "drafter, head_dim 64, float32": Call(10, Hq=9, Hkv=3, D=64, dtype=jnp.float32),
    "verify a chain": Call(16, "causal"),
    "verify a tree": Call(512, "array"),
    "prefill": Call(1000, "causal", B=1),
    "plain decoding": Call(1, "causal", D=256, Hkv=2),
    "diffusion, full pass, trained": Call(600, B=1, Hkv=32, S=0, gradient=True),
    "diffusion, dual cache": Call(33, hole=True, S=1000),
    "diffusion, prefix cache": Call(160, D=96, S=1000),
    "a block under a soft cap": Call(16, "causal", soft_cap=30.0),
    "a block of wide heads": Call(16, "causal", D=256, Hkv=2),
    "SmolLM2's drafter, trained": Call(4, N=128, S=512, L=1, Hq=9, Hkv=3, D=64, gradient=True, dtype=jnp.float32),
    "drafter of wide heads, trained in float32": Call(
        8, N=16, S=512, L=1, Hkv=2, D=256, gradient=True, dtype=jnp.float32
    ),
    "drafter, trained": Call(16, N=512, S=3072, L=1, gradient=True),
    "causal drafter, trained under masks": Call(24, "array", N=4, S=200, L=1, gradient=True),
}


def arguments(call: Call, place):
    ints, array = jnp.int32, lambda axes, shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place(axes))
    B, N, T, row = call.B, call.N, call.T, ("data", None, None)
    block = lambda heads: array((*row, "tensor", None), (B, N, T, heads, call.D), call.dtype)
    cache = array((None, "data", "tensor", None, None), (call.L, B, call.Hkv, call.S, call.D), call.dtype)
    named = {
        "ctx_len": array(row[:2], (B, N), ints),
        "q_pos": array(row, (B, N, T), ints),
        "blk_len": array(row[:2], (B, N), ints),
    }
    if call.hole:
        named["hole"] = array(row, (B, N, 2), ints)
    if call.mask == "array":
        named["mask"] = array((*row, None), (B, N, T, T), jnp.bool_)
    return (block(call.Hq), cache, cache, block(call.Hkv), block(call.Hkv)), named


def traced(call: Call, place=lambda axes: None):
    arrays, named = arguments(call, place)
    fixed = {} if call.mask == "array" else {"mask": call.mask}
    attend = lambda arrays, named: block_attention(
        *arrays, layer=call.L - 1, scale=call.D**-0.5, window=700, soft_cap=call.soft_cap, **named, **fixed
    )
    if call.gradient:
        function = jax.grad(lambda arrays, named: attend(arrays, named).astype(jnp.float32).sum())
    else:
        function = attend
    return jax.jit(function).trace(arrays, named)
