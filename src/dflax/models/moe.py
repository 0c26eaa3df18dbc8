"""Mixture of experts without token dropping: a token's result never depends on its batch."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dflax.config import MoEConfig
from dflax.models.layers import INIT_STD, Linear, matmul


class Experts(nnx.Module):
    """Stacked SwiGLU experts, [experts, out, in]."""

    def __init__(self, size: int, config: MoEConfig, *, rngs: nnx.Rngs):
        def stacked(*shape: int) -> Weight:
            return Weight(jax.random.normal(rngs.params(), (config.num_experts, *shape)) * INIT_STD)

        self.gate_proj = stacked(config.intermediate_size, size)
        self.up_proj = stacked(config.intermediate_size, size)
        self.down_proj = stacked(size, config.intermediate_size)

    def __call__(self, x: Float[Array, "R E"], group_sizes: Array) -> Float[Array, "R E"]:
        """x rows sorted by expert; group_sizes [experts] int32."""

        def ragged(x, w):
            w = jnp.swapaxes(w, 1, 2)
            return jax.lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32).astype(x.dtype)

        gate, up = ragged(x, self.gate_proj.weight[...]), ragged(x, self.up_proj.weight[...])
        return ragged(jax.nn.silu(gate) * up, self.down_proj.weight[...])


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
        k = self.config.experts_per_token
        router = jax.nn.softmax(matmul(flat, self.gate.weight[...]), axis=-1)
        if self.config.expert_bias:
            chosen = jax.lax.top_k(router + self.expert_bias[...].astype(jnp.float32), k)[1]
            weights = jnp.take_along_axis(router, chosen, axis=1)
        else:
            weights, chosen = jax.lax.top_k(router, k)
        if self.config.norm_topk_prob:
            weights /= weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        group_sizes = jnp.bincount(chosen.reshape(-1), length=self.config.num_experts).astype(jnp.int32)
        out = self.experts(flat[order // k], group_sizes)
        out = jnp.zeros_like(out).at[order].set(out).reshape(*chosen.shape, -1)
        return jnp.einsum("rk,rke->re", weights, out.astype(jnp.float32)).astype(x.dtype).reshape(x.shape)
