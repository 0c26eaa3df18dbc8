"""The key/value cache: one stacked array for all layers, one cursor per row, two ways to add to it, and no third.

Where acceptance is known (prefill) every layer writes its rows as it goes: `write`. Where it is not (verify), the forward pass
writes nothing and the accepted rows are committed afterwards: `commit`. Nothing is ever cropped or rolled back: columns at or
past a row's cursor are stale and invisible. A write past the end is dropped; it never reaches good rows. (A canvas, which has
no cursor to keep, is replaced whole: `write_all`.)
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflax.config import DrafterConfig, ModelConfig
from dflax.sharding import each_device


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys after RoPE and values of every layer; row b is live in columns [0, length[b])."""

    k: Float[Any, "L B Hkv S D"]  # Any: jit describes its arguments by trees of other leaves than arrays
    v: Float[Any, "L B Hkv S D"]
    length: Int[Any, " B"]

    @classmethod
    def empty(
        cls, config: ModelConfig | DrafterConfig, batch: int, capacity: int, dtype: jax.typing.DTypeLike
    ) -> "KVCache":
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch,), jnp.int32))

    @property
    def capacity(self) -> int:
        return self.k.shape[3]

    def write(
        self, layer: int, k: Float[Array, "B T Hkv D"], v: Float[Array, "B T Hkv D"], n: Int[Array, " B"]
    ) -> "KVCache":
        """Row b of one layer gets its first n[b] rows at the cursor, which does not move (see `advance`)."""
        path = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[:2])
        return self._put(k[None], v[None], layer, path, n)

    def write_all(self, layer: int, k: Float[Array, "B S Hkv D"], v: Float[Array, "B S Hkv D"]) -> "KVCache":
        """`write` for a block as long as the cache, whose every column is known to stay (a canvas's full pass)."""
        put = lambda cache, x: cache.at[layer].set(x.transpose(0, 2, 1, 3).astype(cache.dtype))
        # Together: else XLA writes the values of all layers at the end, and holds half a cache of them until then.
        keys, values = jax.lax.optimization_barrier((put(self.k, k), put(self.v, v)))
        return replace(self, k=keys, v=values)

    def advance(self, n: Int[Array, " B"]) -> "KVCache":
        return replace(self, length=jnp.minimum(self.length + n, self.capacity))

    def commit(
        self,
        k: Float[Array, "L B T Hkv D"],
        v: Float[Array, "L B T Hkv D"],
        path: Int[Array, "B T"],
        n: Int[Array, " B"],
    ) -> "KVCache":
        """Row b gets its block rows path[b, :n[b]], in this order, and its cursor moves by n[b]; n = 0 leaves it untouched."""
        return self._put(k, v, 0, path, n).advance(n)

    def _put(self, k: Array, v: Array, layer: int, path: Array, n: Array) -> "KVCache":
        """k, v [l, B, T, Hkv, D] into layers layer .. layer + l at the cursor.

        Row by row, the columns from the cursor on are read, the new ones laid over them, and written back. One scatter for all rows says
        the same, but TPUs have theirs with columns before heads, for which the whole cache would be copied to and fro in every round.
        """
        B, T = path.shape
        width = min(T, self.capacity)
        first = jnp.minimum(self.length, self.capacity - width)
        slot = first[:, None] + jnp.arange(width, dtype=jnp.int32) - self.length[:, None]  # block row of each column
        new = (slot >= 0) & (slot < n[:, None])
        pick = jnp.take_along_axis(path, jnp.clip(slot, 0, T - 1), axis=1)[None, :, :, None, None]

        def lay(cache, x, pick, new, first):
            x = jnp.take_along_axis(x, pick, axis=2).transpose(0, 1, 3, 2, 4).astype(cache.dtype)

            def row(b, cache):
                at = (layer, b, 0, first[b], 0)
                own = jax.lax.dynamic_slice_in_dim(x, b, 1, axis=1)
                old = jax.lax.dynamic_slice(cache, at, own.shape)
                return jax.lax.dynamic_update_slice(cache, jnp.where(new[b][:, None], own, old), at)

            return jax.lax.fori_loop(0, x.shape[1], row, cache)

        stack, rows = (None, "batch", "kv_heads"), (None, "batch", None, "kv_heads")
        axes = stack, rows, (None, "batch"), ("batch",), ("batch",)
        sizes = {"batch": B, "kv_heads": self.k.shape[2]}
        put = lambda cache, x: each_device(lay, (cache, x, pick, new, first), axes, stack, sizes)
        return replace(self, k=put(self.k, k), v=put(self.v, v))
