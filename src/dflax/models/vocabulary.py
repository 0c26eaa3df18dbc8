"""The vocabulary's two tables on a mesh: rows looked up, and cross entropy against all of them, without either table or the logits of a
row ever being whole on a device.

A table lies as `dflax.sharding` says: its rows over `tensor`, its columns over `fsdp`, which cuts the batch as well. Looking up, devices
tell each other ids and get back what they lack of their own rows. For the cross entropy every device takes a slice of the vocabulary (the
head changes places once, an even exchange) and scores the rows of all: maximum, sum and label are summed up, never logits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from dflax import sharding

Logits = Callable[[Float[Array, "R E"], Float[Array, "V E"]], Float[Array, "R V"]]


def lookup(table: Float[Array, "V E"], ids: Int[Array, "..."]) -> Float[Array, "... E"]:
    """Rows of the table; ids have the batch first."""
    mesh = sharding.mesh_of(table)
    if mesh is None:
        return jnp.take(table, ids, axis=0)
    batch = sharding.spec(("batch", *(None,) * (ids.ndim - 1)), ids.shape, mesh)[0]
    vocab, embed = places = sharding.spec(("vocab", "embed"), table.shape, mesh)[0]
    crossed = embed is not None and embed in _names(batch[0])

    def local(table: Array, ids: Array) -> Array:
        if crossed:
            ids = jax.lax.all_gather(ids, embed, axis=0, tiled=True)
        if vocab is None:
            rows = jnp.take(table, ids, axis=0)
        else:
            at = ids - jax.lax.axis_index(vocab) * table.shape[0]
            here = (at >= 0) & (at < table.shape[0])
            rows = jnp.where(here[..., None], jnp.take(table, jnp.where(here, at, 0), axis=0), 0)
        if crossed:
            rows = jax.lax.all_to_all(rows, embed, split_axis=0, concat_axis=rows.ndim - 1, tiled=True)
        elif embed is not None:
            rows = jax.lax.all_gather(rows, embed, axis=rows.ndim - 1, tiled=True)
        return rows if vocab is None else jax.lax.psum(rows, vocab)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(places, batch), out_specs=PartitionSpec(*batch, None), check_vma=False
    )
    return run(table, ids)


@dataclass(frozen=True)
class Slices:
    """How rows and vocabulary are cut while rows are scored.

    rows, vocab: mesh axes of each. A row's score is what the devices along `vocab` find together; those of them that have rows of their
    own (`crossed`) gather these first.
    """

    mesh: AbstractMesh | None
    rows: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()

    @classmethod
    def of(cls, head: Float[Array, "V E"], rows: int) -> "Slices":
        mesh = sharding.mesh_of(head)
        if mesh is None:
            return cls(None)
        names = lambda axis, size: _names(sharding.spec((axis,), (size,), mesh)[0][0])
        return cls(mesh, names("batch", rows), names("vocab_slice", head.shape[0]))

    @property
    def crossed(self) -> tuple[str, ...]:
        return tuple(name for name in self.vocab if name in self.rows)

    @property
    def shared(self) -> tuple[str, ...]:
        """Axes along which devices have the same rows and other parts of the vocabulary."""
        return tuple(name for name in self.vocab if name not in self.rows)

    @property
    def copies(self) -> int:
        """Devices that have the same rows."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in self.shared)

    def run(self, function: Callable[..., tuple[Array, ...]], *arguments: Array) -> tuple[Array, ...]:
        """function(rows, head, more rows ...) -> rows ..., by every device for its own."""
        if self.mesh is None:
            return function(*arguments)
        rows, vocab = PartitionSpec(self.rows or None), PartitionSpec(self.vocab or None)
        specs = (rows, vocab, *(rows for _ in arguments[2:]))
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=rows, check_vma=False)(*arguments)

    def cross_entropy(
        self, logits_of: Logits, rows: Float[Array, "r E"], head: Float[Array, "v E"], ids: Int[Array, "r k"],
        shares: Float[Array, "r k"],
    ) -> tuple[Float[Array, " r"], Int[Array, " r"]]:  # fmt: skip
        """Inside `run`: float32 cross entropy of this device's rows against sum_i shares_i * onehot(ids_i), and the argmax."""
        count = rows.shape[0]
        rows, ids, shares = map(self._gather, (rows, ids, shares))
        logits = logits_of(rows, head)
        best = logits.argmax(-1).astype(jnp.int32)
        if not self.vocab:
            chosen = jnp.take_along_axis(logits, ids, axis=-1)
            return jax.nn.logsumexp(logits, axis=-1) * shares.sum(-1) - (chosen * shares).sum(-1), best
        first = self._first(head)
        here = (ids >= first) & (ids < first + head.shape[0])
        chosen = jnp.take_along_axis(logits, jnp.where(here, ids - first, 0), axis=-1)
        chosen = jax.lax.psum((jnp.where(here, chosen, 0.0) * shares).sum(-1), self.vocab)
        highest = jax.lax.stop_gradient(logits.max(-1))
        of_all = jax.lax.pmax(highest, self.vocab)
        best = jax.lax.pmin(jnp.where(highest == of_all, best + first, jnp.iinfo(jnp.int32).max), self.vocab)
        return self._own(self._logsumexp(logits) * shares.sum(-1) - chosen, count), self._own(best, count)

    def most_likely(
        self, logits_of: Logits, rows: Float[Array, "r E"], head: Float[Array, "v E"], k: int
    ) -> tuple[Int[Array, "r k"], Float[Array, "r k"]]:
        """Inside `run`: the k best rows of the head for each of this device's rows, and their float32 log-probabilities."""
        count = rows.shape[0]
        logits = logits_of(self._gather(rows), head)
        best, ids = jax.lax.top_k(logits, k)
        if self.vocab:
            candidates = jax.lax.all_gather(ids + self._first(head), self.vocab, axis=1, tiled=True)
            best, at = jax.lax.top_k(jax.lax.all_gather(best, self.vocab, axis=1, tiled=True), k)
            ids = jnp.take_along_axis(candidates, at, axis=1)
        logprobs = best - self._logsumexp(logits)[:, None]
        return self._own(ids.astype(jnp.int32), count), self._own(logprobs, count)

    def _first(self, head: Array) -> Array:
        return jax.lax.axis_index(self.vocab) * head.shape[0]

    def _gather(self, rows: Array) -> Array:
        return jax.lax.all_gather(rows, self.crossed, axis=0, tiled=True) if self.crossed else rows

    def _own(self, rows: Array, count: int) -> Array:
        """This device's rows of those that were gathered."""
        if not self.crossed:
            return rows
        return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(self.crossed) * count, count)

    def _logsumexp(self, logits: Array) -> Array:
        total = jax.nn.logsumexp(logits, axis=-1)
        if not self.vocab:
            return total
        top = jax.lax.pmax(jax.lax.stop_gradient(total), self.vocab)
        return jnp.log(jax.lax.psum(jnp.exp(total - top), self.vocab)) + top


def in_chunks(
    function: Callable[..., tuple[Array, ...]], chunk: int, rows: Array, head: Array, *others: Array
) -> tuple[Array, ...]:
    """function(rows, head, more rows ...) -> rows ..., `chunk` rows at a time."""
    count = rows.shape[0]
    size = min(chunk, count)
    cut = lambda x: jnp.pad(x, ((0, -count % size), *((0, 0),) * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])
    parts = tuple(map(cut, (rows, *others)))
    found = jax.lax.map(lambda part: function(part[0], head, *part[1:]), parts)
    return tuple(x.reshape(-1, *x.shape[2:])[:count] for x in found)


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part or ()
