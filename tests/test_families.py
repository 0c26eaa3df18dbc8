"""config.json: every key that changes the computation is honoured or refused by name, and what we write reads back as it was."""

import json
import math

import pytest

from dflax import families, model
from dflax.errors import DflaxError
from dflax.text import stop_token_ids
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
    keys -= {"max_window_layers", "shared_expert_intermediate_size"}  # 0 is right
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


TOLD = {  # every key that the families read, with a right value
    "architectures": ["X"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 12,
    "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 64, "layer_types": ["sliding_attention"] * 4,
    "max_position_embeddings": 9, "max_window_layers": 0, "mlp_bias": False, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-6, "rope_interleaved": False,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 10.0, "sliding_window": 7, "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": 128,
}  # fmt: skip
EXPERTS = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 8, "norm_topk_prob": True, "num_experts": 4,
    "num_experts_per_tok": 2, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True,
}  # fmt: skip
NESTED = {
    "block_size": 8, "causal": True, "draft_vocab_size": 9, "final_logit_softcapping": 2.0, "input_embedding_scale": 1.0,
    "kind": "dflash", "mask_token_id": 3, "output_multiplier": 1.0, "target_layer_ids": [1, 2],
}  # fmt: skip
WRONG = {  # for a right value of this type
    bool: [0, 1, "false", "x", [True], {"a": 1}],
    int: [True, 1.5, math.nan, "5", [5], {"a": 1}],
    float: [True, math.nan, math.inf, "1e-6", [1.0], {"a": 1}],
    str: [5, True, [1], ["silu"], {"a": 1}],
    list: [5, True, "x", "125", {"a": 1}, [[1]], [{"a": 1}], [True]],
    dict: [5, True, "x", [1], ["factor"]],
}
WRONG_TOKENS = ["125", True, 1.5, ["1"], [True], [[1]], {"a": 1}, -1]


def told(family):
    """A whole config.json, and how it is read."""
    if family == "drafter":
        kept = {key: value for key, value in TOLD.items() if key not in ("mlp_bias", "bos_token_id")}
        own = {
            "dflash_config": NESTED,
            "is_causal": True,
            "num_target_layers": 3,
            "architectures": ["DFlashDraftModel"],
        }
        return kept | own, families.parse_drafter
    own = EXPERTS if family == "qwen3_moe" else {"mask_token_id": 3} if family == "Dream" else {}
    return TOLD | own | {"model_type": family}, families.parse


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "Dream", "drafter"])
def test_every_key_of_a_wrong_type_is_refused_by_name(family):
    whole, parse = told(family)
    parse(whole)

    def refused(key, raw):
        with pytest.raises(DflaxError, match=key):
            parse(raw) if key != "architectures" else families.is_drafter(raw)

    for key, right in whole.items():
        for value in WRONG_TOKENS if key == "eos_token_id" else WRONG[type(right)]:
            # Told twice, the settings of RoPE would be refused for their difference.
            others = {k: v for k, v in whole.items() if {k, key} != {"rope_scaling", "rope_parameters"}}
            refused(key, others | {key: value})
    for key, right in whole.get("dflash_config", {}).items():
        for value in WRONG[type(right)]:
            refused(key, whole | {"dflash_config": NESTED | {key: value}})
    for value in WRONG[float]:
        refused("factor", whole | {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": value}})


def test_end_tokens_are_ids_wherever_they_are_told():
    assert stop_token_ids({"eos_token_id": 3}, {"eos_token_id": [5, 4]}, None) == (3, 4, 5)
    for value in WRONG_TOKENS:
        with pytest.raises(DflaxError, match=r"^config\.json: eos_token_id is"):
            stop_token_ids({"eos_token_id": value}, {}, None)
        with pytest.raises(DflaxError, match=r"^generation_config\.json: eos_token_id is"):
            stop_token_ids({}, {"eos_token_id": value}, None)


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("qwen2", {}, (None,) * 28 + (4096,) * 2),
        ("qwen2", {"max_window_layers": 29}, (None,) * 29 + (4096,)),
        ("qwen2", {"sliding_window": 9}, (None,) * 28 + (9,) * 2),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 0}, (9,) * 30),
        ("qwen2", {"sliding_window": None}, ()),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, ()),
        ("qwen3", {"sliding_window": 9}, (None,) * 28 + (9,) * 2),
        ("qwen3_moe", {}, (4096,) * 30),
        ("llama", {}, ()),
    ],
)
def test_windows_that_are_left_out_are_those_of_the_family(family, keys, windows):
    """As transformers 5 fills them in: https://github.com/huggingface/transformers, configuration_qwen2.py."""
    sliding = ("layer_types", "sliding_window", "max_window_layers")
    raw = {key: value for key, value in told(family)[0].items() if key not in sliding}
    assert families.parse(raw | {"num_hidden_layers": 30} | keys).windows == windows


@pytest.mark.parametrize("name", ["arith-dflash", "smollm2-135m-dflash"])
def test_what_ships_says_what_export_writes(name):
    raw = json.loads((model.ASSETS / name / "config.json").read_text())
    ours = families.to_hf(families.parse_drafter(raw))
    assert {key: value for key, value in raw.items() if key != "dtype"} == ours
    # The PyTorch code is not in the folder, so it is named by the repository that holds it.
    assert ours["auto_map"] == {"AutoModel": "z-lab/Qwen3-8B-DFlash-b16--dflash.DFlashDraftModel"}
