"""The two learned judges of a denoising step: TSPD's recurrent controller and Learn2PD's filter.

The controller (arXiv 2605.30753, 3.2 and A.3) is shared by all positions and keeps a memory for each: it reads how a position's
confidence has gone so far; ours beside the paper's, it may read the neighbours' too. The filter (arXiv 2509.25188) sees one step of a
whole block and mixes its positions.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from dflax.config import CONTROLLER_FEATURES, ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.models.layers import Linear, matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trail:
    """What the features remember of every position."""

    average: Float[Any, "*slots"]
    """float32: moving average of the raw confidence."""
    seen: Bool[Any, "*slots"]
    """Whether there was an observation."""

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> "Trail":
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))

    def features(
        self,
        smoothing: float,
        confidence: Float[Array, "*slots"],
        raw: Float[Array, "*slots"],
        entropy: Float[Array, "*slots"],
        position: Float[Array, "*slots"],
        uncertainty: Float[Array, "*slots"],
    ) -> tuple["Trail", Float[Array, "*slots 6"]]:
        """The six features of a step, in the order of CONTROLLER_FEATURES.

        Args:
          confidence: probability of the top-1 token, extrapolated where a look-ahead is on.
          raw: the same as the model gave it. Average and momentum follow this one: a forecast must not feed on forecasts.
          entropy: over the whole vocabulary, divided by ln V (the paper leaves the scale open), so that it lies in [0, 1].
          position: offset in the block / (block length - 1).
          uncertainty: of the look-ahead, in logits; 0 means that there is none.
        """
        average = jnp.where(self.seen, smoothing * raw + (1 - smoothing) * self.average, raw)
        momentum = jnp.where(self.seen, average - self.average, 0.0)
        columns = (confidence, entropy, average, momentum, position, uncertainty)
        return Trail(average, jnp.ones_like(self.seen)), jnp.stack(columns, axis=-1)


def neighbourhood(
    count: int,
    confidence: Float[Array, "*rows T"],
    entropy: Float[Array, "*rows T"],
    masked: Bool[Array, "*rows T"],
    coverage: Float[Array, "*rows T"],
    live: Bool[Array, "*rows T"] | None = None,
) -> Float[Array, "*rows T around"]:
    """What is around every slot of a block: the coverage to its left, then confidence, then entropy, of the `count` slots to its left
    (nearest first) and of those to its right: 4 count + 1 numbers, none where count is 0.

    What is written counts as certain, in front of the block too (1, 0); what lies behind the block or the canvas as unknown (0, 1).

    Args:
      confidence, entropy: raw, as in `Trail.features`.
      coverage: share of the slots to the left that are written.
      live: slots before the end of the canvas; None: all.
    """
    if not count:
        return jnp.zeros((*masked.shape, 0), jnp.float32)
    live = jnp.ones_like(masked) if live is None else live
    T = masked.shape[-1]
    columns = [coverage]
    for value, written, unknown in ((confidence, 1.0, 0.0), (entropy, 0.0, 1.0)):
        shown = jnp.where(masked, value, jnp.where(live, written, unknown))
        edges = [(0, 0)] * (masked.ndim - 1) + [(count, count)]
        padded = jnp.pad(shown, edges, constant_values=[(0.0, 0.0)] * (masked.ndim - 1) + [(written, unknown)])
        offsets = [*range(-1, -count - 1, -1), *range(1, count + 1)]
        columns += [padded[..., count + offset : count + offset + T] for offset in offsets]
    return jnp.stack(columns, axis=-1)


class LSTMLayer(nnx.Module):
    """Gates i, f, g, o with one bias each: 4 (hidden (in + hidden) + hidden) parameters."""

    gates, memory = 4, 2

    input_weight: nnx.Param
    state_weight: nnx.Param
    bias: nnx.Param

    def __init__(self, in_size: int, size: int, *, rngs: nnx.Rngs):
        _recurrent_params(self, in_size, size, rngs)

    def __call__(
        self, x: Float[Array, "*slots I"], memory: Float[Array, "*slots M"]
    ) -> tuple[Float[Array, "*slots H"], Float[Array, "*slots M"]]:
        """Output and memory [hidden; cell]."""
        h, c = jnp.split(memory, 2, axis=-1)
        z = matmul(x, self.input_weight[...]) + matmul(h, self.state_weight[...]) + self.bias[...]
        i, f, g, o = jnp.split(z, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return h, jnp.concatenate([h, c], axis=-1)


class GRULayer(nnx.Module):
    """Gates r, u, n with one bias each; the reset gate acts on the state's share of n."""

    gates, memory = 3, 1

    input_weight: nnx.Param
    state_weight: nnx.Param
    bias: nnx.Param

    def __init__(self, in_size: int, size: int, *, rngs: nnx.Rngs):
        _recurrent_params(self, in_size, size, rngs)

    def __call__(
        self, x: Float[Array, "*slots I"], memory: Float[Array, "*slots M"]
    ) -> tuple[Float[Array, "*slots H"], Float[Array, "*slots M"]]:
        """Output, which is the memory too."""
        given = jnp.split(matmul(x, self.input_weight[...]) + self.bias[...], 3, axis=-1)
        kept = jnp.split(matmul(memory, self.state_weight[...]), 3, axis=-1)
        r, u = jax.nn.sigmoid(given[0] + kept[0]), jax.nn.sigmoid(given[1] + kept[1])
        h = (1 - u) * jnp.tanh(given[2] + r * kept[2]) + u * memory
        return h, h


