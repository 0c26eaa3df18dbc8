"""The decoding loops compiled ahead of time, from configurations alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflax import abstract
from dflax.config import DrafterConfig, ModelConfig
from dflax.infer import denoise, speculative
from dflax.infer.canvas import Cache, columns
from dflax.infer.denoise import DenoisePlan, DenoiseRequest
from dflax.infer.policies import Policy
from dflax.infer.sampling import SamplingParams
from dflax.infer.state import capacity


def speculative_loop(
    target: ModelConfig,
    drafter: DrafterConfig | None,
    mesh: Mesh,
    batch: int,
    context: int,
    block_size: int,
    dtype: str,
) -> jax.stages.Compiled:
    """The loop of `dflax.speculate` (drafter None, block size 1: of `dflax.generate`), greedy, with caches of `context` columns."""
    program = speculative.program(target, drafter)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    state = jax.eval_shape(
        partial(program.start, dtype=jnp.dtype(dtype)), shape((batch, capacity(context))), shape((batch,))
    )[0]
    leaves = abstract.leaves(target, mesh, dtype)
    weights = (leaves, None if drafter is None else abstract.leaves(drafter, mesh, dtype), None)
    if drafter is not None and drafter.draft_vocab_size is not None:
        scored = jax.eval_shape(program.vocabulary, weights, shape((drafter.draft_vocab_size,)))
        weights = (*weights[:2], abstract.replicated(scored, mesh))
    params = SamplingParams.build(batch, target.vocab_size, stop_ids=list(target.eos_token_ids))
    arguments = (
        weights,
        abstract.loop_state(state, mesh, batch),
        *abstract.replicated((jax.eval_shape(lambda: params), np.int32(0)), mesh),
    )
    return program.run.lower(*arguments, block_size=block_size, sampled=False).compile()


def denoising_loop(
    model: ModelConfig, mesh: Mesh, batch: int, context: int, gen_length: int, block_length: int, cache: str,
    policy: Policy, extrapolation: Any, dtype: str,
) -> jax.stages.Compiled:  # fmt: skip
    """The loop of `dflax.denoise` at temperature 0 on canvases of prompts of `context` - `gen_length` tokens."""
    program = denoise.program(model)
    plan = DenoisePlan(
        block_length=block_length, gen_length=gen_length, cache=Cache.of(cache), guided=False, sampled=False
    )
    params = SamplingParams.build(batch, model.vocab_size, stop_ids=list(model.eos_token_ids))
    request = DenoiseRequest(
        params, np.zeros(batch, np.float32), np.int32(block_length), np.bool_(False), policy, extrapolation, None
    )
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    start = partial(program.start, plan=plan, dtype=jnp.dtype(dtype))
    state = jax.eval_shape(start, shape((batch, columns(context))), shape((batch,)), request)
    arguments = (
        abstract.leaves(model, mesh, dtype),
        abstract.loop_state(state, mesh, batch),
        *abstract.replicated(jax.eval_shape(lambda: (request, jnp.int32(0))), mesh),
    )
    return program.run.lower(*arguments, plan=plan).compile()


def deciding(
    model: ModelConfig, batch: int, gen_length: int, block_length: int, policy: Policy, extrapolation: Any = None
) -> float:
    """FLOPs, exponentials and the like included, with which a step of `dflax.denoise` decides what it commits once the logits are there,
    as the compiler counts them for a CPU."""
    program = denoise.program(model)
    plan = DenoisePlan(
        block_length=block_length, gen_length=gen_length, cache=Cache.of("none"), guided=False, sampled=False
    )
    params = SamplingParams.build(batch, model.vocab_size, stop_ids=list(model.eos_token_ids))
    request = DenoiseRequest(
        params, np.zeros(batch, np.float32), np.int32(block_length), np.bool_(False), policy, extrapolation, None
    )
    shape = jax.ShapeDtypeStruct
    start = partial(program.start, plan=plan, dtype=jnp.dtype("float32"))
    prompts = shape((batch, columns(2 * gen_length)), jnp.int32), shape((batch,), jnp.int32)
    state = jax.eval_shape(start, *prompts, request)
    mask = model.mask_token_id
    assert mask is not None

    def decide(state, logits, request):
        return denoise.decide(state, denoise.View(logits, None), plan, request, mask)

    logits = shape((batch, block_length, model.vocab_size), jnp.float32)
    counted = jax.jit(decide).lower(state, logits, request).compile().cost_analysis()
    assert counted is not None
    return counted["flops"] + counted.get("transcendentals", 0.0)
