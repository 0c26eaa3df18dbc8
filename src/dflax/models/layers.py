"""The parts that every decoder layer is made of. Weights are in Hugging Face layout, [out, in]."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dflax.config import RopeConfig
from dflax.models.vocabulary import lookup

INIT_STD = 0.02
SINGLE_ROW_PADDING = 1


class Linear(nnx.Module):
    """y = x W^T (+ b), accumulated in float32 and returned in x's dtype."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False, std: float = INIT_STD, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (out_size, in_size)) * std)
        if bias:
            self.bias = nnx.Param(jnp.zeros((out_size,)))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = matmul(x, self.weight[...])
        if hasattr(self, "bias"):
            y += self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def matmul(x: Float[Array, "... I"], w: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """x W^T with a float32 result: on every backend the fast and the accurate way to multiply bfloat16.

    A single bfloat16 row misses XLA's fast path on a CPU (8 times slower, measured), so it goes in as one of two.
    """
    rows = x.reshape(-1, x.shape[-1])
    single = rows.shape[0] == 1 and x.dtype == jnp.bfloat16
    if single:
        rows = jnp.pad(rows, ((0, SINGLE_ROW_PADDING), (0, 0)))
    y = jax.lax.dot_general(rows, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (y[:1] if single else y).reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight in float32, back to x's dtype."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Embedding(nnx.Module):
    """A table of token vectors; as an output head its rows score the vocabulary."""

    def __init__(self, vocab_size: int, size: int, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, size)) * INIT_STD)

    def __call__(self, tokens: Int[Array, "..."]) -> Float[Array, "... E"]:
        return lookup(self.weight[...], tokens)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, hidden: int, *, bias: bool = False, rngs: nnx.Rngs):
        self.gate_proj = Linear(size, hidden, bias=bias, rngs=rngs)
        self.up_proj = Linear(size, hidden, bias=bias, rngs=rngs)
        self.down_proj = Linear(hidden, size, bias=bias, rngs=rngs)

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nnx.Module):
    """Projections of grouped-query attention, with optional per-head RMSNorm of queries and keys (Qwen3). The mixing itself is
    `block_attention`, called by the decoder layer."""

    def __init__(
        self, size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, qkv_bias: bool, out_bias: bool, qk_norm: bool,
        eps: float, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.q_proj = Linear(size, num_heads * head_dim, bias=qkv_bias, rngs=rngs)
        self.k_proj = Linear(size, num_kv_heads * head_dim, bias=qkv_bias, rngs=rngs)
        self.v_proj = Linear(size, num_kv_heads * head_dim, bias=qkv_bias, rngs=rngs)
        self.o_proj = Linear(num_heads * head_dim, size, bias=out_bias, rngs=rngs)
        if qk_norm:
            self.q_norm = RMSNorm(head_dim, eps)
            self.k_norm = RMSNorm(head_dim, eps)
        self.head_dim = head_dim

    def queries(self, x: Float[Array, "... E"], rope: tuple[Array, Array]) -> Float[Array, "... Hq D"]:
        """Queries after norm and RoPE."""
        q = self._heads(self.q_proj(x))
        return rotate(self.q_norm(q) if hasattr(self, "q_norm") else q, rope)

    def keys_values(
        self, x: Float[Array, "... E"], rope: tuple[Array, Array]
    ) -> tuple[Float[Array, "... Hkv D"], Float[Array, "... Hkv D"]]:
        """Keys after norm and RoPE, and values."""
        k = self._heads(self.k_proj(x))
        return rotate(self.k_norm(k) if hasattr(self, "k_norm") else k, rope), self._heads(self.v_proj(x))

    def output(self, x: Float[Array, "... Hq D"]) -> Float[Array, "... E"]:
        return self.o_proj(x.reshape(*x.shape[:-2], -1))

    def _heads(self, x: Float[Array, "... HD"]) -> Float[Array, "... H D"]:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


def run_layer(
    layer: Callable[..., tuple[Array, Array, Array]], x: Array, rope: tuple[Array, Array], attend: Callable[..., Array],
    remat: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """layer(x, rope, attend); remat: what it computes inside is not kept for the gradient but computed again."""
    call = lambda x, rope: layer(x, rope, attend)
    return (jax.checkpoint(call) if remat else call)(x, rope)


def rope_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angles per position, float32 [D / 2]; "llama3" keeps high frequencies, divides low ones, and blends between (Llama 3.1)."""
    inverse = config.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.scaling == "linear":
        inverse = inverse / config.factor
    elif config.scaling == "llama3":
        wavelength = 2 * np.pi / inverse
        turns = config.original_max_positions / wavelength
        smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        inverse = (1 - smooth) * inverse / config.factor + smooth * inverse
    return inverse.astype(np.float32)


def rope_table(config: RopeConfig, head_dim: int, positions: Int[Array, "..."]) -> tuple[Array, Array]:
    """(cos, sin) in float32, [..., 1, D / 2], for absolute positions."""
    angle = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config, head_dim)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "... H D"], rope: tuple[Array, Array]) -> Float[Array, "... H D"]:
    """Half-split rotary embedding, in float32."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
