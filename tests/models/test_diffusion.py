"""LLaDA, Dream and LLaDA-MoE against recorded passes, and the passes that cached denoising is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflax
from dflax.cache import KVCache
from dflax.config import MoEConfig
from dflax.errors import DflaxError
from tests.golden import load_case
from tests.infer.tiny import random_model, target_config

CASES = {"llada": None, "dream": None, "llada_moe": 109}


@pytest.fixture(scope="module")
def loaded():
    return {
        name: (load_case(name), dflax.load(load_case(name).folder / "model", mask_token_id=mask))
        for name, mask in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_and_layer_outputs(loaded, name):
    case, model = loaded[name]
    ids = case.expected["input_ids"]
    case.check("logits", model.logits(ids))
    states = np.asarray(model.hidden_states(ids))
    embedded = np.asarray(model.module.embed_tokens(jnp.asarray(ids)))[None]
    if name == "llada_moe":
        case.check("layer_outputs", np.concatenate([embedded, states]))
        return
    last = np.asarray(model.module.norm(jnp.asarray(states[-1])))[None]
    case.check("hidden_states", np.concatenate([embedded, states[:-1], last]))


def test_columns_past_the_end_of_a_canvas_change_nothing(loaded):
    case, model = loaded["llada"]
    module, ids = model.module, case.expected["input_ids"]
    logits = jax.jit(lambda tokens: module.predict(module.canvas(tokens, jnp.array([24, 24]))[0]))
    behind = lambda token: np.concatenate([ids, np.full((2, 5), token, np.int32)], axis=1)
    got, other = (np.asarray(logits(behind(token)))[:, :24] for token in (7, 3))
    np.testing.assert_array_equal(got, other)
    case.check("logits", got)


@pytest.fixture(scope="module")
def step():
    case = load_case("llada_fast")
    model = dflax.load(case.folder / "model")
    ids = jnp.asarray(case.expected["step_ids_cached"])
    cache = KVCache.empty(model.config, 1, ids.shape[1], jnp.float32)
    length = jnp.array([ids.shape[1]])
    return case, model.module, jax.jit(model.module.canvas)(ids, length, cache)[1]


def test_a_short_pass_over_a_prefix(step):
    case, module, cache = step
    now, (start, _) = jnp.asarray(case.expected["step_ids_now"]), case.expected["step_block"].tolist()
    tokens = now[:, start:]
    at = jnp.array([start])
    x = jax.jit(module.stretch)(tokens, cache, at, jnp.array([tokens.shape[1]]), at)
    case.check("step_logits_prefix", module.predict(x)[0])


def test_a_short_pass_over_a_canvas_with_a_hole(step):
    case, module, cache = step
    now, block = jnp.asarray(case.expected["step_ids_now"]), case.expected["step_block"]
    start, end = block.tolist()
    tokens = jnp.pad(now[:, start:end], ((0, 0), (0, 3)))  # dead rows behind the block
    args = (jnp.array([start]), jnp.array([end - start]), jnp.array([now.shape[1]]), jnp.asarray(block)[None])
    x = jax.jit(module.stretch)(tokens, cache, *args)
    case.check("step_logits_dual", module.predict(x)[0, : end - start])


def test_a_short_pass_just_after_the_full_one_equals_it(step):
    case, module, cache = step
    ids, block = jnp.asarray(case.expected["step_ids_cached"]), case.expected["step_block"]
    start, end = block.tolist()
    args = (jnp.array([start]), jnp.array([end - start]), jnp.array([ids.shape[1]]), jnp.asarray(block)[None])
    short = jax.jit(module.stretch)(ids[:, start:end], cache, *args)
    full = jax.jit(module.canvas)(ids, jnp.array([ids.shape[1]]))[0]
    np.testing.assert_allclose(module.predict(short), module.predict(full[:, start:end]), atol=2e-5)


def test_a_chosen_expert_is_weighed_without_its_bias():

    config = target_config(
        "qwen3_moe", moe=MoEConfig(3, 1, 8, norm_topk_prob=False, expert_bias=True), num_layers=1, moe_layers=(True,)
    )
    mlp = random_model(config).module.layers[0].mlp
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 16)), jnp.float32)
    mlp.expert_bias[...] = jnp.array([0.0, 0.0, 10.0])
    router = jax.nn.softmax(x @ mlp.gate.weight[...].T, axis=-1)
    experts = mlp.experts
    gate, up, down = (getattr(experts, f"{part}_proj").weight[...][2] for part in ("gate", "up", "down"))
    want = router[:, 2:] * ((jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    np.testing.assert_allclose(mlp(x), want, atol=1e-5)


def test_the_mask_token_of_a_folder_that_does_not_tell(loaded, tmp_path):
    case, model = loaded["llada_moe"]
    folder = case.folder / "model"
    assert dflax.load(folder).config.mask_token_id is None
    with pytest.raises(DflaxError, match="outside the vocabulary of 112"):
        dflax.load(folder, mask_token_id=112)
    with pytest.raises(DflaxError, match=r"config\.json says 126"):
        dflax.load(load_case("llada").folder / "model", mask_token_id=125)
    with pytest.raises(DflaxError, match="this is none"):
        dflax.load(load_case("target_qwen3").folder / "model", mask_token_id=5)
    model.save(tmp_path / "out")
    again = dflax.load(tmp_path / "out")
    assert again.config == model.config
    np.testing.assert_array_equal(again.module.head, model.module.head)
