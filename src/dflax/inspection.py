"""What a checkpoint is, without reading its weights: `dflax inspect`.

Only headers and JSON files are looked at, so a model of any size takes seconds and no memory.
"""

import importlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from safetensors import safe_open
from tyro.conf import Positional

from dflax import families, hf_keys
from dflax.checkpoint import TensorSource, gguf, huggingface, match
from dflax.checkpoint.gguf_file import open_gguf
from dflax.config import DrafterConfig, ModelConfig, RopeConfig
from dflax.errors import DflaxError
from dflax.infer.fit import check_pair
from dflax.model import Model, build, ignored_tensors, locate, read_draft_ids
from dflax.models import params
from dflax.text import load_tokenizer, stop_token_ids

BYTES = {"float32": 4, "bfloat16": 2}
READ_IN_VAIN = {"tie_word_embeddings", "eos_token_id"}  # of a drafter: the table, the head and the end are the target's


@dataclass(frozen=True)
class InspectConfig:
    """Say what a checkpoint is: shape, keys of config.json that matter, tensors, tokenizer, memory.

    Weights are not read. If the checkpoint would not load, or the drafter does not fit, the reasons are told after the report and
    the exit code is 2.
    """

    path: Positional[str]
    """A folder, a .gguf file, a hub id or a built-in name."""
    drafter: str | None = None
    """Say also whether this drafter fits."""
    json: bool = False
    """Print the report as JSON."""


def run(config: InspectConfig) -> None:
    """Prints the report; DflaxError with all problems at its end."""
    report = inspect(config.path, config.drafter)
    if config.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        console = Console()
        for title, lines in render(report).items():
            console.out(title, style="bold", highlight=False)
            for line in lines:
                console.out(f"  {line}", highlight=False)
    if report["problems"]:
        raise DflaxError("; ".join(report["problems"]))


def inspect(name: str, drafter: str | None = None) -> dict[str, Any]:
    """Everything that can be told about a checkpoint, in values that JSON has.

    Keys: name, path, format, kind ("target" or "drafter"), model (what it is, by property), keys (of config.json: "used",
    "ignored", "unread" where reading stopped), stored (dtype -> parameters), tensors, text (tokenizer, chat_template,
    stop_tokens), memory (bytes by dtype), fits (what targets a drafter is for), problems (why it would not load).

    Raises:
      DflaxError: there is nothing to inspect: no such place, no config.json.
    """
    path = locate(name)
    is_gguf = path.suffix == ".gguf"
    raw = gguf.config(path) if is_gguf else huggingface.config(path)
    watched = _Watched(raw)
    kind = "drafter" if families.is_drafter(raw) else "target"
    report: dict[str, Any] = {
        "name": name,
        "path": str(path),
        "format": "GGUF" if is_gguf else "safetensors",
        "kind": kind,
    }
    report |= dict.fromkeys(("model", "stored", "tensors", "memory", "fits"))
    problems = report["problems"] = []
    config: ModelConfig | DrafterConfig | None = None
    try:
        config = families.parse_drafter(watched) if kind == "drafter" else families.parse(watched)
        report["model"] = _describe(config)
    except DflaxError as error:
        problems.append(str(error))
    report["keys"] = _keys(watched, kind, parsed=config is not None)
    try:
        source = gguf.GGUFSource(path) if is_gguf else huggingface.SafetensorsSource(path)
        try:
            report["stored"] = _stored(path)
            if config is not None:
                report |= _weights(config, source)
        finally:
            source.close()
    except DflaxError as error:
        problems.append(str(error))
    try:
        report["text"] = _text(path, raw)
    except DflaxError as error:
        problems.append(str(error))
    if isinstance(config, DrafterConfig):
        report["fits"] = _wanted(config)
    if drafter is not None and not problems:
        try:
            check_pair(_abstract(name), _abstract(drafter))
            report["drafter"] = f"{drafter} fits"
        except DflaxError as error:
            problems.append(str(error))
    return report


