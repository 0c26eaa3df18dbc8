"""GGUF files under Hugging Face names: tensors dequantized to float32 one by one, a config.json made of the metadata.

llama.cpp's names are translated, and for the llama architecture the q and k rows are put back from its interleaved RoPE to the
half-split RoPE of Hugging Face. The tokenizer is in `gguf_tokenizer`.
"""

import functools
import importlib
import math
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from dflax.checkpoint.gguf_file import GGUFFile, open_gguf
from dflax.checkpoint.gguf_tokenizer import tokenizer
from dflax.errors import DflaxError

__all__ = ["GGUFSource", "config", "tokenizer"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The factor scaling of RoPE is stored as a tensor of divisors; the settings behind it are those of every Llama 3.1 to 3.3 release.
ROPE_FREQS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

UNUSED = ("vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor")
"""Keys of an architecture that change nothing for the scalings that dflax knows."""


class GGUFSource:
    """The tensors of a GGUF file (a `TensorSource`), float32."""

    def __init__(self, path: str | os.PathLike[str]):
        self._file: GGUFFile | None = open_gguf(path)
        self._config = _config(self._file)
        self._quants = _quants()
        self._stored = {}
        for name in self._file.tensors:
            if name != ROPE_FREQS:
                self._stored[_hf_name(self._file, name)] = name
                self._extent(name)

    def names(self) -> list[str]:
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._open().tensors[self._place(name)].shape

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        place = self._place(name)
        stored = self._open().tensors[place]
        kind, start, end = self._extent(place)
        values = np.asarray(self._quants.dequantize(self._open().data[start:end].view(_bits(kind)), kind), np.float32)
        values = values.reshape(stored.shape)
        heads = self._permuted_heads(name)
        if heads:
            values = values.reshape(heads, -1, 2, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
        return values[index] if index else values.copy() if values.base is not None else values

    def close(self) -> None:
        self._file = None

    def _open(self) -> GGUFFile:
        if self._file is None:
            raise DflaxError("the GGUF file is closed")
        return self._file

    def _place(self, name: str) -> str:
        if name not in self._stored:
            raise DflaxError(f"{self._open().path} has no tensor {name}")
        return self._stored[name]

    def _extent(self, place: str) -> tuple[Any, int, int]:
        """Type and byte range of a tensor; refuses a type that cannot be dequantized and a file that ends too early."""
        file = self._open()
        stored = file.tensors[place]
        gguf = _package()
        try:
            kind = gguf.GGMLQuantizationType(stored.kind)
            per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise DflaxError(
                f"{file.path}: {place} has the unknown type {stored.kind}; a newer gguf package may know it"
            ) from error
        if stored.shape[-1] % per_block:
            raise DflaxError(
                f"{file.path}: {place} has rows of {stored.shape[-1]}, no multiple of its {kind.name} blocks of {per_block}"
            )
        end = stored.offset + math.prod(stored.shape) // per_block * bytes_per_block
        if end > file.data.size:
            raise DflaxError(f"{file.path} is truncated: {place} ends {end - file.data.size} bytes after the file does")
        return kind, stored.offset, end

    def _permuted_heads(self, name: str) -> int:
        """How many heads of rows llama.cpp interleaved in this tensor, 0 for none."""
        if self._config["model_type"] != "llama":
            return 0
        if ".q_proj." in name:
            return self._config["num_attention_heads"]
        return self._config["num_key_value_heads"] if ".k_proj." in name else 0


def config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A config.json in Hugging Face's keys from the metadata; what dflax does not support is refused by name."""
    return _config(open_gguf(path))


def _config(file: GGUFFile) -> dict[str, Any]:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise DflaxError(
            f"{file.path}: GGUF architecture is {architecture!r}; dflax supports {', '.join(ARCHITECTURES)}"
        )

    read: set[str] = set(UNUSED)

    def get(key: str, default: Any = None) -> Any:
        read.add(key)
        return metadata.get(f"{architecture}.{key}", default)

    def need(key: str, kind: type = int) -> Any:
        value = get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DflaxError(f"{file.path}: {architecture}.{key} is {value!r}; dflax needs one {kind.__name__} there")
        return value

    for key in ("expert_count", "attention.sliding_window"):
        if get(key):
            raise DflaxError(
                f"{file.path}: {architecture}.{key} is {get(key)}; dflax does not support it in GGUF files"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise DflaxError(f"{file.path} has no tensor token_embd.weight")
    heads = need("attention.head_count")
    head_dim = get("attention.key_length") or need("embedding_length") // heads
    if get("attention.value_length", head_dim) != head_dim:
        raise DflaxError(
            f"{file.path}: keys and values have different widths ({head_dim} and {get('attention.value_length')})"
        )
    if get("rope.dimension_count", head_dim) != head_dim:
        raise DflaxError(
            f"{file.path}: {architecture}.rope.dimension_count is {get('rope.dimension_count')}, not the head width {head_dim}"
        )
    theta = float(get("rope.freq_base", 10000.0))
    out = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": need("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, get, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(metadata),
    }
    if architecture == "llama":
        out["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        out["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    unknown = sorted(key for key, value in own.items() if key not in read and value)
    if unknown:
        raise DflaxError(
            f"{file.path}: {architecture}.{unknown[0]} is {own[unknown[0]]!r}; dflax does not know this key"
        )
    return out


def _rope_scaling(file: GGUFFile, get: Callable[..., Any], theta: float, head_dim: int) -> dict[str, Any] | None:
    """As llama.cpp reads it: a factor without a type is linear, and has an older name."""
    factor = get("rope.scaling.factor") or get("rope.scale_linear") or 1.0
    kind = get("rope.scaling.type", "none" if factor == 1 else "linear")
    if ROPE_FREQS in file.tensors:
        stored = file.tensors[ROPE_FREQS]
        divisors = file.data[stored.offset : stored.offset + 4 * math.prod(stored.shape)].view(np.float32)
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3}
        if kind != "none" or not np.allclose(divisors, _llama3_divisors(scaling, theta, head_dim), rtol=1e-3):
            raise DflaxError(
                f"{file.path}: {ROPE_FREQS} is not the scaling of Llama 3.1 to 3.3, the only one dflax knows in GGUF files"
            )
        return scaling
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    key = f"{file.metadata['general.architecture']}.rope.scaling.type"
    raise DflaxError(f"{file.path}: {key} is {kind!r}; dflax supports none, linear and the scaling of Llama 3")


def _llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """What the llama3 rule divides each inverse frequency by: 1 for short waves, `factor` for long ones, smooth between."""
    wave = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wave
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _ends(metadata: dict[str, Any]) -> list[int]:
    """End tokens: end of text and, where the file knows one, end of turn."""
    keys = ("eos_token_id", "eot_token_id")
    return sorted({metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata})


def _hf_name(file: GGUFFile, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    layer, part, kind = match.groups() if match else (None, None, None)
    known = TOP if layer is None else LAYER
    if part not in known:
        raise DflaxError(
            f"{file.path}: tensor {name} has no counterpart in dflax's {file.metadata['general.architecture']} model"
        )
    return f"{known[part]}.{kind}" if layer is None else f"model.layers.{layer}.{known[part]}.{kind}"


def _bits(kind: Any) -> type:
    """What the gguf package wants to see: floats as floats, quantized blocks and bfloat16 as bytes."""
    return {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)


@functools.cache
def _package() -> Any:
    try:
        return importlib.import_module("gguf.constants")
    except ImportError as error:
        raise DflaxError("reading GGUF weights needs the gguf package: pip install gguf") from error


@functools.cache
def _quants() -> Any:
    _package()
    return importlib.import_module("gguf.quants")
