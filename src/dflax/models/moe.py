"""Mixture of experts without token dropping: a token's result never depends on its batch."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflax.config import MoEConfig
from dflax.models.layers import INIT_STD, Linear, matmul
from dflax.sharding import each_device


class Experts(nnx.Module):
    """Stacked SwiGLU experts, [experts, out, in]."""

    def __init__(self, size: int, config: MoEConfig, *, rngs: nnx.Rngs):
        def stacked(*shape: int) -> Weight:
            return Weight(jax.random.normal(rngs.params(), (config.num_experts, *shape)) * INIT_STD)

        self.gate_proj = stacked(config.intermediate_size, size)
        self.up_proj = stacked(config.intermediate_size, size)
        self.down_proj = stacked(size, config.intermediate_size)

    def __call__(
        self, x: Float[Array, "R E"], router: Float[Array, "R X"], bias: Float[Array, " X"] | None, config: MoEConfig
    ) -> Float[Array, "R E"]:
        """float32: for every row the sum of what its chosen experts give, by weight. On a mesh each device sorts its own rows and runs its
        own experts on them; what the devices of a row give is added."""
        stacks = [module.weight[...] for module in (self.gate_proj, self.up_proj, self.down_proj)]
        ids = jnp.arange(config.num_experts, dtype=jnp.int32)
        rows, experts = ("batch", None), ("expert", None, None)
        parts = each_device(
            partial(_of_experts, config), (x, router, bias, ids, *stacks),
            (rows, rows, None if bias is None else (None,), ("expert",), *[experts] * 3),
            ("expert", "batch", None), {"batch": len(x), "expert": len(ids)},
        )  # fmt: skip
        return parts.sum(0)


def _of_experts(
    config: MoEConfig, x: Float[Array, "R E"], router: Float[Array, "R all"], bias: Float[Array, " all"] | None, ids: Int[Array, " X"],
    gate_proj: Float[Array, "X F E"], up_proj: Float[Array, "X F E"], down_proj: Float[Array, "X E F"],
) -> Float[Array, "1 R E"]:  # fmt: skip
    """The part of the result that these experts give; ids: their numbers, without gaps."""
    k, experts = config.experts_per_token, len(ids)
    chosen = jax.lax.top_k(router if bias is None else router + bias, k)[1]
    weights = jnp.take_along_axis(router, chosen, axis=1)
    if config.norm_topk_prob:
        weights /= weights.sum(-1, keepdims=True)
    place = (chosen - ids[0]).reshape(-1)
    place = jnp.where((place >= 0) & (place < experts), place, experts)  # those of other devices come last
    order = jnp.argsort(place, stable=True)
    group_sizes = jnp.bincount(place, length=experts + 1)[:experts].astype(jnp.int32)
    ours = (place[order] < experts)[:, None]

    def ragged(x: Array, w: Array) -> Array:
        w = jnp.swapaxes(w, 1, 2)
        return jax.lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32).astype(x.dtype)

    rows = jnp.where(ours, x[order // k], 0)  # as below: what lies behind the last group is undefined, its gradient too
    out = ragged(jax.nn.silu(ragged(rows, gate_proj)) * ragged(rows, up_proj), down_proj)
    out = jnp.where(ours, out, 0).astype(jnp.float32)
    out = jnp.zeros_like(out).at[order].set(out).reshape(*chosen.shape, -1)
    return jnp.einsum("rk,rke->re", weights, out)[None]


class Weight(nnx.Module):
    """A bare parameter under the name `weight`, so that module paths match checkpoint names."""

    def __init__(self, value: Array):
        self.weight = nnx.Param(value)


class MoE(nnx.Module):
    """Top-k routing (Qwen3-MoE): softmax over all experts in float32, the k best kept and, if asked, renormalised to sum 1."""

    def __init__(self, size: int, config: MoEConfig, *, rngs: nnx.Rngs):
        self.gate = Linear(size, config.num_experts, rngs=rngs)
        self.experts = Experts(size, config, rngs=rngs)
        if config.expert_bias:
            self.expert_bias = nnx.Param(jnp.zeros((config.num_experts,)))
        self.config = config

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        flat = x.reshape(-1, x.shape[-1])
        router = jax.nn.softmax(matmul(flat, self.gate.weight[...]), axis=-1)
        bias = self.expert_bias[...].astype(jnp.float32) if self.config.expert_bias else None
        return self.experts(flat, router, bias, self.config).astype(x.dtype).reshape(x.shape)