def render(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """The report for people: title -> lines."""
    out = {f"{report['name']}: a {report['kind']}, {report['format']}": [report["path"]]}
    if report["model"] is not None:
        out["model"] = _pairs(report["model"])
    if report["fits"] is not None:
        out["fits targets with"] = _pairs(report["fits"])
    if report["stored"] is not None:
        stored = ", ".join(f"{count:,} as {kind}" for kind, count in report["stored"].items())
        out["tensors"] = [f"stored: {stored}", *([report["tensors"]] if report["tensors"] else [])]
    if report["memory"] is not None:
        out["memory"] = _pairs({what: _sizes(sizes) for what, sizes in report["memory"].items()})
    if report.get("text") is not None:
        tokens = report["text"]["stop_tokens"]
        stops = ", ".join(i if token is None else f"{i} {token}" for i, token in tokens.items())
        template = "yes" if report["text"]["chat_template"] else "no"
        tokenizer = report["text"]["tokenizer"] or "none; give prompts as token ids"
        out["text"] = _pairs({"tokenizer": tokenizer, "chat template": template, "stop tokens": stops or "none"})
    titles = {
        "used": "config.json: keys that matter",
        "ignored": "config.json: keys that change nothing (or are null)",
        "unread": "config.json: keys that are refused, or come after one that is",
    }
    for verdict, title in titles.items():
        if found := report["keys"][verdict]:
            out[title] = (
                [", ".join(found)] if verdict == "ignored" else _pairs({k: json.dumps(v) for k, v in found.items()})
            )
    if report.get("drafter"):
        out["drafter"] = [report["drafter"]]
    return out


class _Watched(dict[str, Any]):
    """A config.json that remembers which keys were asked for."""

    def __init__(self, raw: Mapping[str, Any]):
        super().__init__(
            {k: _Watched(v) if k == "dflash_config" and isinstance(v, dict) else v for k, v in raw.items()}
        )
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def _keys(raw: _Watched, kind: str, parsed: bool) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {"used": {}, "ignored": {}, "unread": {}}
    vain = READ_IN_VAIN if kind == "drafter" else set()
    for key, value in raw.items():
        if isinstance(value, _Watched):
            for verdict, inner in _keys(value, "nested", parsed).items():
                out[verdict] |= {f"{key}.{k}": v for k, v in inner.items()}
        elif value is None or key in vain or (key not in raw.asked and key in hf_keys.IRRELEVANT):
            out["ignored"][key] = value
        else:
            out["used" if key in raw.asked else "unread"][key] = value
    if parsed:
        out["ignored"] |= out["unread"]
        out["unread"] = {}
    return out


def _diffusion(config: ModelConfig) -> dict[str, Any]:
    mask = config.mask_token_id
    return {
        "attention": "both ways: a diffusion language model, for dflax denoise",
        "logits": "row i - 1 predicts token i" if config.shifted_logits else "row i predicts token i",
        "mask token": "not in config.json; give mask_token_id when loading" if mask is None else mask,
    }


def _describe(config: ModelConfig | DrafterConfig) -> dict[str, Any]:
    out: dict[str, Any] = {
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "feed-forward": config.intermediate_size,
        "heads": f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} for keys and values",
        "vocabulary": config.vocab_size,
        "positions": config.max_positions,
        "rope": _rope(config.rope),
        "windows": _windows(config.windows),
    }
    if isinstance(config, DrafterConfig):
        causal = [i for i in range(config.num_layers) if config.is_causal(i)]
        return {
            "kind": config.kind,
            "block size": config.block_size,
            "tapped target layers": list(config.target_layer_ids),
            "mask token": config.mask_token_id,
            "causal layers": causal or "none",
            "draft vocabulary": config.draft_vocab_size or "all tokens",
            **out,
        }
    biases = {"query, key, value": config.qkv_bias, "output": config.out_bias, "feed-forward": config.mlp_bias}
    moe = config.moe
    experts = "none"
    if moe is not None:
        sparse = _ranges([i for i in range(config.num_layers) if config.is_moe(i)])
        norm = "renormalised" if moe.norm_topk_prob else "not renormalised"
        experts = f"{moe.num_experts} of width {moe.intermediate_size}, {moe.experts_per_token} per token ({norm}), layers {sparse}"
    return {
        "family": config.family,
        **({} if not config.bidirectional else _diffusion(config)),
        **out,
        "tied head": "yes" if config.tie_word_embeddings else "no",
        "norm of queries and keys": "yes" if config.qk_norm else "no",
        "biases": ", ".join(part for part, there in biases.items() if there) or "none",
        "experts": experts,
    }


