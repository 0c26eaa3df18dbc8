"""`dflax train drafter`: from responses of a target to a folder that `dflax.load` takes, by one frozen dataclass."""

import dataclasses
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from dflax import files, processes, sharding
from dflax.config import DrafterConfig, DrafterKind
from dflax.errors import DflaxError
from dflax.infer.fit import check_fit, check_target
from dflax.model import Model, load
from dflax.models import params
from dflax.models.drafter import Drafter, initial_scale
from dflax.models.features import default_taps
from dflax.train import data, trainer
from dflax.train.drafter import Frozen, Objective, make_loss
from dflax.train.features import FeatureStore, cache_features, online
from dflax.train.passes import prepared

HELD_OUT = "held_out.json"
"""In a feature cache: prompts to evaluate on, for runs that train on the cache alone."""


@dataclass(frozen=True)
class DrafterRecipe:
    """Train a drafter for a frozen target on the target's own responses. Presets in configs/ hold published settings."""

    target: str = ""
    """Folder, .gguf file, hub id or built-in name."""
    data: tuple[str, ...] = ()
    """Responses of the target: .jsonl(.gz) files or folders as `dflax distill` writes them, or datasets of the hub with
    conversations (NAME, NAME:CONFIG or NAME:CONFIG:SPLIT)."""
    features: str = ""
    """Folder of the feature cache: target features are made once and kept there; "": made in every step. An existing cache without `data`
    is trained on as it is."""
    init_from: str = ""
    """Go on from the weights of this drafter instead of fresh ones; its shape wins over the fields below."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen target."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the drafter's passes; masters, optimizer and loss stay float32."""
    remat: bool = False
    """Keep only the input of every drafter layer for the gradient and compute the rest again: less memory, a third more drafter time."""
    scan_layers: bool = False
    """Compile one layer for all that are alike, of target and drafter: minutes less to compile, for a copy of their weights in every step
    (cut as they are)."""

    block_size: int = 16
    """Tokens in a block, the anchor included."""
    layers: int = 5
    taps: int = 5
    """How many target layers are tapped, spread as published; `target_layer_ids` names them instead."""
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int = -1
    """An id of the vocabulary that text does not use. Needed unless `init_from` is given."""
    intermediate_size: int = 0
    """Feed-forward width; 0: the target's."""
    draft_vocabulary: int = 0
    """Score only this many most frequent response tokens; 0: the whole vocabulary."""
    kind: DrafterKind = "dflash"

    length: int = 3072
    """Tokens in a packed row."""
    rows_per_step: int = 4
    held_out: float = 0.01
    """Share of prompts kept for validation, by hash."""
    soft_labels: int = 16
    """With objective.labels = soft: how many of the target's most likely tokens make up a label (among a draft vocabulary, if there is
    one); their shares are scaled to 1."""
    enable_thinking: bool | None = None
    eval_prompts: int = 16
    """Held-out prompts that are really speculated at each evaluation."""
    eval_tokens: int = 64
    objective: Objective = field(default_factory=Objective)
    train: trainer.TrainConfig = field(default_factory=lambda: trainer.TrainConfig(epochs=6))

    def __post_init__(self) -> None:
        if not self.target:
            raise DflaxError("target is empty; name the model that the drafter is for")
        if not self.data and not self.features:
            raise DflaxError("data is empty; name files of the target's responses (dflax distill writes them)")
        if self.block_size < 2:
            raise DflaxError(f"block_size is {self.block_size}; it must be at least 2 (it counts the anchor)")
        for name in ("layers", "taps", "length", "rows_per_step", "eval_tokens"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("draft_vocabulary", "intermediate_size", "soft_labels", "eval_prompts"):
            if getattr(self, name) < 0:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must not be negative")
        if not 0 <= self.held_out < 1:
            raise DflaxError(f"held_out is {self.held_out}; it is a share, at least 0 and below 1")


class _StoredRows:
    """Batches from a feature cache, in the order of `data.Shuffled`."""

    def __init__(self, store: FeatureStore, rows_per_step: int, seed: int):
        self._store = store
        self._order = data.Shuffled({"row": np.arange(len(store))}, rows_per_step, seed)

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    def batch_at(self, step: int) -> Any:
        return self._store.rows(self._order.batch_at(step)["row"])


def train_drafter(recipe: DrafterRecipe) -> Path:
    """Trains, evaluates by real speculation on held-out prompts, and writes OUT/model; returns that folder.

    A run that was killed goes on from its last checkpoint when called again with the same recipe.
    """
    processes.join(recipe.train.distributed)
    if recipe.features and recipe.data and jax.process_count() > 1:
        raise DflaxError(
            f"features is {recipe.features!r}; several processes cannot make a cache together: make it with one, then leave data out"
        )
    mesh = sharding.make_mesh(recipe.train.mesh)
    target = load(recipe.target, dtype=recipe.dtype, mesh=mesh if recipe.train.mesh else None)
    check_target(target)
    packed, held_out = _documents(recipe, target) if recipe.data else (None, [])
    start = load(recipe.init_from) if recipe.init_from else None
    draft_ids = start.draft_ids if start else _draft_ids(recipe, target, packed)
    if start:
        check_fit(target, start)
    config: DrafterConfig = start.config if start else drafter_config(recipe, target, draft_ids)
    frozen = Frozen.make(target.module.embed_tokens.weight[...], target.module.head, draft_ids)
    drafter = start or fresh(config, frozen, recipe.train.seed, draft_ids)

    soft = recipe.soft_labels if recipe.objective.labels == "soft" else 0
    seed, taps = recipe.train.seed, config.target_layer_ids
    if recipe.features:
        store = (
            cache_features(recipe.features, target, packed, taps, soft, draft_ids)
            if packed is not None
            else FeatureStore(recipe.features)
        )
        if packed is not None:
            files.write_json(store.folder / HELD_OUT, held_out)  # all of them: a later run may ask for more
        elif (store.folder / HELD_OUT).exists():
            held_out = json.loads((store.folder / HELD_OUT).read_text())
        store.check(target, taps, soft, draft_ids)
        rows = store.meta["data"]
        batches: trainer.Batches = _StoredRows(store, recipe.rows_per_step, seed)
        shared: Any = frozen
        prepare = None
    else:
        assert packed is not None
        rows = data.fingerprint(packed.tokens, packed.loss_mask, packed.ctx_start)
        batches = data.batches(packed, recipe.rows_per_step, seed)
        shared = (target.leaves, frozen)
        prepare = online(lambda leaves: prepared(target.merge(leaves), scan=recipe.scan_layers), taps, soft, draft_ids)

    held_out = held_out[: recipe.eval_prompts]
    if recipe.train.eval_every and not held_out:
        raise DflaxError(
            f"eval_every is {recipe.train.eval_every}, but there are no prompts to evaluate on; set held_out and eval_prompts, "
            "or eval_every to 0"
        )
    graph = drafter.module
    loss = loss_of(recipe, graph, config.block_size, prepare)

    def evaluate(leaves: Any, step: int) -> dict[str, float]:
        as_used = jax.tree.map(lambda leaf: leaf.astype(recipe.dtype), leaves)
        return speculate_held_out(
            recipe, target, dataclasses.replace(drafter, module=params.fill(graph, as_used)), held_out
        )

    first = params.flatten(graph)
    identity = _identity(recipe, config) | {"rows": rows, "target_weights": target.fingerprint}
    if recipe.init_from and draft_ids is not None:
        identity["draft_ids"] = data.fingerprint(draft_ids)
    trained = trainer.fit(
        first, loss, batches, recipe.train, evaluate=evaluate if held_out else None, frozen=shared,
        mesh=mesh if recipe.train.mesh else None, axes=sharding.axes_of(first), identity=identity,
    )  # fmt: skip
    folder = Path(recipe.train.out) / "model"
    if jax.process_index() == 0:
        dataclasses.replace(drafter, module=params.fill(graph, trained)).save(folder)
    return folder


def loss_of(recipe: DrafterRecipe, graph: Any, block_size: int, prepare: Any) -> Any:
    """The loss for `trainer.fit`. graph: the drafter's module, or its shapes."""
    merge = lambda leaves: prepared(params.fill(graph, leaves), recipe.compute, recipe.remat, recipe.scan_layers)
    return make_loss(merge, block_size, recipe.objective, prepare)


def speculate_held_out(
    recipe: DrafterRecipe, target: Model, drafter: Model, prompts: list[list[int]]
) -> dict[str, float]:
    """Mean acceptance length of greedy speculation, over rounds of a response and then over responses."""
    from dflax.infer.generate import speculate

    out = speculate(target, drafter, prompts, max_new_tokens=recipe.eval_tokens)
    means = [float(np.mean(lengths)) for lengths in out.acceptance_lengths if lengths]
    return {"acceptance_length": float(np.mean(means))} if means else {}


def fresh(config: DrafterConfig, frozen: Frozen, seed: int, draft_ids: np.ndarray | None) -> Model:
    """New weights, scaled so that the loss starts near ln V."""
    module = initial_scale(Drafter(config, rngs=nnx.Rngs(seed)), frozen.embed, frozen.head)
    return Model(config, module, draft_ids=draft_ids)


def drafter_config(recipe: DrafterRecipe, target: Model, draft_ids: np.ndarray | None) -> DrafterConfig:
    """A drafter shaped like the target's own layers."""
    t = target.config
    if not recipe.target_layer_ids and recipe.taps > t.num_layers:
        raise DflaxError(f"taps is {recipe.taps}, but {recipe.target} has {t.num_layers} layers")
    taps = recipe.target_layer_ids or default_taps(t.num_layers, recipe.taps)
    if min(taps) < 0 or max(taps) >= t.num_layers:
        raise DflaxError(f"target_layer_ids {list(taps)} do not fit the target's {t.num_layers} layers")
    if not 0 <= recipe.mask_token_id < t.vocab_size:
        raise DflaxError(
            f"mask_token_id is {recipe.mask_token_id}; it must be an unused id of the target's {t.vocab_size}"
        )
    return DrafterConfig(
        vocab_size=t.vocab_size,
        hidden_size=t.hidden_size,
        intermediate_size=recipe.intermediate_size or t.intermediate_size,
        num_layers=recipe.layers,
        num_heads=t.num_heads,
        num_kv_heads=t.num_kv_heads,
        head_dim=t.head_dim,
        rms_norm_eps=t.rms_norm_eps,
        rope=t.rope,
        block_size=recipe.block_size,
        mask_token_id=recipe.mask_token_id,
        target_layer_ids=tuple(taps),
        num_target_layers=t.num_layers,
        max_positions=t.max_positions,
        causal=(recipe.kind.startswith("autoregressive"),) * recipe.layers,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        kind=recipe.kind,
    )


def _documents(recipe: DrafterRecipe, target: Model) -> tuple[data.Packed, list[list[int]]]:
    """Packed training rows, and all held-out prompts as token ids."""
    conversations = [_conversation(recipe, row) for source in recipe.data for row in data.read(source)]
    train, held_out = data.split_held_out(conversations, recipe.held_out)
    if not train:
        raise DflaxError(f"nothing is left to train on: all {len(conversations)} conversations are held out")
    tokenize = lambda item: data.tokenize(
        item, target.tokenizer, enable_thinking=recipe.enable_thinking, vocab_size=target.config.vocab_size
    )
    hidden = not os.isatty(2)
    packed = data.pack((tokenize(item) for item in tqdm(train, desc="tokenize", disable=hidden)), recipe.length)
    prompts = []
    for item in held_out:
        document = tokenize(item)
        first = int(np.argmax(document.loss_mask))
        if first > 0 and first + recipe.eval_tokens <= target.config.max_positions:
            prompts.append(document.tokens[:first].tolist())
    return packed, prompts


def _conversation(recipe: DrafterRecipe, located: data.Located) -> data.Conversation:
    """Refused if it says that its response was written in another thinking mode: the drafter would learn to follow the wrong prompts."""
    written = located.row.get("thinking", recipe.enable_thinking)
    if recipe.enable_thinking is not None and written != recipe.enable_thinking:
        raise DflaxError(
            f"{located.where}: the response was written with enable_thinking {written}, here it is {recipe.enable_thinking}; "
            "distill again, or train as it was written"
        )
    return data.conversation(located)


def _draft_ids(recipe: DrafterRecipe, target: Model, packed: data.Packed | None) -> np.ndarray | None:
    """The most frequent response tokens, ascending; the model's end tokens always among them. A cache keeps its own."""
    if not recipe.draft_vocabulary:
        return None
    if packed is None and (ids := FeatureStore(recipe.features).scored_ids) is not None:
        if len(ids) != recipe.draft_vocabulary:
            raise DflaxError(
                f"draft_vocabulary is {recipe.draft_vocabulary}, but the cache {recipe.features} was made for {len(ids)} tokens"
            )
        return ids
    if recipe.draft_vocabulary > target.config.vocab_size:
        raise DflaxError(
            f"draft_vocabulary {recipe.draft_vocabulary} exceeds the vocabulary of {target.config.vocab_size}"
        )
    tokens = FeatureStore(recipe.features).response_tokens() if packed is None else packed.tokens[packed.loss_mask]
    counts = Counter(tokens.tolist())
    counts.update(dict.fromkeys(target.stop_token_ids, len(tokens)))
    chosen = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    chosen += [token for token in range(target.config.vocab_size) if token not in counts]
    return np.sort(np.asarray(chosen[: recipe.draft_vocabulary], np.int32))


def _identity(recipe: DrafterRecipe, config: DrafterConfig) -> dict[str, Any]:
    """What fixes the result besides the trainer's own settings."""
    free = {"train", "eval_prompts", "eval_tokens", "remat", "scan_layers"}
    fields = {k: v for k, v in dataclasses.asdict(recipe).items() if k not in free}
    if recipe.compute == "float32":
        del fields["compute"]  # runs older than the field go on
    return {**fields, "drafter": dataclasses.asdict(config)}
