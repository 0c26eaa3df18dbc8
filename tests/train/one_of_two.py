"""Run by test_processes.py, twice at a time: one of two processes with two CPU devices each that train a small network together, and then
speculate, if told to, as the evaluation of a drafter does, and refuse a damaged model."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflax
from dflax import processes, sharding
from dflax.errors import DflaxError
from dflax.train.trainer import TrainConfig, fit
from tests.golden import load_case

STEPS = 12
DAMAGED = "layers.0.mlp.down_proj.weight"


class Data:
    """Rows of a step, slow enough to be killed between two of them."""

    steps_per_epoch = STEPS

    def __init__(self, pause: float):
        self.pause = pause

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        time.sleep(self.pause)
        return {"x": np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)}


def loss_fn(params, batch, key):
    y = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    return jnp.mean((y - batch["x"][:, :6]) ** 2), {}


@jax.jit
def distance(params):
    return jnp.sum(jnp.square(params["a"] @ params["b"] - jnp.eye(8, 6)))


def speculated(mesh: str) -> np.ndarray:
    """Tokens of a target and its drafter, both cut over the mesh."""
    folder = load_case("dflash_generate").folder
    load = lambda name: dflax.load(folder / name, mesh=sharding.make_mesh(mesh))
    target, drafter = load("target"), load("drafter_fitted")
    return np.asarray(dflax.speculate(target, drafter, [[5, 6, 7, 8]] * 4, max_new_tokens=8, stop_token_ids=[]).tokens)


def refuse(folder: str) -> None:
    """The last rows of one weight are no numbers; cut like this, one of two processes alone reads them."""
    with pytest.raises(DflaxError, match=f"not finite .* in model.{DAMAGED};"):
        dflax.load(folder, mesh=sharding.make_mesh("fsdp=-1"))


def main(distributed: str, mesh: str, out: str, pause: str, damaged: str) -> None:
    processes.join(distributed)
    chance = np.random.default_rng(0)
    params = {"a": chance.normal(size=(8, 12)).astype(np.float32), "b": chance.normal(size=(12, 6)).astype(np.float32)}
    config = TrainConfig(
        steps=STEPS, learning_rate=0.01, mesh=mesh, out=out, log_every=1, checkpoint_every=2, distributed=distributed,
        eval_every=4, best="distance",
    )  # fmt: skip
    evaluate = lambda params, step: {"distance": float(distance(params))}
    trained = fit(params, loss_fn, Data(float(pause)), config, evaluate=evaluate)
    arrays: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in trained.items()}
    if damaged:
        refuse(damaged)
        arrays["tokens"] = speculated(mesh)
    np.savez(f"{out}/trained-{jax.process_index()}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