def _rope(rope: RopeConfig) -> str:
    text = f"theta {rope.theta:g}"
    if rope.scaling == "linear":
        return f"{text}, positions divided by {rope.factor:g}"
    if rope.scaling == "llama3":
        return (
            f"{text}, llama3 scaling by {rope.factor:g} from {rope.original_max_positions} positions "
            f"(frequency factors {rope.low_freq_factor:g} to {rope.high_freq_factor:g})"
        )
    return text


def _windows(windows: tuple[int | None, ...]) -> str:
    sliding = [i for i, window in enumerate(windows) if window is not None]
    return f"{windows[sliding[0]]} tokens in layers {_ranges(sliding)}" if sliding else "none"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _weights(config: ModelConfig | DrafterConfig, source: TensorSource) -> dict[str, Any]:
    """Parameters and memory as the config has them; DflaxError if the tensors are not those."""
    shapes = {path: leaf.shape for path, leaf in params.flatten(_module(config)).items()}
    places = match(shapes, families.tensor_rules(config), source, ignored_tensors(config))
    read_draft_ids(config, source)  # refuses those that `load` would
    count = sum(math.prod(shape) for shape in shapes.values())
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 1024
    return {
        "parameters": count,
        "tensors": f"all {sum(map(len, places.values()))} that the config asks for are there: {count:,} parameters",
        "memory": {
            "weights": {dtype: count * size for dtype, size in BYTES.items()},
            "cache, per 1024 tokens of a row": {dtype: row * size for dtype, size in BYTES.items()},
        },
    }


def _module(config: ModelConfig | DrafterConfig) -> Any:
    return params.abstract(lambda rngs: build(config, rngs))


def _abstract(name: str) -> Model:
    """The model without weights, enough for checks of its shape."""
    path = locate(name)
    raw = gguf.config(path) if path.suffix == ".gguf" else huggingface.config(path)
    config = families.parse_drafter(raw) if families.is_drafter(raw) else families.parse(raw)
    size = getattr(config, "draft_vocab_size", None)
    return Model(
        config, _module(config), name=name, draft_ids=None if size is None else np.arange(size, dtype=np.int32)
    )


def _stored(path: Path) -> dict[str, int]:
    """Stored dtype -> number of parameters, most first."""
    counts: Counter[str] = Counter()
    if path.suffix == ".gguf":
        kinds = importlib.import_module("gguf.constants").GGMLQuantizationType
        for stored in open_gguf(path).tensors.values():
            counts[kinds(stored.kind).name] += math.prod(stored.shape)
        return dict(counts.most_common())
    single = (path / huggingface.SINGLE).is_file()
    index = {} if single else huggingface.read_json(path / huggingface.INDEX)["weight_map"]
    for file in [huggingface.SINGLE] if single else sorted(set(index.values())):
        with safe_open(path / file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  a file of safetensors cannot be iterated over
                tensor = opened.get_slice(name)
                counts[tensor.get_dtype()] += math.prod(tensor.get_shape())
    return dict(counts.most_common())


def _text(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    if path.suffix == ".gguf":
        tokenizer, generation = gguf.tokenizer(path), {}
    else:
        tokenizer, generation = load_tokenizer(path), huggingface.generation_config(path)
    kind, tokens = None, dict.fromkeys(map(str, stop_token_ids(raw, generation, tokenizer)))
    if tokenizer is not None:
        inner = getattr(tokenizer, "backend_tokenizer", None)
        kind = f"{type(tokenizer).__name__}{f' ({type(inner.model).__name__})' if inner is not None else ''}, {len(tokenizer)} tokens"
        tokens = {token: tokenizer.convert_ids_to_tokens(int(token)) for token in tokens}
    return {"tokenizer": kind, "chat_template": bool(getattr(tokenizer, "chat_template", None)), "stop_tokens": tokens}


def _wanted(config: DrafterConfig) -> dict[str, int]:
    layers = {} if config.num_target_layers is None else {"layers": config.num_target_layers}
    return {"vocabulary": config.vocab_size, "hidden size": config.hidden_size, **layers}


def _pairs(values: Mapping[str, Any]) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"{key.ljust(width)}  {f'{value:,}' if type(value) is int else value}" for key, value in values.items()]


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{_size(size)} in {dtype}" for dtype, size in sizes.items())


def _size(size: int | float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
