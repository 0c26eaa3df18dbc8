"""Which layers of the target a drafter taps, and how their outputs are collected: the residual stream after a layer, before the
next norm. Only tapped layers are kept, never all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Float


def default_taps(num_layers: int, taps: int) -> tuple[int, ...]:
    """The published choice: one tap is the middle layer, several are spread evenly from layer 1 to layer num_layers - 3.

    Rounds halves to even, as the published lists do (z-lab/dflash, build_target_layer_ids). In a target that has fewer layers between
    those two than taps, taps are spread over all layers.
    """
    if taps == 1:
        return (num_layers // 2,)
    if taps > num_layers - 3:
        return tuple(round(i * (num_layers - 1) / (taps - 1)) for i in range(taps))
    return tuple(round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps))


@dataclass
class FeatureTap:
    """Collects the outputs of the tapped layers while a decoder runs; `features` joins them in the order of `layers`."""

    layers: Sequence[int]
    _kept: dict[int, Array] = field(default_factory=dict)

    def __call__(self, layer: int, x: Float[Array, "B T E"]) -> None:
        if layer in self.layers:
            self._kept[layer] = x

    def features(self) -> Float[Array, "B T ME"]:
        return jnp.concatenate([self._kept[layer] for layer in self.layers], axis=-1)
