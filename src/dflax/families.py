"""The families we read: Hugging Face config keys -> ModelConfig or DrafterConfig, and tensor names <-> module paths.

Every key of a config.json that changes the computation is honoured or refused by name (`Keys.refuse_unknown`); the keys that
do not are listed in `hf_keys.IRRELEVANT`. A silent mismatch would show only as low acceptance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from dflax import llada
from dflax.config import DrafterConfig, DrafterKind, ModelConfig, MoEConfig, RopeConfig
from dflax.errors import DflaxError
from dflax.hf_keys import Keys, TensorRule


@dataclass(frozen=True)
class Family:
    """What sets one model_type apart: defaults of keys that its config.json may leave out.

    sliding_window, max_window_layers: where `use_sliding_window` is true and they are left out (transformers' config classes).
    """

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: bool = False
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    diffusion: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0


FAMILIES = {
    "llama": Family("llama"),
    "qwen2": Family("qwen2", qkv_bias=True, sliding_window=4096, max_window_layers=28),
    "qwen3": Family("qwen3", qk_norm=True, sliding_window=4096, max_window_layers=28),
    "qwen3_moe": Family("qwen3_moe", qk_norm=True, moe=True, sliding_window=4096),
    "Dream": Family("Dream", qkv_bias=True, diffusion=True, sliding_window=4096, max_window_layers=28),
}


def is_drafter(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a drafter (model_type says qwen3 for both)."""
    architectures = Keys(raw).names("architectures") or [""]
    return "dflash_config" in raw or "DFlash" in architectures[0]


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """config.json of a target -> ModelConfig; DflaxError names the key, the value and what would be right."""
    model_type = raw.get("model_type")
    if llada.is_llada(raw):
        return llada.parse(raw)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, "llada"]))
        raise DflaxError(f"config.json: model_type is {model_type!r}; dflax supports {known}")
    family = FAMILIES[model_type]
    keys = Keys(raw)
    keys.only("hidden_act", "silu")
    keys.only("partial_rotary_factor", 1.0, 1)
    keys.only("rope_interleaved", False)
    keys.only("final_logit_softcapping")
    keys.only("attn_logit_softcapping")
    num_layers = keys.need("num_hidden_layers")
    num_heads = keys.need("num_attention_heads")
    hidden_size = keys.need("hidden_size")
    num_kv_heads = _kv_heads(keys, num_heads)
    attention_bias = keys.flag("attention_bias")
    if family.moe:  # Qwen3-Coder spells out what the family does anyway
        keys.only("use_qk_norm", True)
        keys.only("qkv_bias", False)
        keys.only("shared_expert_intermediate_size", 0)
    moe, moe_layers = _moe(keys, num_layers) if family.moe else (None, ())
    config = ModelConfig(
        family=family.name,
        vocab_size=keys.need("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.need("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(keys, hidden_size, num_heads),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6, float),
        rope=_rope(keys, family.rope_theta),
        tie_word_embeddings=keys.flag("tie_word_embeddings", family.tie_word_embeddings),
        max_positions=keys.number("max_position_embeddings", 2048),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias and family.name not in ("qwen2", "Dream"),
        mlp_bias=keys.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        windows=_windows(keys, num_layers, family),
        moe=moe,
        moe_layers=moe_layers,
        bos_token_id=keys.token("bos_token_id"),
        eos_token_ids=keys.tokens("eos_token_id"),
        bidirectional=family.diffusion,
        shifted_logits=family.diffusion,
        mask_token_id=keys.mask_token_id() if family.diffusion else None,
    )
    keys.refuse_unknown()
    return config


