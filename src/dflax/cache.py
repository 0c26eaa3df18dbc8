"""The key/value cache: one stacked array for all layers, one cursor per row, two ways to write, and no third.

Where acceptance is known (prefill) every layer writes its rows as it goes: `write`. Where it is not (verify), the forward pass
writes nothing and the accepted rows are committed afterwards: `commit`. Nothing is ever cropped or rolled back: columns at or
past a row's cursor are stale and invisible. A write past the end is dropped; it never reaches good rows.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflax.config import DrafterConfig, ModelConfig


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
        row, column = self._targets(k.shape[1], n)
        put = lambda cache, x: cache.at[layer, row, :, column].set(x.astype(cache.dtype), mode="drop")
        return replace(self, k=put(self.k, k), v=put(self.v, v))

    def write_all(self, layer: int, k: Float[Array, "B S Hkv D"], v: Float[Array, "B S Hkv D"]) -> "KVCache":
        """`write` for a block as long as the cache, whose every column is known to stay (a canvas's full pass)."""
        put = lambda cache, x: cache.at[layer].set(x.transpose(0, 2, 1, 3).astype(cache.dtype))
        return replace(self, k=put(self.k, k), v=put(self.v, v))

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
        row, column = self._targets(path.shape[1], n)
        pick = path[None, :, :, None, None]

        def put(cache, x):
            x = jnp.take_along_axis(x, pick, axis=2)
            return cache.at[:, row, :, column].set(x.transpose(1, 2, 0, 3, 4).astype(cache.dtype), mode="drop")

        return replace(self, k=put(self.k, k), v=put(self.v, v)).advance(n)

    def _targets(self, T: int, n: Int[Array, " B"]) -> tuple[Array, Array]:
        """Row and column of each of T rows, [B, T]; the column of a row that must not be written lies past the end."""
        slot = jnp.arange(T, dtype=jnp.int32)
        column = jnp.where(slot < n[:, None], self.length[:, None] + slot, self.capacity)
        row = jnp.broadcast_to(jnp.arange(n.shape[0], dtype=jnp.int32)[:, None], column.shape)
        return row, column
