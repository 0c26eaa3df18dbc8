"""A training step compiled ahead of time, from a recipe alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dflax import abstract
from dflax.config import DrafterConfig, ModelConfig
from dflax.errors import DflaxError
from dflax.infer.speculative import merger
from dflax.model import Model, build
from dflax.models import params
from dflax.sharding import axes_of, batch_spec
from dflax.train.diffusion_recipe import DiffusionRecipe, model_config
from dflax.train.diffusion_recipe import make_loss as make_diffusion_loss
from dflax.train.drafter import Frozen
from dflax.train.features import online
from dflax.train.passes import prepared
from dflax.train.recipe import DrafterRecipe, drafter_config, loss_of
from dflax.train.step import train_step

TOTAL = 1000  # steps of the schedule, which is part of the program but not of its shape


def configs_of(recipe: DrafterRecipe) -> tuple[ModelConfig, DrafterConfig, np.ndarray | None]:
    """Target, drafter, and a draft vocabulary of the recipe's size."""
    target = abstract.config_of(recipe.target)
    if isinstance(target, DrafterConfig):
        raise DflaxError(f"{recipe.target} is a drafter itself; target must be the model that verifies")
    ids = np.arange(recipe.draft_vocabulary, dtype=np.int32) if recipe.draft_vocabulary else None
    return target, drafter_config(recipe, Model(target, None), ids), ids


def drafter_step(recipe: DrafterRecipe, mesh: Mesh) -> jax.stages.Compiled:
    """The step of `dflax train drafter` with the target's features made online."""
    target, config, ids = configs_of(recipe)
    graph = params.abstract(lambda rngs: build(config, rngs))
    soft = recipe.soft_labels if recipe.objective.labels == "soft" else 0
    merge = merger(target)
    prepare = online(
        lambda leaves: prepared(merge(leaves), scan=recipe.scan_layers), config.target_layer_ids, soft, ids
    )
    loss, shapes = loss_of(recipe, graph, config.block_size, prepare), params.flatten(graph)
    step = train_step(shapes, loss, recipe.train, TOTAL, mesh, axes_of(shapes))
    weights = abstract.parameters(target, mesh, recipe.dtype)
    embed = weights["embed_tokens.weight"]
    head = embed if target.tie_word_embeddings else weights["lm_head.weight"]
    shared = Frozen(embed, head)
    if ids is not None:
        scored = jax.eval_shape(lambda embed, head: Frozen.make(embed, head, ids), embed, head)
        shared = Frozen(embed, *abstract.replicated((scored.head, scored.draft_index), mesh))
    batch = {
        name: _rows(recipe.rows_per_step, recipe.length, dtype, mesh)
        for name, dtype in {"tokens": jnp.int32, "loss_mask": jnp.bool_, "ctx_start": jnp.int32}.items()
    }
    return step.run.lower(step.state, batch, (abstract.leaves(target, mesh, recipe.dtype), shared)).compile()


def diffusion_step(recipe: DiffusionRecipe, mesh: Mesh) -> jax.stages.Compiled:
    """The step of `dflax train diffusion`."""
    config = diffusion_config(recipe)
    graph = params.abstract(lambda rngs: build(config, rngs))
    shapes = params.flatten(graph)
    step = train_step(shapes, make_diffusion_loss(recipe, graph), recipe.train, TOTAL, mesh, axes_of(shapes))
    rows = recipe.rows_per_step
    by_row = NamedSharding(mesh, batch_spec((rows,), mesh)[0])
    batch = {"tokens": _rows(rows, recipe.length, jnp.int32, mesh)}
    batch |= {name: jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=by_row) for name in ("prompt_len", "length")}
    return step.run.lower(step.state, batch, None).compile()


def diffusion_config(recipe: DiffusionRecipe) -> ModelConfig:
    """The model that is trained: a published one, or a new one of the recipe's shape."""
    if not recipe.model:
        return model_config(recipe)
    config = abstract.config_of(recipe.model)
    if isinstance(config, DrafterConfig) or not config.bidirectional:
        raise DflaxError(f"{recipe.model} is no diffusion language model")
    return config if recipe.mask_token_id < 0 else dataclasses.replace(config, mask_token_id=recipe.mask_token_id)


def _rows(rows: int, length: int, dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        (rows, length), dtype, sharding=NamedSharding(mesh, batch_spec((rows, length), mesh)[0])
    )