class MLPLayer(nnx.Module):
    """A ReLU layer: no memory of its own, only what the features remember."""

    gates, memory = 1, 0

    def __init__(self, in_size: int, size: int, *, rngs: nnx.Rngs):
        self.linear = Linear(in_size, size, bias=True, std=math.sqrt(2 / in_size), rngs=rngs)

    def __call__(
        self, x: Float[Array, "*slots I"], memory: Float[Array, "*slots M"]
    ) -> tuple[Float[Array, "*slots H"], Float[Array, "*slots M"]]:
        return jax.nn.relu(self.linear(x)), memory


LAYERS = {"lstm": LSTMLayer, "gru": GRULayer, "mlp": MLPLayer}


class Scale(nnx.Module):
    """Mean and deviation of the features over the training traces: measured, not trained."""

    def __init__(self, size: int):
        self.mean = nnx.Param(jnp.zeros((size,)))
        self.std = nnx.Param(jnp.ones((size,)))


class Controller(nnx.Module):
    """Standardised features of one step and the memory of the steps before -> the logit of "fix"."""

    def __init__(self, config: ControllerConfig, *, rngs: nnx.Rngs):
        unknown = [name for name in config.features if name not in CONTROLLER_FEATURES]
        if unknown or not config.features:
            raise DflaxError(
                f"features of a controller are {list(config.features)}; they are some of {', '.join(CONTROLLER_FEATURES)}"
            )
        if config.layers < 1 or config.hidden_size < 1 or config.block_length < 1:
            raise DflaxError("layers, hidden_size and block_length of a controller must be at least 1")
        if config.kind not in LAYERS:
            raise DflaxError(f"kind of a controller is {config.kind!r}; it is one of {', '.join(LAYERS)}")
        if not 0 <= config.neighbours < max(config.block_length, 1):
            raise DflaxError(
                f"neighbours of a controller is {config.neighbours}; a block of {config.block_length} has 0 to {config.block_length - 1}"
            )
        layer = LAYERS[config.kind]
        sizes = [config.inputs] + [config.hidden_size] * config.layers
        self.scale = Scale(config.inputs)
        self.layers = nnx.List([layer(sizes[i], sizes[i + 1], rngs=rngs) for i in range(config.layers)])
        self.head = Linear(config.hidden_size, 1, bias=True, std=config.hidden_size**-0.5, rngs=rngs)
        self.config = config

    @property
    def columns(self) -> list[int]:
        """What it reads of the six features and the neighbourhood side by side: some of the one, all of the other."""
        own = [CONTROLLER_FEATURES.index(name) for name in self.config.features]
        around = self.config.inputs - len(own)
        return own + [len(CONTROLLER_FEATURES) + i for i in range(around)]

    def empty_memory(self, shape: tuple[int, ...]) -> Float[Array, "*slots L M"]:
        """Of positions that have not been looked at."""
        return jnp.zeros((*shape, *memory_shape(self.config)), jnp.float32)

    def standardise(self, features: Float[Array, "*slots all"]) -> Float[Array, "*slots F"]:
        """What this controller reads of the six features, and all of the neighbourhood behind them, with mean 0 and deviation 1 on its
        training traces.

        An uncertainty of 0 means that no look-ahead runs: it counts as the mean. (The paper feeds 0; to a network trained with the
        look-ahead that would say "certain". Channel dropout has taught it what the mean says: nothing.)
        """
        x = features[..., jnp.array(self.columns)]
        scaled = (x - self.scale.mean[...]) / self.scale.std[...]
        absent = (x == 0) & (jnp.array(self.columns) == CONTROLLER_FEATURES.index("uncertainty"))
        return jnp.where(absent, 0.0, scaled)

    def __call__(
        self, x: Float[Array, "*slots F"], memory: Float[Array, "*slots L M"]
    ) -> tuple[Float[Array, "*slots"], Float[Array, "*slots L M"]]:
        """Logit per position, and the memory after this step; x: standardised features."""
        kept = []
        for i, layer in enumerate(self.layers):
            x, after = layer(x, memory[..., i, :])
            kept.append(after)
        return self.head(x)[..., 0], jnp.stack(kept, axis=-2)


