"""The decoder against reference values: every family, cached and whole, and the newer key style in bf16 shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflax
from dflax.cache import KVCache
from tests.golden import load_case

FAMILIES = ["target_qwen3", "target_llama", "target_qwen3_moe", "target_qwen2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_layer_outputs(name):
    case = load_case(name)
    model = dflax.load(case.folder / "model")
    tokens = case.expected["input_ids"]
    case.check("layer_outputs", model.hidden_states(tokens))
    case.check("logits", model.logits(tokens))


@pytest.mark.smoke
def test_bf16_shards_in_newer_key_style():
    case = load_case("sharded_bf16")
    model = dflax.load(case.folder / "model")
    case.check("logits", model.logits(case.expected["input_ids"]))


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_in_chunks_then_one_token_at_a_time(name):
    """The cached path: prompt of row 0 written in ragged chunks, then the recorded greedy tokens, one by one."""
    case = load_case(name)
    model = dflax.load(case.folder / "model")
    module, ids = model.module, case.expected["generated_ids"]
    prompt = case.expected["input_ids"].shape[1]
    cache = KVCache.empty(model.config, 1, ids.shape[1] + 8, jnp.float32)
    write = jax.jit(lambda m, t, c, n: m.write(t, c, n))
    chunk = 16
    for start in range(0, prompt - 1, chunk):
        part = np.zeros((1, chunk), np.int32)
        live = min(chunk, prompt - 1 - start)
        part[0, :live] = ids[0, start : start + live]
        _, cache = write(module, jnp.asarray(part), cache, jnp.asarray([live]))
    assert int(cache.length[0]) == prompt - 1

    @jax.jit
    def step(module, token, cache):
        block = module.read(token, cache)
        cache = cache.commit(block.k, block.v, jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32))
        return module.logits(block.hidden)[0, 0], cache

    steps = []
    for position in range(prompt - 1, ids.shape[1] - 1):
        logits, cache = step(module, jnp.asarray(ids[:, position : position + 1]), cache)
        steps.append(np.asarray(logits))
    case.check("step_logits_first4", np.stack(steps[:4]))
    case.check("step_top1_logit", np.stack(steps).max(-1))
    np.testing.assert_array_equal(np.stack(steps).argmax(-1), ids[0, prompt:])
