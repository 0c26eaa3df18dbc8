"""LLaDA, dense and with experts: config.json -> ModelConfig and back, and the dense model's tensor names.

Both call themselves `model_type: llada`. The dense model's keys and names are OLMo's; the one with experts has the usual ones, without
its mask token (156895 for LLaDA-MoE-7B-A1B), which `dflax.load(..., mask_token_id=...)` gives.
"""

from collections.abc import Mapping
from typing import Any

from dflax.config import ModelConfig, MoEConfig, RopeConfig
from dflax.errors import DflaxError
from dflax.hf_keys import Keys, TensorRule

FAMILIES = ("llada", "llada_moe")

NAMES = {
    "embed_tokens.weight": "wte.weight",
    "norm.weight": "ln_f.weight",
    "lm_head.weight": "ff_out.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
"""Module paths of a layer (without "layers.N." and the parameter's own name) or outside of them -> official names. `ff_out` is the
down projection in a block and the head outside."""


def is_llada(raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") in ("llada", "lladamoe", "llada_moe")


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """config.json of either kind; DflaxError names the key, the value and what would be right."""
    keys = Keys(raw)
    moe = "num_experts" in raw or raw.get("model_type") != "llada"
    config = _parse_moe(keys) if moe else _parse_dense(keys)
    keys.refuse_unknown()
    return config


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """parse(to_hf(c)) == c."""
    eos = list(config.eos_token_ids)
    out = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "mask_token_id": config.mask_token_id,
        "model_type": "llada",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": config.vocab_size,
        **(_dense_out(config) if config.moe is None else _moe_out(config, config.moe)),
    }
    return {key: value for key, value in out.items() if value is not None}


def dense_rules(rules: Mapping[str, TensorRule], tied: bool) -> dict[str, TensorRule]:
    """Dotted module path -> official name, for the paths of `rules` and the head."""

    def name(path: str) -> str:
        if not path.startswith("layers."):
            return f"model.transformer.{NAMES[path]}"
        _, layer, rest = path.split(".", 2)
        module, leaf = rest.rsplit(".", 1)
        return f"model.transformer.blocks.{layer}.{NAMES[module]}.{leaf}"

    paths = [*rules, *([] if tied else ["lm_head.weight"])]
    return {path: TensorRule((name(path),)) for path in paths}


def modules(repository: str, config: str, model: str) -> dict[str, str]:
    """`auto_map` of a folder that does not hold its own PyTorch code: transformers fetches the modules from `repository`."""
    return {"AutoConfig": f"{repository}--{config}", "AutoModel": f"{repository}--{model}"}


def ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids of a key that holds one or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _parse_dense(keys: Keys) -> ModelConfig:
    # Left out, these would be swiglu, sequential, default, False and True: the official class takes OLMo's defaults.
    keys.must("activation_type", "silu")
    keys.must("block_type", "llama")
    keys.must("layer_norm_type", "rms")
    keys.must("rope", True)
    keys.must("include_bias", False)
    keys.only("block_group_size", 1)
    keys.only("layer_norm_with_affine", True)
    keys.only("rope_full_precision", True)
    for key in (
        "alibi",
        "attention_layer_norm",
        "bias_for_layer_norm",
        "input_emb_norm",
        "scale_logits",
    ):
        keys.only(key, False)
    keys.only("rope_scaling")
    keys.ignore(
        "alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "flash_attention", "init_cutoff_factor",
        "init_device", "init_fn", "init_std", "precision", "residual_dropout",
    )  # fmt: skip
    d_model, heads = keys.need("d_model"), keys.need("n_heads")
    if d_model % heads or d_model // heads % 2:
        raise DflaxError(f"config.json: d_model {d_model} must be an even multiple of n_heads {heads}")
    kv_heads = keys.number("n_kv_heads", 1 if keys.get("multi_query_attention") else heads)
    if heads % kv_heads:
        raise DflaxError(f"config.json: n_heads {heads} is no multiple of n_kv_heads {kv_heads}")
    vocab_size = keys.need("vocab_size")
    keys.only("embedding_size", vocab_size)
    ratio = keys.number("mlp_ratio", 4)
    return ModelConfig(
        family="llada",
        vocab_size=vocab_size,
        hidden_size=d_model,
        intermediate_size=keys.number("mlp_hidden_size", ratio * d_model),
        num_layers=keys.need("n_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=d_model // heads,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-5, float),
        rope=RopeConfig(theta=float(keys.number("rope_theta", 10000.0, float))),
        tie_word_embeddings=bool(keys.get("weight_tying", True)),
        max_positions=keys.number("max_sequence_length", 1024),
        qkv_bias=bool(keys.get("include_qkv_bias", False)),
        bos_token_id=keys.get("bos_token_id"),
        eos_token_ids=ids(keys.get("eos_token_id")),
        bidirectional=True,
        mask_token_id=keys.mask_token_id(),
    )


def _dense_out(config: ModelConfig) -> dict[str, Any]:
    code = modules("GSAI-ML/LLaDA-8B-Instruct", "configuration_llada.LLaDAConfig", "modeling_llada.LLaDAModelLM")
    return {
        "activation_type": "silu",
        "alibi": False,
        "architectures": ["LLaDAModelLM"],
        "attention_layer_norm": False,
        "auto_map": code | {"AutoModelForCausalLM": code["AutoModel"]},
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": config.hidden_size,
        "embedding_size": config.vocab_size,
        "include_bias": False,
        "include_qkv_bias": config.qkv_bias,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "max_sequence_length": config.max_positions,
        "mlp_hidden_size": config.intermediate_size,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "n_layers": config.num_layers,
        "rope": True,
        "rope_full_precision": True,
        "scale_logits": False,
        "weight_tying": config.tie_word_embeddings,
    }


def _parse_moe(keys: Keys) -> ModelConfig:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("clip_qkv")
    keys.only("moe_router_score_function", "softmax")
    keys.only("partial_rotary_factor", 1.0, 1)
    keys.only("rope_scaling")
    keys.only("routed_scaling_factor", 1.0, 1)
    keys.only("router_num_group", 1)
    keys.only("router_topk_group", 1)
    keys.only("shared_expert_intermediate_size", 0)
    layers, heads = keys.need("num_hidden_layers"), keys.need("num_attention_heads")
    hidden = keys.need("hidden_size")
    kv_heads = keys.number("num_key_value_heads", heads)
    head_dim = keys.number("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise DflaxError(f"config.json: {heads} heads, {kv_heads} kv heads and head_dim {head_dim} do not fit together")
    experts, per_token = keys.need("num_experts"), keys.need("num_experts_per_tok")
    if per_token > experts:
        raise DflaxError(f"config.json: num_experts_per_tok {per_token} exceeds num_experts {experts}")
    sparse = keys.get("moe_layer_freq", [1] * layers)
    if not isinstance(sparse, list) or len(sparse) != layers or set(sparse) - {0, 1}:
        raise DflaxError(f"config.json: moe_layer_freq is {sparse!r}; it must be a list of {layers} zeros and ones")
    width = keys.need("expert_intermediate_size")
    return ModelConfig(
        family="llada_moe",
        vocab_size=keys.need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.number("dense_intermediate_size", width),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-5, float),
        rope=RopeConfig(theta=float(keys.number("rope_theta", 10000.0, float))),
        tie_word_embeddings=bool(keys.get("tie_word_embeddings", False)),
        max_positions=keys.number("max_position_embeddings", 4096),
        qk_norm=bool(keys.get("qk_layernorm", False)),
        moe=MoEConfig(
            experts,
            per_token,
            width,
            norm_topk_prob=bool(keys.get("norm_topk_prob", False)),
            expert_bias=bool(keys.get("moe_router_enable_expert_bias", False)),
        ),
        moe_layers=tuple(bool(layer) for layer in sparse),
        bos_token_id=keys.get("bos_token_id"),
        eos_token_ids=ids(keys.get("eos_token_id")),
        bidirectional=True,
        mask_token_id=keys.mask_token_id(),
    )


def _moe_out(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    home = "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"
    code = modules(home, "configuration_lladamoe.LLaDAConfig", "modeling_lladamoe.LLaDAMoEModelLM")
    return {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_bias": False,
        "auto_map": code | {"AutoModelForCausalLM": code["AutoModel"]},
        "dense_intermediate_size": config.intermediate_size,
        "expert_intermediate_size": moe.intermediate_size,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_positions,
        "moe_layer_freq": [int(sparse) for sparse in config.moe_layers],
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": moe.norm_topk_prob,
        "num_attention_heads": config.num_heads,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "partial_rotary_factor": 1,
        "qk_layernorm": config.qk_norm,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
