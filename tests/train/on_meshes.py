"""Run by test_meshes.py on eight virtual devices: on every mesh the steps of both recipes have losses and gradient norms of one device,
and each device holds its share of parameters and moments."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dflax import sharding
from dflax.models import params
from dflax.train import diffusion_recipe
from dflax.train.diffusion import DiffusionObjective
from dflax.train.drafter import Frozen, Objective
from dflax.train.features import online
from dflax.train.passes import prepared
from dflax.train.recipe import DrafterRecipe, drafter_config, loss_of
from dflax.train.step import TrainConfig, TrainState, train_step
from tests.infer.tiny import random_model, target_config

MESHES = ("data=8", "fsdp=8", "tensor=8", "data=2,fsdp=2,tensor=2", "data=2,fsdp=4", "fsdp=2,tensor=4")
CHOSEN = {"diffusion": MESHES[:4], "drafter": MESHES[3:]}  # in the quick run; a program takes three seconds to compile
STEPS, ROWS, LENGTH, VOCABULARY = 5, 8, 16, 48
SHAPE: dict[str, Any] = {  # eight devices divide everything
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "num_layers": 1,
}  # fmt: skip
TRAIN = TrainConfig(steps=STEPS, learning_rate=1e-2, schedule="constant", warmup_fraction=0.0)


def curve(module: Any, loss: Any, batches: list[Any], frozen: Callable[[Mesh], Any], text: str) -> list[list[float]]:
    """[loss, gradient norm] of every step over a mesh, with what the state's arrays hold checked.

    The norms because Adam hides a gradient that is too large by a factor, such as one that several devices add.
    """
    mesh, said, rows = sharding.make_mesh(text), [], []
    weights = params.flatten(module)
    step = train_step(weights, loss, TRAIN, STEPS, mesh, sharding.axes_of(weights), said.append)
    state, beside = step.begin(weights), frozen(mesh)
    for batch in batches:
        state, measured = step.run(state, sharding.place_batch(batch, mesh), beside)
        rows.append([float(measured[name]) for name in ("loss", "grad_norm")])
    assert not said, said
    check_shares(state, mesh, text)
    return rows


def check_shares(state: TrainState, mesh: Mesh, text: str) -> None:
    """Matrices and their moments are cut over fsdp and tensor, the drafter's fusion over fsdp, vectors not at all."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        ways = mesh.shape["fsdp"] * (1 if "fc.weight" in name else mesh.shape["tensor"]) if leaf.ndim > 1 else 1
        held = {piece.device: piece.data.nbytes for piece in leaf.addressable_shards}
        assert held == dict.fromkeys(mesh.devices.flat, leaf.nbytes // ways), (text, name, held)
        found[name] = leaf.nbytes
    matrices = [name for name in found if name.endswith("q_proj.weight")]
    assert len(matrices) == 3, matrices  # parameter and both moments


def drafter() -> tuple[Any, Any, list[Any], Callable[[Mesh], Any]]:
    """The step of `dflax train drafter` with the target's features made online."""
    target = random_model(target_config(**SHAPE))
    recipe = DrafterRecipe(
        target="-", data=("-",), mask_token_id=0, layers=1, taps=1, block_size=4, length=LENGTH, rows_per_step=ROWS,
        objective=Objective(anchors=4, chunk=4), train=TRAIN,
    )  # fmt: skip
    config = drafter_config(recipe, target, None)
    module = random_model(config, 1).module
    prepare = online(lambda leaves: prepared(target.merge(leaves)), config.target_layer_ids, 0, None)

    def frozen(mesh: Mesh) -> Any:
        """As `dflax.load` places a target."""
        weights = params.flatten(target.module)
        place = sharding.parameter_sharding(mesh, {path: leaf.shape for path, leaf in weights.items()})
        placed = params.fill(target.module, {path: jax.device_put(leaf, place(path)) for path, leaf in weights.items()})
        model = dataclasses.replace(target, module=placed)
        return model.leaves, Frozen.make(placed.embed_tokens.weight[...], placed.head)

    chance = np.random.default_rng(0)
    batches = [
        {
            "tokens": chance.integers(1, VOCABULARY, (ROWS, LENGTH), np.int32),
            "loss_mask": np.tile(np.arange(LENGTH) > 3, (ROWS, 1)),
            "ctx_start": np.zeros((ROWS, LENGTH), np.int32),
        }
        for _ in range(STEPS)
    ]
    return module, loss_of(recipe, module, config.block_size, prepare), batches, frozen


def diffusion() -> tuple[Any, Any, list[Any], Callable[[Mesh], Any]]:
    """The step of `dflax train diffusion`."""
    config = target_config("llada", bidirectional=True, mask_token_id=VOCABULARY - 1, **SHAPE)
    recipe = diffusion_recipe.DiffusionRecipe(
        model="-", data=("-",), length=LENGTH, gen_length=8, rows_per_step=ROWS, train=TRAIN,
        objective=DiffusionObjective(chunk=4, block_length=8),
    )  # fmt: skip
    module = random_model(config, 2).module
    chance = np.random.default_rng(0)
    batches = [
        {
            "tokens": chance.integers(0, VOCABULARY - 1, (ROWS, LENGTH), np.int32),
            "prompt_len": chance.integers(1, 8, ROWS, np.int32),
            "length": np.full(ROWS, LENGTH, np.int32),
        }
        for _ in range(STEPS)
    ]
    return module, diffusion_recipe.make_loss(recipe, module), batches, lambda mesh: None


def main(how: str) -> None:
    for make in (drafter, diffusion):
        made = make()
        want = curve(*made, text="")
        assert min(np.ptp(want, axis=0)) > 0.1, want
        for text in MESHES if how == "all" else CHOSEN[make.__name__]:
            np.testing.assert_allclose(curve(*made, text=text), want, rtol=1e-5, err_msg=text)
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1])
