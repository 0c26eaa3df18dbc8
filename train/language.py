"""`dflax train language`: a small autoregressive target from nothing, by plain next-token training on the problem generator.

Problems never repeat: step t is trained on problems t * P .. (t + 1) * P - 1 of the training split, so nothing is read from disk and a
resumed run sees what an uninterrupted one sees. The weights leave in the Hugging Face layout, with tokenizer.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from dflax import text
from dflax.config import ModelConfig, RopeConfig
from dflax.errors import DflaxError
from dflax.infer.generate import Output, generate
from dflax.model import Model
from dflax.models import params
from dflax.models.decoder import Decoder
from dflax.models.layers import INIT_STD
from dflax.train import stories, trainer
from dflax.train.data import Document, Packed
from dflax.train.problems import Problem

BUDGET = stories.LONGEST_ANSWER + 1
"""New tokens that an answer may take, its end token included."""


@dataclass(frozen=True)
class LanguageRecipe:
    """Train a target on arithmetic word problems with worked steps."""

    family: Literal["qwen3", "llama", "qwen2"] = "qwen3"
    hidden_size: int = 96
    intermediate_size: int = 192
    layers: int = 6
    heads: int = 3
    kv_heads: int = 1
    rope_theta: float = 10000.0
    max_positions: int = 512

    problems_per_step: int = 32
    """Packed two to a row, a long one with a short one."""
    length: int = 208
    """Tokens in a row."""
    question_weight: float = 0.1
    """Weight of a question's tokens in the loss; an answer's have 1."""
    eval_problems: int = 128
    """Unseen problems of each kind that are really answered at an evaluation."""
    train: trainer.TrainConfig = field(
        default_factory=lambda: trainer.TrainConfig(
            steps=3000, learning_rate=3e-3, weight_decay=0.1, b2=0.98, eval_every=1000, out="runs/language"
        )
    )

    def __post_init__(self) -> None:
        if self.problems_per_step < 2 or self.problems_per_step % 2:
            raise DflaxError(f"problems_per_step is {self.problems_per_step}; it must be even, for two go into a row")
        if not 0 <= self.question_weight <= 1:
            raise DflaxError(f"question_weight is {self.question_weight}; it must lie between 0 and 1")
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise DflaxError(
                f"hidden_size {self.hidden_size}, heads {self.heads} and kv_heads {self.kv_heads} must divide one another in turn"
            )


class ProblemBatches:
    """The trainer's `Batches`: fresh problems of the training split at every step."""

    def __init__(self, problems_per_step: int, length: int, seed: int):
        self._count, self._length, self._seed = problems_per_step, length, seed
        self._tokenizer = stories.tokenizer()

    @property
    def steps_per_epoch(self) -> int:
        """There are no epochs; by convention a thousand steps."""
        return 1000

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """{"tokens", "loss_mask", "ctx_start"}, each [problems_per_step / 2, length]."""
        first = step * self._count
        drawn = (stories.generate(self._seed, first + i, "train") for i in range(self._count))
        packed = pair_up(documents(drawn, self._tokenizer), self._length)
        return {"tokens": packed.tokens, "loss_mask": packed.loss_mask, "ctx_start": packed.ctx_start}


def documents(drawn: Iterable[Problem], tokenizer: text.Tokenizer) -> list[Document]:
    """<bos> question answer <eos>; the answer and <eos> are the response."""
    made = []
    for problem in drawn:
        prompt = tokenizer.encode(problem.prompt)
        answer = tokenizer.encode(problem.answer_text, add_special_tokens=False)
        tokens = np.asarray([*prompt, *answer, tokenizer.eos_token_id], np.int32)
        made.append(Document(tokens, np.arange(len(tokens)) >= len(prompt)))
    return made


def pair_up(items: list[Document], length: int) -> Packed:
    """Two documents a row, the longest with the shortest: rows that are full, of a number that does not vary."""
    order = sorted(range(len(items)), key=lambda i: len(items[i].tokens))
    half = len(items) // 2
    tokens = np.zeros((half, length), np.int32)
    loss_mask = np.zeros((half, length), bool)
    ctx_start = np.tile(np.arange(length, dtype=np.int32), (half, 1))
    for row in range(half):
        at = 0
        for index in (order[-1 - row], order[row]):
            n = min(len(items[index].tokens), length - at)
            span = slice(at, at + n)
            tokens[row, span], loss_mask[row, span] = items[index].tokens[:n], items[index].loss_mask[:n]
            ctx_start[row, span] = at
            at += n
    return Packed(tokens, loss_mask, ctx_start)