def parse_drafter(raw: Mapping[str, Any]) -> DrafterConfig:
    """config.json of a drafter (z-lab layout; newer files nest block_size and others in dflash_config) -> DrafterConfig."""
    keys = Keys(raw)
    nested = Keys(keys.table("dflash_config"), "config.json: dflash_config.")
    keys.only("hidden_act", "silu")
    keys.only("partial_rotary_factor", 1.0, 1)
    keys.only("rope_interleaved", False)

    def either(key: str, default: Any = None) -> Any:
        inner, outer = nested.get(key), keys.get(key)
        if inner is not None and outer is not None and inner != outer:
            raise DflaxError(f"config.json: {key} is {outer!r} but dflash_config.{key} is {inner!r}; keep one")
        value = inner if inner is not None else outer
        return default if value is None else value

    def must(key: str) -> Any:
        value = either(key)
        if value is None:
            raise DflaxError(f"config.json of the drafter has no {key!r}, at the top level or in dflash_config")
        return value

    def number(key: str, default: Any, kind: type) -> Any:
        return Keys({key: either(key)}).number(key, default, kind)

    num_layers = keys.need("num_hidden_layers")
    num_heads = keys.need("num_attention_heads")
    hidden_size = keys.need("hidden_size")
    windows = _windows(keys, num_layers, FAMILIES["qwen3"])
    taps = must("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(t) is int and t >= 0 for t in taps):
        raise DflaxError(f"config.json: target_layer_ids is {taps!r}; it must be a list of layer numbers")
    block_size = must("block_size")
    if not isinstance(block_size, int) or block_size < 2:
        raise DflaxError(
            f"config.json: block_size is {block_size!r}; it must be an integer of at least 2 (it counts the anchor)"
        )
    num_target_layers = keys.number("num_target_layers", None)
    if num_target_layers is not None and max(taps) >= num_target_layers:
        raise DflaxError(f"config.json: target_layer_ids {taps} do not fit num_target_layers {num_target_layers}")
    vocab_size = keys.need("vocab_size")
    mask_token_id = must("mask_token_id")
    if type(mask_token_id) is not int or not 0 <= mask_token_id < vocab_size:
        raise DflaxError(f"config.json: mask_token_id {mask_token_id!r} is outside the vocabulary of {vocab_size}")
    kind = nested.get("kind", "dflash")
    if kind not in get_args(DrafterKind):
        raise DflaxError(
            f"config.json: dflash_config.kind is {kind!r}; dflax supports {', '.join(get_args(DrafterKind))}"
        )
    keys.flag("tie_word_embeddings")  # the embedding and the head are the target's
    config = DrafterConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.need("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(keys, num_heads),
        head_dim=_head_dim(keys, hidden_size, num_heads),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6, float),
        rope=_rope(keys, 1e6),
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(taps),
        num_target_layers=num_target_layers,
        max_positions=keys.number("max_position_embeddings", 40960),
        attention_bias=keys.flag("attention_bias"),
        causal=_causal(keys.flag("is_causal", None), nested.flag("causal", None), windows, num_layers),
        windows=windows,
        input_embedding_scale=float(number("input_embedding_scale", 1.0, float)),
        output_multiplier=float(number("output_multiplier", 1.0, float)),
        final_logit_softcapping=number("final_logit_softcapping", None, float),
        draft_vocab_size=number("draft_vocab_size", None, int),
        kind=kind,
    )
    keys.tokens("eos_token_id")
    keys.refuse_unknown()
    unknown = sorted(set(nested.raw) - nested.used)
    if unknown:
        raise DflaxError(f"config.json: dflash_config has keys that dflax does not know: {', '.join(unknown)}")
    return config


def _causal(
    is_causal: bool | None, causal: bool | None, windows: tuple[int | None, ...], num_layers: int
) -> tuple[bool, ...]:
    """Causal inside the block, per layer: is_causal wins, then dflash_config.causal, then sliding layers are (spec of vLLM and z-lab)."""
    for choice in (is_causal, causal):
        if choice is not None:
            return (choice,) * num_layers
    return tuple(w is not None for w in windows) or (False,) * num_layers


