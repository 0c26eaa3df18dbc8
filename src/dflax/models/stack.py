"""Layers one after another: a piece of program for each, or one that loops over the stacked weights of all neighbours that are alike."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def walk(
    layers: Sequence[nnx.Module], kinds: Sequence[Any], step: Step, carry: Any, scan: bool
) -> Iterator[tuple[int, Any, Any]]:
    """Runs `carry, out = step(layer, i, kind, carry)` for layers i = 0, 1, ...

    scan: neighbours of the same kind are compiled once, with i an int32 scalar. Their weights are copied into one array, which costs as
    much memory again: for training steps, whose weights are cut over a pod. Else every layer is compiled by itself, and i is an int.

    Yields after every piece of program: the number of its last layer, the carry, and the outs with an axis of its layers in front.
    """
    cuts = [i for i in range(1, len(layers)) if not scan or kinds[i] != kinds[i - 1]]
    for first, end in itertools.pairwise((0, *cuts, len(layers))):
        kind = kinds[first]
        if end - first == 1:
            carry, out = step(layers[first], first, kind, carry)
            yield first, carry, jax.tree.map(lambda leaf: leaf[None], out)
        else:
            merge, leaves = _stacked(layers[first:end])
            body = lambda carry, xs, merge=merge, kind=kind: step(merge(xs[0]), xs[1], kind, carry)
            carry, out = jax.lax.scan(body, carry, (leaves, jnp.arange(first, end, dtype=jnp.int32)))
            yield end - 1, carry, out


def joined(outs: Sequence[Any]) -> Any:
    """The outs of all pieces, layer by layer."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)


def pick(values: Sequence[int], i: int | Int[Array, ""]) -> int | Int[Array, ""]:
    """values[i] for a step's i."""
    return values[i] if isinstance(i, int) else jnp.asarray(values, jnp.int32)[i]


def _stacked(layers: Sequence[nnx.Module]) -> tuple[Callable[[Any], Any], list[Array]]:
    """(leaves of one layer -> the layer, leaves of all layers with a further axis in front)."""
    graphdef, state = nnx.split(layers[0])
    treedef = jax.tree.structure(state)
    columns = zip(*(jax.tree.leaves(nnx.state(layer)) for layer in layers), strict=True)
    return lambda leaves: nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), [jnp.stack(c) for c in columns]
