"""Training passes whose layers are one loop: the same numbers as layer by layer, in a program that does not grow with the layers."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflax.cache import KVCache
from dflax.config import ModelConfig, MoEConfig, RopeConfig
from dflax.models import params
from dflax.models.decoder import Decoder
from dflax.train.diffusion import DiffusionObjective, diffusion_loss
from dflax.train.passes import prepared

DENSE = ModelConfig(
    "qwen3", 48, 16, 24, 6, 4, 2, 8, 1e-6, RopeConfig(), False, 64, qk_norm=True, windows=(None, None, 5, 5, None, 3)
)
EXPERTS = dataclasses.replace(
    DENSE, family="qwen3_moe", windows=(), moe=MoEConfig(4, 2, 12, True), moe_layers=(False, True, True, True, False, False)
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(0), (3, 14), 0, 47, jnp.int32)


def weights_of(config):
    graph = Decoder(config, rngs=nnx.Rngs(0))
    return graph, params.flatten(graph)


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["windows", "experts"])
@pytest.mark.parametrize("taps", [(), (0, 3, 4), (5,)])
def test_a_loop_over_layers_gives_what_the_layers_give(config, taps):
    graph, weights = weights_of(config)
    starts = jnp.asarray(np.where(np.arange(14) < 6, 0, 6)[None].repeat(3, 0), jnp.int32)

    @partial(jax.jit, static_argnames="scan")
    def run(weights, scan):
        block = prepared(params.fill(graph, weights), scan=scan).packed(TOKENS, starts, taps=taps)
        return block.hidden, block.features

    want, got = run(weights, scan=False), run(weights, scan=True)
    assert (got[1] is None) == (not taps)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_loop_over_layers_gives_every_layers_keys_and_values():
    graph, weights = weights_of(DENSE)
    cache = KVCache.empty(DENSE, 3, 4, jnp.float32)

    @partial(jax.jit, static_argnames="scan")
    def run(weights, scan):
        block = prepared(params.fill(graph, weights), scan=scan).read(TOKENS, cache)
        return block.hidden, block.k, block.v

    want, got = run(weights, scan=False), run(weights, scan=True)
    assert got[1].shape == (6, 3, 14, 2, 8)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_gradient_of_a_loop_over_layers(compute, remat):
    config = dataclasses.replace(DENSE, family="llada", bidirectional=True, mask_token_id=47, windows=(), num_layers=3)
    graph, weights = weights_of(config)
    few = jnp.full(3, 4, jnp.int32), jnp.full(3, 14, jnp.int32)

    @partial(jax.jit, static_argnames="scan")
    def run(weights, scan):
        def loss(weights):
            model = prepared(params.fill(graph, weights), compute, remat, scan)
            return diffusion_loss(
                model, jax.random.key(0), TOKENS, *few, answer_columns=10, config=DiffusionObjective()
            )

        return jax.value_and_grad(loss, has_aux=True)(weights)

    (want, _), expected = run(weights, scan=False)
    (got, _), found = run(weights, scan=True)
    np.testing.assert_allclose(got, want, rtol=1e-5 if compute == "float32" else 1e-3)
    for name, gradient in found.items():
        assert gradient.dtype == jnp.float32
        apart = np.linalg.norm(gradient - expected[name]) / np.linalg.norm(expected[name])
        assert apart < (1e-5 if compute == "float32" else 0.03), (name, apart)


def test_the_program_does_not_grow_with_the_layers():
    def products(layers, scan):
        config = dataclasses.replace(DENSE, num_layers=layers, windows=())
        graph = params.abstract(lambda rngs: Decoder(config, rngs=rngs))
        run = lambda weights: prepared(params.fill(graph, weights), scan=scan).whole(TOKENS).hidden
        return jax.jit(run).lower(params.flatten(graph)).as_text().count("dot_general")

    assert products(9, scan=True) == products(6, scan=True)
    assert products(9, scan=False) == 1.5 * products(6, scan=False)
