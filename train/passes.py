"""How a training step reads a module: master weights in the dtype of the passes, whole over `fsdp` where a layer uses them and not before,
layers whose inside is computed again for the gradient, and one piece of program for all layers that are alike."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from dflax import sharding


def prepared(module: Any, compute: str | None = None, remat: bool = False, scan: bool = False) -> Any:
    """The module, made ready inside a jitted step (it is changed: give one that was just filled).

    compute: dtype of the passes; None: that of the weights. remat: keep only what goes into a layer, not what it computes inside.
    scan: compile one layer for all that are alike (`dflax.models.stack`), over a copy of their weights, cut as they are.

    Casting and gathering happen when a layer reads its weight: with `remat` they happen again too, so that neither copy is kept. What is
    stacked is cast before.
    """
    module.remat, module.scan = remat, scan
    for path, leaf in nnx.iter_graph(module):
        if isinstance(leaf, nnx.Param):
            if scan and compute is not None and path[0] == "layers":
                leaf.set_value(leaf.get_value().astype(jnp.dtype(compute)))
            leaf.set_metadata("on_get_value", _Reading(".".join(map(str, path)), compute))
    return module


class _Reading:
    """What happens to one weight when it is read."""

    def __init__(self, path: str, compute: str | None):
        self.path, self.compute = path, compute

    def __call__(self, variable: nnx.Variable, value: Any) -> Any:
        value = value if self.compute is None else value.astype(jnp.dtype(self.compute))
        return sharding.gathered(value, self.path)
