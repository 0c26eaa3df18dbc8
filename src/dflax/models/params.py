"""Modules as flat dictionaries of arrays: the form in which weights are loaded, trained, sharded and saved.

Keys are dotted module paths such as "layers.0.self_attn.q_proj.weight".
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx


def abstract(build: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
    """The module that `build(rngs)` would make, with jax.ShapeDtypeStruct leaves: nothing is allocated."""
    return nnx.eval_shape(lambda: build(_OneKey()))


class _OneKey(nnx.Rngs):
    """The same key for every parameter: counting keys under a trace costs quadratic time (8 s against 1 for 36 layers)."""

    def __init__(self):
        pass

    def params(self) -> jax.Array:
        return jax.random.key(0)


def flatten(module: nnx.Module) -> dict[str, Any]:
    """Dotted path -> array (or ShapeDtypeStruct)."""
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def fill(module: nnx.Module, arrays: Mapping[str, Any]) -> Any:
    """The same module with these leaves; `arrays` has exactly the keys of `flatten(module)`."""
    graphdef, state = nnx.split(module)
    paths, treedef = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))
    leaves = [arrays[".".join(str(key.key) for key in path)] for path, _ in paths]
    nnx.replace_by_pure_dict(state, jax.tree_util.tree_unflatten(treedef, leaves))
    return nnx.merge(graphdef, state)


def count(module: nnx.Module) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in flatten(module).values())
