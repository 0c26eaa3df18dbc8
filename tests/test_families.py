"""config.json: every key that changes the computation is honoured or refused by name, and what we write reads back as it was."""

import json

import pytest

from dflax import families
from dflax.errors import DflaxError
from tests.golden import GOLDENS

CASES = [
    "target_llama",
    "target_qwen2",
    "target_qwen3",
    "target_qwen3_moe",
    "sharded_bf16",
    "llada",
    "llada_moe",
    "dream",
]


def raw(case):
    return json.loads((GOLDENS / case / "model" / "config.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_config_survives_the_way_out_and_in(case):
    config = families.parse(raw(case))
    assert families.parse(families.to_hf(config)) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_interleaved", True),
        ("partial_rotary_factor", 0.5),
        ("final_logit_softcapping", 30.0),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("layer_types", ["chunked_attention"] * 4),
        ("an_unknown_key", 1),
        ("model_type", "mamba"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(key, value):
    with pytest.raises(DflaxError, match="rope type" if key == "rope_scaling" else key):
        families.parse(raw("target_llama") | {key: value})


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llada", "block_type", "sequential"),
        ("llada", "attention_layer_norm", True),
        ("llada", "include_bias", True),
        ("llada", "embedding_size", 160),
        ("llada", "an_unknown_key", 1),
        ("llada", "mask_token_id", 128),
        ("llada_moe", "moe_router_score_function", "sigmoid"),
        ("llada_moe", "shared_expert_intermediate_size", 8),
        ("llada_moe", "moe_layer_freq", [1]),
        ("dream", "mask_token_id", 120),
    ],
)
def test_what_a_diffusion_model_of_another_kind_has_is_refused_by_name(case, key, value):
    with pytest.raises(DflaxError, match=key):
        families.parse(raw(case) | {key: value})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("value", [0, -1, "many", True])
def test_a_number_that_is_none_is_refused_by_name(case, value):
    found = raw(case)
    nested = found.get("rope_parameters")
    keys = {
        key for key in found if key.endswith(("_heads", "_layers", "_size", "_eps", "_theta")) or key.startswith("n_")
    }
    keys -= {"max_window_layers", "shared_expert_intermediate_size"}  # without effect; 0 is right
    assert keys > {"vocab_size", "rms_norm_eps"}
    for key in keys:
        with pytest.raises(DflaxError, match=key):
            families.parse(found | {key: value})
    if nested:
        with pytest.raises(DflaxError, match="rope_theta"):
            families.parse(found | {"rope_parameters": nested | {"rope_theta": value}})


def test_rope_told_in_several_places_is_told_alike():
    bare = {k: v for k, v in raw("target_qwen3").items() if not k.startswith("rope_")}
    linear = {"rope_type": "linear", "factor": 2.0}
    theta = lambda **told: families.parse(bare | told).rope.theta
    assert (
        theta(rope_scaling=linear | {"rope_theta": 7.0}) == theta(rope_parameters=linear | {"rope_theta": 7.0}) == 7.0
    )
    assert theta(rope_theta=7.0, rope_parameters=linear | {"rope_theta": 7.0}, rope_scaling=linear) == 7.0
    for told in (
        {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 8.0}},
        {"rope_scaling": linear, "rope_parameters": linear | {"factor": 3.0}},
    ):
        with pytest.raises(DflaxError, match="contradict each other"):
            theta(**told)


@pytest.mark.parametrize("key", ["activation_type", "block_type", "layer_norm_type", "rope", "include_bias"])
def test_a_dense_llada_without_a_key_that_means_something_else_when_left_out(key):
    left = {k: v for k, v in raw("llada").items() if k != key}
    with pytest.raises(DflaxError, match=f"no '{key}'"):
        families.parse(left)


def test_the_two_kinds_of_llada_are_told_apart():
    dense, sparse = families.parse(raw("llada")), families.parse(raw("llada_moe"))
    assert (dense.family, sparse.family) == ("llada", "llada_moe")
    assert families.parse(raw("llada_moe") | {"model_type": "lladamoe"}) == sparse
    assert dense.bidirectional
    assert sparse.bidirectional
    assert (dense.mask_token_id, sparse.mask_token_id) == (126, None)