def _kv_heads(keys: Keys, num_heads: int) -> int:
    num_kv_heads = keys.number("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise DflaxError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(keys: Keys, hidden_size: int, num_heads: int) -> int:
    head_dim = keys.number("head_dim", None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise DflaxError(
                f"config.json: no head_dim, and hidden_size {hidden_size} is no multiple of {num_heads} heads"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise DflaxError(f"config.json: head_dim is {head_dim}; rotary embedding needs an even number")
    return head_dim


def _rope(keys: Keys, default_theta: float) -> RopeConfig:
    """Old keys (rope_theta, rope_scaling) and new (rope_parameters); what is told twice must be told alike."""
    told = [Keys(dict(keys.table(name)), f"config.json: {name}.") for name in ("rope_scaling", "rope_parameters")]
    thetas = [theta for part in (keys, *told) if (theta := part.number("rope_theta", None, float))]
    settings = lambda part: {key: value for key, value in part.raw.items() if key != "rope_theta"}
    told = [part for part in told if settings(part)]
    if len(set(thetas)) > 1 or any(settings(part) != settings(told[0]) for part in told):
        raise DflaxError(
            "config.json: rope_theta, rope_scaling and rope_parameters contradict each other; keep one of them"
        )
    theta = float(thetas[0] if thetas else default_theta)
    scaling = told[0] if told else Keys({})
    scaling.only("partial_rotary_factor", 1.0, 1)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    scaling.ignore("type", "rope_theta")
    if kind == "default":
        scaling.only("factor", 1.0, 1)
        rope = RopeConfig(theta=theta)
    elif kind == "linear":
        rope = RopeConfig(theta, "linear", _part(scaling, "factor"))
    elif kind == "llama3":
        factor, low, high = (_part(scaling, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        rope = RopeConfig(theta, "llama3", factor, low, high, int(_part(scaling, "original_max_position_embeddings")))
    else:
        raise DflaxError(f"config.json: rope type is {kind!r}; dflax supports default, linear and llama3")
    unknown = sorted(set(scaling.raw) - scaling.used)
    if unknown:
        raise DflaxError(f"config.json: rope settings {', '.join(unknown)} are not known for rope type {kind!r}")
    return rope


def _part(scaling: Keys, key: str) -> float:
    value = scaling.number(key, None, float)
    return float(scaling.refuse(key, "a number above 0") if value is None else value)


def _windows(keys: Keys, num_layers: int, family: Family) -> tuple[int | None, ...]:
    """Sliding windows per layer from layer_types, or from use_sliding_window and max_window_layers of older files; () = none."""
    layer_types = keys.names("layer_types")
    use = keys.flag("use_sliding_window")
    # A window of null is none; one that is left out is the family's.
    window = keys.number("sliding_window", family.sliding_window if use and "sliding_window" not in keys.raw else None)
    first = keys.count("max_window_layers", family.max_window_layers)
    if layer_types is not None:
        if set(layer_types) - {"full_attention", "sliding_attention"} or len(layer_types) != num_layers:
            raise DflaxError(
                f"config.json: layer_types needs {num_layers} entries, each full_attention or sliding_attention"
            )
        sliding = [kind == "sliding_attention" for kind in layer_types]
    else:
        sliding = [use and window is not None and i >= first for i in range(num_layers)]
    if not any(sliding):
        return ()
    if window is None:
        raise DflaxError("config.json: layers slide but there is no sliding_window; it must be a whole number above 0")
    return tuple(window if s else None for s in sliding)


def _moe(keys: Keys, num_layers: int) -> tuple[MoEConfig, tuple[bool, ...]]:
    dense = keys.numbers("mlp_only_layers")
    step = keys.number("decoder_sparse_step", 1)
    num_experts = keys.need("num_experts")
    per_token = keys.need("num_experts_per_tok")
    if per_token > num_experts:
        raise DflaxError(f"config.json: num_experts_per_tok {per_token} exceeds num_experts {num_experts}")
    moe = MoEConfig(num_experts, per_token, keys.need("moe_intermediate_size"), keys.flag("norm_topk_prob"))
    return moe, tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


# ---------------------------------------------------------------------------------------------------------------------
# config.json out


def to_hf(config: ModelConfig | DrafterConfig) -> dict[str, Any]:
    """The config.json that engines of the PyTorch world read; parse(to_hf(c)) == c."""
    if isinstance(config, ModelConfig) and config.family in llada.FAMILIES:
        return llada.to_hf(config)
    common = {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_out(config.rope),
        **_windows_out(config.windows),
    }
    if isinstance(config, DrafterConfig):
        return {**common, **_drafter_out(config)}
    architecture = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "Dream": "DreamModel",
    }[config.family]
    out = {
        **common,
        "architectures": [architecture],
        "model_type": config.family,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) != 1 else config.eos_token_ids[0],
    }
    if config.family == "llama":
        out |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    elif config.family == "Dream":
        home = "Dream-org/Dream-v0-Instruct-7B"
        out |= {"mask_token_id": config.mask_token_id}
        out |= {"auto_map": llada.modules(home, "configuration_dream.DreamConfig", "modeling_dream.DreamModel")}
    elif config.family != "qwen2":
        out |= {"attention_bias": config.qkv_bias}
    if config.moe is not None:
        out |= {
            "num_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.experts_per_token,
            "moe_intermediate_size": config.moe.intermediate_size,
            "norm_topk_prob": config.moe.norm_topk_prob,
            "mlp_only_layers": [i for i, sparse in enumerate(config.moe_layers) if not sparse],
            "decoder_sparse_step": 1,
        }
    return {k: v for k, v in out.items() if v is not None and v != []} | ({"mlp_only_layers": []} if config.moe else {})


DRAFTER_CODE = "z-lab/Qwen3-8B-DFlash-b16--dflash.DFlashDraftModel"
"""The PyTorch class of every drafter, by a repository that holds it: our folders hold no code. (SGLang and vLLM go by `architectures`.)"""


def _drafter_out(config: DrafterConfig) -> dict[str, Any]:
    nested: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    defaults = {
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "draft_vocab_size": None,
    }
    nested |= {k: getattr(config, k) for k, v in (defaults | {"kind": "dflash"}).items() if getattr(config, k) != v}
    out = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": DRAFTER_CODE},
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "block_size": config.block_size,
        "dflash_config": nested,
        "tie_word_embeddings": False,
    }
    if config.num_target_layers is not None:
        out["num_target_layers"] = config.num_target_layers
    causal = config.causal or (False,) * config.num_layers
    if causal != _causal(None, None, config.windows, config.num_layers):
        if len(set(causal)) > 1:
            raise DflaxError(
                "a drafter whose layers differ in causality beyond the sliding rule has no config.json form"
            )
        out["is_causal"] = causal[0]
    return out


def _rope_out(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    out: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        out |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return out


def _windows_out(windows: tuple[int | None, ...]) -> dict[str, Any]:
    if not windows:
        return {}
    return {
        "sliding_window": next(w for w in windows if w is not None),
        "use_sliding_window": True,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tensor names


def tensor_rules(config: ModelConfig | DrafterConfig) -> dict[str, TensorRule]:
    """Dotted module path -> where the checkpoint keeps it. Our module paths are the official names without "model."."""
    if isinstance(config, DrafterConfig):
        return {path: TensorRule((path,)) for path in _drafter_paths(config)}
    rules = {path: TensorRule((f"model.{path}",)) for path in _decoder_paths(config)}
    if config.family == "llada":
        return llada.dense_rules(rules, config.tie_word_embeddings)
    if not config.tie_word_embeddings:
        rules["lm_head.weight"] = TensorRule(("lm_head.weight",))
    for i in range(config.num_layers):
        if config.moe is not None and config.is_moe(i):
            for part in ("gate_proj", "up_proj", "down_proj"):
                experts = (f"model.layers.{i}.mlp.experts.{e}.{part}.weight" for e in range(config.moe.num_experts))
                rules[f"layers.{i}.mlp.experts.{part}.weight"] = TensorRule(tuple(experts), stacked=True)
    return rules


def _decoder_paths(config: ModelConfig) -> list[str]:
    paths = ["embed_tokens.weight", "norm.weight"]
    for i in range(config.num_layers):
        paths += _attention_paths(i, config.qkv_bias, config.out_bias, config.qk_norm)
        if config.is_moe(i):
            paths.append(f"layers.{i}.mlp.gate.weight")
            if config.moe is not None and config.moe.expert_bias:
                paths.append(f"layers.{i}.mlp.expert_bias")
        else:
            paths += _mlp_paths(i, config.mlp_bias)
    return paths


def _drafter_paths(config: DrafterConfig) -> list[str]:
    paths = ["fc.weight", "hidden_norm.weight", "norm.weight"]
    if config.fused:
        paths.append("input_proj.weight")
    for i in range(config.num_layers):
        paths += _attention_paths(i, config.attention_bias, config.attention_bias, qk_norm=True) + _mlp_paths(
            i, bias=False
        )
    return paths


def _attention_paths(layer: int, qkv_bias: bool, out_bias: bool, qk_norm: bool) -> list[str]:
    at = f"layers.{layer}"
    paths = [f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight"]
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        paths.append(f"{at}.self_attn.{part}.weight")
        if out_bias if part == "o_proj" else qkv_bias:
            paths.append(f"{at}.self_attn.{part}.bias")
    if qk_norm:
        paths += [f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight"]
    return paths


def _mlp_paths(layer: int, bias: bool) -> list[str]:
    parts = (f"layers.{layer}.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
    return [f"{p}.{kind}" for p in parts for kind in (["weight", "bias"] if bias else ["weight"])]
