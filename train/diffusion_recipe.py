"""`dflax train diffusion`: a masked-diffusion language model, from nothing or from a checkpoint, to a folder that `dflax.load` takes."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from tqdm import tqdm

from dflax import processes, sharding, text
from dflax.config import ModelConfig, RopeConfig
from dflax.errors import DflaxError
from dflax.model import Model, load
from dflax.models import params
from dflax.train import data, stories, trainer
from dflax.train.canvases import Batch, StoryBatches, TextBatches, answer_rows, text_rows
from dflax.train.diffusion import DiffusionObjective, diffusion_loss, likelihood_bound, next_token_loss
from dflax.train.language import fresh
from dflax.train.passes import prepared


@dataclass(frozen=True)
class DiffusionRecipe:
    """Train a masked-diffusion language model: fine-tuning on prompts and answers, or pretraining on running text.

    Without `data` it learns the arithmetic stories of the package, which is how the model `arith-llada` is made.
    """

    model: str = ""
    """Go on from this diffusion model (folder, hub id, built-in name); "": a new one of the LLaDA layout, for the stories only."""
    mask_token_id: int = -1
    """Of a model whose config.json does not tell (LLaDA-MoE: 156895)."""
    data: tuple[str, ...] = ()
    """.jsonl(.gz) files, folders of them, or hub datasets: prompts with responses, conversations, or texts; (): stories."""
    mode: Literal["sft", "pretrain"] = "sft"
    """"sft": only the answer and the end tokens behind it are hidden. "pretrain": whole rows of text are."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the passes; masters, optimizer and loss stay float32."""
    remat: bool = False
    """Keep only the input of every layer for the gradient and compute the rest again: far less memory, a third more time."""
    scan_layers: bool = False
    """Compile one layer and loop: minutes less to compile, for a copy of the weights in every step, in `compute` and cut as they are."""

    hidden_size: int = 128
    """This and what follows up to `max_positions`: the shape of a new model."""
    intermediate_size: int = 320
    layers: int = 5
    heads: int = 4
    rope_theta: float = 10000.0
    max_positions: int = 128

    length: int = 112
    """Columns of a row."""
    gen_length: int = 64
    """Tokens of an answer with the end tokens that pad it; 0: to the end of the row (published)."""
    rows_per_step: int = 64
    cut_share: float = 0.01
    """Pretraining: share of rows cut to a random length."""
    held_out: float = 0.01
    """Share of prompts of `data` kept for validation, by hash."""
    enable_thinking: bool | None = None
    bound_rows: int = 128
    """Held-out rows whose likelihood is bounded at an evaluation."""
    bound_samples: int = 8
    """Passes per row for that."""
    eval_problems: int = 64
    """Stories of each unseen kind that are really answered at an evaluation, one token per step."""
    objective: DiffusionObjective = field(default_factory=DiffusionObjective)
    train: trainer.TrainConfig = field(
        default_factory=lambda: trainer.TrainConfig(
            steps=1000, learning_rate=1e-3, weight_decay=0.1, b2=0.98, out="runs/diffusion"
        )
    )

    def __post_init__(self) -> None:
        if self.data and not self.model:
            raise DflaxError("model is empty; data need a model with its tokenizer to go on from")
        if self.mode == "pretrain" and not self.data:
            raise DflaxError("data is empty; pretraining needs running text")
        if not self.data and (
            self.gen_length <= stories.LONGEST_ANSWER or self.length < stories.LONGEST_PROMPT + self.gen_length
        ):
            raise DflaxError(
                f"gen_length is {self.gen_length} and length {self.length}; stories need more than {stories.LONGEST_ANSWER} tokens "
                f"for an answer and {stories.LONGEST_PROMPT} for a prompt beside it; name data to train on something else"
            )
        if self.gen_length % self.objective.block_length:
            raise DflaxError(
                f"gen_length is {self.gen_length}; it must be a multiple of block_length {self.objective.block_length}"
            )
        if not self.model and self.hidden_size % (2 * self.heads):
            raise DflaxError(
                f"hidden_size is {self.hidden_size}; {self.heads} heads need a multiple of {2 * self.heads}"
            )
        for name in ("rows_per_step", "bound_rows", "bound_samples"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def answer_columns(self) -> int:
        """Columns from the prompt's end on in which tokens may be hidden; pretraining hides them in the whole row."""
        return self.length if self.mode == "pretrain" or not self.gen_length else self.gen_length


def train_diffusion(recipe: DiffusionRecipe) -> Path:
    """Trains, evaluates on what is held out, and writes OUT/model; returns that folder.

    A run that was killed goes on from its last checkpoint when called again with the same recipe.
    """
    processes.join(recipe.train.distributed)
    mesh = sharding.make_mesh(recipe.train.mesh) if recipe.train.mesh else None
    model = _start(recipe, mesh)
    if model.config.shifted_logits and recipe.objective.next_token_share:
        raise DflaxError(
            f"next_token_share is {recipe.objective.next_token_share}, but a {model.config.family} predicts a token from the clean one "
            "before it: its decoding has no such rows; set it to 0"
        )
    batches, held_out, content = _data(recipe, model)
    if recipe.model:
        content["model_weights"] = model.fingerprint
    graph, answer_columns = model.module, recipe.answer_columns
    ready = lambda leaves: _computing(recipe, graph, leaves)
    bound = jax.jit(
        lambda leaves, batch: likelihood_bound(
            ready(leaves), jax.random.key(0), **batch, answer_columns=answer_columns, samples=recipe.bound_samples,
            chunk=recipe.objective.chunk,
        )
    )  # fmt: skip

    place = (lambda batch: batch) if mesh is None else (lambda batch: sharding.place_batch(batch, mesh))

    def evaluate(leaves: Any, step: int) -> dict[str, float]:
        score = lambda batch: processes.fetch(bound(leaves, place(batch)))
        found = {"bound": bound_of(score, held_out, recipe.rows_per_step)}
        if not recipe.data and recipe.eval_problems:
            trained = dataclasses.replace(model, module=params.fill(graph, leaves))
            found |= exact_match(trained, recipe.eval_problems, recipe.gen_length, recipe.objective.block_length)
        return found

    weights = params.flatten(graph)
    trained = trainer.fit(
        weights, make_loss(recipe, graph), batches, recipe.train, evaluate=evaluate if len(held_out["tokens"]) else None,
        mesh=mesh, axes=sharding.axes_of(weights), identity=identity(recipe, model.config) | content,
    )  # fmt: skip
    folder = Path(recipe.train.out) / "model"
    if jax.process_index() == 0:
        dataclasses.replace(model, module=params.fill(graph, trained)).save(folder)
    return folder


def make_loss(recipe: DiffusionRecipe, graph: Any) -> Any:
    """The loss for `trainer.fit`: (leaves, batch, key) -> (loss, metrics). graph: the module, or its shapes."""
    options = {"answer_columns": recipe.answer_columns, "config": recipe.objective}

    def loss(leaves: Any, batch: Any, key: Any) -> Any:
        model, rows = _computing(recipe, graph, leaves), len(batch["length"])
        count = round(recipe.objective.next_token_share * rows)
        first, rest = (
            {name: array[part] for name, array in batch.items()} for part in (slice(count), slice(count, None))
        )
        if count == 0:
            return diffusion_loss(model, key, **rest, **options)
        if count == rows:
            return next_token_loss(model, **first, **options)
        (follows, of_next), (hidden, of_hidden) = (
            next_token_loss(model, **first, **options),
            diffusion_loss(model, key, **rest, **options),
        )
        metrics = {
            "next_token_loss": follows,
            "next_token_accuracy": of_next["accuracy"],
            "diffusion_loss": hidden,
            "accuracy": of_hidden["accuracy"],
            "tokens": of_next["tokens"] + of_hidden["tokens"],
        }
        return (count * follows + (rows - count) * hidden) / rows, metrics

    return loss


def _computing(recipe: DiffusionRecipe, graph: Any, leaves: Any) -> Any:
    """The module as a step reads it."""
    return prepared(params.fill(graph, leaves), recipe.compute, recipe.remat, recipe.scan_layers)


def exact_match(
    model: Model, count: int, gen_length: int = 64, block_length: int = 32, batch: int = 64, **options: Any
) -> dict[str, float]:
    """Share of stories answered with the right value: {"validation": unseen numbers, "test": unseen numbers and skeletons}.

    Plain decoding, one token per step, where `options` (of `dflax.denoise`) do not say otherwise; `batch` problems at a time.
    """
    from dflax.infer.diffuse import denoise

    found = {}
    for split in ("validation", "test"):
        right = []
        for start in range(0, count, batch):
            drawn = list(stories.stories(0, split, min(batch, count - start), start))
            prompts = [problem.prompt for problem in drawn]
            texts = denoise(model, prompts, gen_length=gen_length, block_length=block_length, **options).texts
            assert texts is not None
            right += [problem.check(written) for problem, written in zip(drawn, texts, strict=True)]
        found[f"{split}_exact_match"] = float(np.mean(right))
    return found


def bound_of(bound: Any, rows: Batch, batch_size: int) -> float:
    """Mean likelihood bound of rows, a batch of one size at a time; nats per token."""
    count = len(rows["tokens"])
    padded = -(-count // batch_size) * batch_size
    values = []
    for start in range(0, padded, batch_size):
        at = np.minimum(np.arange(start, start + batch_size), count - 1)
        values.append(np.asarray(bound({name: array[at] for name, array in rows.items()})))
    return float(np.concatenate(values)[:count].mean())


def model_config(recipe: DiffusionRecipe) -> ModelConfig:
    """The recipe's shape in the LLaDA layout, with the vocabulary of stories."""
    tokenizer: text.Tokenizer = stories.tokenizer()
    return ModelConfig(
        family="llada",
        vocab_size=len(stories.vocabulary()),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_layers=recipe.layers,
        num_heads=recipe.heads,
        num_kv_heads=recipe.heads,
        head_dim=recipe.hidden_size // recipe.heads,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=recipe.rope_theta),
        tie_word_embeddings=False,
        max_positions=recipe.max_positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        bidirectional=True,
        mask_token_id=tokenizer.mask_token_id,
    )


def _start(recipe: DiffusionRecipe, mesh: Any) -> Model:
    """The model before training."""
    if not recipe.model:
        config = model_config(recipe)
        module = fresh(config, recipe.train.seed)
        return Model(config, module, stories.tokenizer(), name="diffusion", stop_token_ids=config.eos_token_ids)
    given = None if recipe.mask_token_id < 0 else recipe.mask_token_id
    model = load(recipe.model, mesh=mesh, mask_token_id=given)
    if model.is_drafter or not model.config.bidirectional:
        raise DflaxError(f"{recipe.model} is no diffusion language model")
    if model.config.mask_token_id is None:
        raise DflaxError(f"the config.json of {recipe.model} names no mask token; set mask_token_id")
    if model.tokenizer is None:
        raise DflaxError(f"{recipe.model} has no tokenizer; training needs one")
    if recipe.length > model.config.max_positions:
        raise DflaxError(f"length is {recipe.length}; {recipe.model} has {model.config.max_positions} positions")
    if not recipe.data and model.config.vocab_size != len(stories.vocabulary()):
        raise DflaxError(f"{recipe.model} does not know the vocabulary of stories; name data to train it on")
    return model


def _data(recipe: DiffusionRecipe, model: Model) -> tuple[trainer.Batches, Batch, dict[str, Any]]:
    """Training batches, held-out rows (possibly none), and for the run's identity what tells data of files apart."""
    shape, seed, rows = (recipe.length, recipe.gen_length), recipe.train.seed, recipe.rows_per_step
    if not recipe.data:
        source = StoryBatches(rows, *shape, seed)
        return source, source.of("test", 0, recipe.bound_rows), {}
    tokenizer: Any = model.tokenizer
    read = [row for source in recipe.data for row in data.read(source)]
    if recipe.mode == "pretrain":
        made = text_rows(read, tokenizer, recipe.length)
        kept = round(len(made["tokens"]) * recipe.held_out)
        train = {name: array[kept:] for name, array in made.items()}
        if not len(train["tokens"]):
            raise DflaxError(f"nothing is left to train on: held_out is {recipe.held_out}")
        content = {"rows": data.fingerprint(*train.values())}
        return TextBatches(train, rows, seed, recipe.cut_share), _first(made, min(kept, recipe.bound_rows)), content
    train, held_out = data.split_held_out([data.conversation(row) for row in read], recipe.held_out)
    if not train:
        raise DflaxError(f"nothing is left to train on: all {len(held_out)} conversations are held out")
    tokenize = lambda items: (
        data.tokenize(item, tokenizer, enable_thinking=recipe.enable_thinking, vocab_size=model.config.vocab_size)
        for item in tqdm(items, desc="tokenize", disable=not os.isatty(2))
    )
    made = answer_rows(tokenize(train), *shape, tokenizer.eos_token_id)
    kept = answer_rows(tokenize(held_out), *shape, tokenizer.eos_token_id) if held_out else _first(made, 0)
    content = {"rows": data.fingerprint(*made.values())}
    return data.Shuffled(made, rows, seed), _first(kept, recipe.bound_rows), content


def _first(rows: Batch, count: int) -> Batch:
    return {name: array[:count] for name, array in rows.items()}


def identity(recipe: DiffusionRecipe, config: ModelConfig) -> dict[str, Any]:
    """What fixes the result besides the trainer's own settings."""
    free = {"train", "eval_problems", "bound_rows", "bound_samples", "remat", "scan_layers"}
    fields = {k: v for k, v in dataclasses.asdict(recipe).items() if k not in free}
    return {**fields, "config": dataclasses.asdict(config)}
