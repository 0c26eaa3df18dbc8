"""Models without weights: shapes, dtypes and places of the leaves that a compiled program takes, for compiling ahead of time."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflax import configs, families
from dflax.checkpoint import huggingface
from dflax.config import DrafterConfig, ModelConfig
from dflax.errors import DflaxError
from dflax.model import build, locate
from dflax.models import params
from dflax.sharding import loop_sharding, parameter_sharding


def config_of(name: str) -> ModelConfig | DrafterConfig:
    """The configuration of a model by name, from what is published (`configs.published`) or else from its config.json."""
    raw = configs.published(name)
    if raw is None:
        path = locate(name)
        if path.suffix == ".gguf":
            raise DflaxError(f"{name} is a GGUF file; compiling ahead of time reads a config.json")
        raw = huggingface.config(path)
    return families.parse_drafter(raw) if families.is_drafter(raw) else families.parse(raw)


def parameters(config: ModelConfig | DrafterConfig, mesh: Mesh, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Dotted path -> shape, dtype and sharding over the mesh, as `dflax.load(mesh=...)` places them."""
    abstract = params.flatten(params.abstract(lambda rngs: build(config, rngs)))
    place = parameter_sharding(mesh, {name: leaf.shape for name, leaf in abstract.items()})
    return {name: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place(name)) for name, leaf in abstract.items()}


def leaves(config: ModelConfig | DrafterConfig, mesh: Mesh, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`Model.leaves` of such a model."""
    module = params.fill(params.abstract(lambda rngs: build(config, rngs)), parameters(config, mesh, dtype))
    return tuple(jax.tree.leaves(nnx.state(module)))


def loop_state(state: Any, mesh: Mesh, batch: int) -> Any:
    """The state of a decoding loop (arrays or shapes) with its places."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=loop_sharding(leaf, mesh, batch)), state
    )


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Shapes and dtypes of a tree that is whole everywhere."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), tree)