class AcceptanceFilter(nnx.Module):
    """Learn2PD's filter: Linear, ReLU, Linear over the confidences of a block, 2,112 parameters at width 32."""

    def __init__(self, config: FilterConfig, *, rngs: nnx.Rngs):
        width = config.block_length
        self.linear1 = Linear(width, width, bias=True, std=math.sqrt(2 / width), rngs=rngs)
        self.linear2 = Linear(width, width, bias=True, std=width**-0.5, rngs=rngs)
        self.config = config

    def __call__(self, confidence: Float[Array, "*rows T"]) -> Float[Array, "*rows T"]:
        """Logit of "accept" per position. A shorter block (cut at an end of text) is padded with zeros and cut back."""
        width, T = self.config.block_length, confidence.shape[-1]
        if width < T:
            raise DflaxError(f"the filter was trained for blocks of {width} tokens; this block has {T}")
        x = jnp.pad(confidence, [(0, 0)] * (confidence.ndim - 1) + [(0, width - T)])
        return self.linear2(jax.nn.relu(self.linear1(x)))[..., :T]


def normalised_entropy(logits: Float[Array, "*slots V"]) -> Float[Array, "*slots"]:
    """-sum p ln p / ln V of the softmax, float32; a token of logit -inf (forbidden) adds nothing."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    p = jnp.exp(logp)
    return -jnp.sum(jnp.where(p > 0, p * logp, 0.0), axis=-1) / math.log(logits.shape[-1])


def memory_shape(config: ControllerConfig) -> tuple[int, int]:
    """[layers, numbers that a layer keeps of a position]."""
    return config.layers, LAYERS[config.kind].memory * config.hidden_size


def build(config: ControllerConfig | FilterConfig, rngs: nnx.Rngs) -> Any:
    """A fresh judge."""
    kind = Controller if isinstance(config, ControllerConfig) else AcceptanceFilter
    return kind(config, rngs=rngs)  # pyright: ignore[reportArgumentType] - each config goes to its own


def _recurrent_params(layer: Any, in_size: int, size: int, rngs: nnx.Rngs) -> None:
    """Input and state weights of all gates side by side, drawn as PyTorch does: uniform in +-1 / sqrt(hidden)."""
    bound = size**-0.5
    draw = lambda *shape: nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound))
    layer.input_weight = draw(layer.gates * size, in_size)
    layer.state_weight = draw(layer.gates * size, size)
    layer.bias = draw(layer.gates * size)