def next_token_loss(
    model: Decoder, tokens: Int[Array, "B S"], loss_mask: Array, ctx_start: Int[Array, "B S"], question_weight: float
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Cross entropy of every next token of the same document, and the share of response tokens that are the argmax."""
    hidden = model.packed(tokens, ctx_start).hidden[:, :-1]
    logits = model.logits(hidden)
    label = tokens[:, 1:]
    same = ctx_start[:, 1:] == ctx_start[:, :-1]
    response = loss_mask[:, 1:] & same
    weight = jnp.where(response, 1.0, jnp.where(same, question_weight, 0.0))
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    right = response & (logits.argmax(-1) == label)
    metrics = {"accuracy": right.sum() / jnp.maximum(response.sum(), 1), "tokens": same.sum()}
    return jnp.sum(weight * ce) / jnp.maximum(weight.sum(), 1e-9), metrics


def model_config(recipe: LanguageRecipe, tokenizer: text.Tokenizer) -> ModelConfig:
    """The recipe's shape with the tokenizer's vocabulary."""
    return ModelConfig(
        family=recipe.family,
        vocab_size=len(stories.vocabulary()),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_layers=recipe.layers,
        num_heads=recipe.heads,
        num_kv_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=recipe.rope_theta),
        tie_word_embeddings=False,
        max_positions=recipe.max_positions,
        qkv_bias=recipe.family == "qwen2",
        qk_norm=recipe.family == "qwen3",
        bos_token_id=stories.vocabulary().index("<bos>"),
        eos_token_ids=(tokenizer.eos_token_id,),
    )


def fresh(config: ModelConfig, seed: int) -> Decoder:
    """New weights for a narrow model: matrices of scale 1 / sqrt(inputs), those that write to the residual stream less by sqrt(2 L)."""
    module = Decoder(config, rngs=nnx.Rngs(seed))
    leaves = params.flatten(module)
    for name, leaf in leaves.items():
        if name.endswith("proj.weight"):
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = leaf.shape[1] ** -0.5 / (math.sqrt(2 * config.num_layers) if writes else 1.0)
            leaves[name] = leaf * (std / INIT_STD)
    return params.fill(module, leaves)


def train_language(recipe: LanguageRecipe) -> Path:
    """Trains, evaluates on unseen problems, and writes OUT/model; returns that folder.

    A run that was killed goes on from its last checkpoint when called again with the same recipe.
    """
    tokenizer = stories.tokenizer()
    config = model_config(recipe, tokenizer)
    graph = fresh(config, recipe.train.seed)
    model = Model(config, graph, tokenizer, name="language", stop_token_ids=config.eos_token_ids)

    def loss(leaves: Any, batch: Any, key: Any) -> Any:
        return next_token_loss(params.fill(graph, leaves), **batch, question_weight=recipe.question_weight)

    def evaluate(leaves: Any, step: int) -> dict[str, float]:
        return exact_match(
            dataclasses.replace(model, module=params.fill(graph, leaves)), recipe.eval_problems, recipe.train.seed
        )

    trained = trainer.fit(
        params.flatten(graph), loss, ProblemBatches(recipe.problems_per_step, recipe.length, recipe.train.seed), recipe.train,
        evaluate=evaluate if recipe.eval_problems else None, identity=identity(recipe),
    )  # fmt: skip
    folder = Path(recipe.train.out) / "model"
    dataclasses.replace(model, module=params.fill(graph, trained)).save(folder)
    return folder


def exact_match(model: Model, count: int, seed: int = 0) -> dict[str, float]:
    """Share of greedy answers with the right value: {"validation": unseen numbers, "test": unseen numbers and orders of events}."""
    found = {}
    for split in ("validation", "test"):
        drawn = list(stories.stories(seed, split, count))
        answers = answer(model, drawn)
        assert answers.texts is not None
        right = [problem.check(written) for problem, written in zip(drawn, answers.texts, strict=True)]
        found[f"{split}_exact_match"] = float(np.mean(right))
    return found


def answer(model: Model, drawn: Iterable[Problem]) -> Output:
    """Greedy answers to problems, as one batch."""
    return generate(model, [problem.prompt for problem in drawn], max_new_tokens=BUDGET)


def identity(recipe: LanguageRecipe) -> dict[str, Any]:
    """What fixes the result besides the trainer's own settings."""
    return {k: v for k, v in dataclasses.asdict(recipe).items() if k not in ("train", "eval_problems")}
