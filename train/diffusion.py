"""The objective of masked-diffusion language models: hide tokens at a random rate, predict the hidden ones from all others.

LLaDA (arXiv 2502.09992, algorithms 1 and 2; GUIDELINES.md of its repository). Per row a noise level t, every token of the region hidden
with probability p = (1 - eps) t + eps; loss of a row = sum over hidden tokens of CE / p, divided by the region's length: an upper bound on
its negative log likelihood per token. Pretraining: the region is the whole row. Fine-tuning: the answer with the end tokens that pad it;
the prompt is never hidden. There is no attention mask but the row's end, and no input tells t.

Beside it: "rolling" noise, whose rate rises along the region (rolling diffusion, arXiv 2402.09470), and rows that learn every token from
the clean ones before it (block diffusion, BD3-LM, arXiv 2503.09573). Both show a model that must compute what its results follow from.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from dflax.errors import DflaxError
from dflax.models.decoder import Decoder
from dflax.models.layers import matmul
from dflax.models.vocabulary import Slices, in_chunks


@dataclass(frozen=True)
class DiffusionObjective:
    """How rows are noised and what their hidden tokens weigh."""

    weights: Literal["elbo", "uniform"] = "elbo"
    """"elbo": 1 / p, the likelihood bound. "uniform": the plain mean over hidden tokens."""
    normalise: Literal["sequence", "token"] = "sequence"
    """With elbo weights: every row is divided by its own region (published), or all by all regions together."""
    masking: Literal["bernoulli", "exact", "rolling"] = "bernoulli"
    """"bernoulli": every token for itself (published). "exact": round(p n), at least one, of a region's n: the same bound with less
    variance. "rolling": a token's rate rises with its place, from 0 to 1 along a ramp that t moves over the region (`rolling`)."""
    widths: tuple[float, float] = (4.0, 32.0)
    """Of rolling noise: a row's ramp has a width, log-uniform between these, of so many tokens from rate 0.5 to 0.73."""
    eps: float = 1e-3
    t_min: float = 0.0
    """Noise levels are uniform between t_min and t_max; other bounds than 0 and 1 leave the likelihood bound."""
    t_max: float = 1.0
    blockwise: float = 0.0
    """Share of rows that are noised as block-by-block decoding meets them: one block of the region is noised and learnt from, what
    follows is hidden without loss, what precedes it is clean (as in Blockwise SFT, arXiv 2508.19529)."""
    block_length: int = 32
    """Of blockwise rows."""
    next_token_share: float = 0.0
    """Share of a batch's rows, the first ones, that learn every token of an answer from the clean tokens before it
    (`next_token_loss`)."""
    chunk: int = 16384
    """Rows of logits that exist at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.t_min < self.t_max <= 1:
            raise DflaxError(f"t_min is {self.t_min} and t_max {self.t_max}; they must satisfy 0 <= t_min < t_max <= 1")
        if not 0 < self.eps < 1:
            raise DflaxError(f"eps is {self.eps}; it must lie between 0 and 1")
        for name in ("blockwise", "next_token_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it is a share, between 0 and 1")
        if not 0 < self.widths[0] <= self.widths[1]:
            raise DflaxError(f"widths is {self.widths}; two numbers are needed, the smaller one first and above 0")
        if self.masking == "rolling" and self.blockwise:
            raise DflaxError(f"blockwise is {self.blockwise}; rolling noise has no blocks, so it must be 0")
        for name in ("block_length", "chunk"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Noised:
    """hidden: tokens that stand as masks. weight: what the cross entropy of each counts in the bound, 0 without loss. size: tokens in the
    region of the row that is learnt from."""

    hidden: Bool[Any, "B S"]
    weight: Float[Any, "B S"]
    size: Int[Any, " B"]


def noise_levels(key: Array, rows: int, t_min: float = 0.0, t_max: float = 1.0) -> Float[Array, " B"]:
    """Stratified: row i draws from the i-th of B equal parts of (t_min, t_max), all by one shared offset."""
    offset = jax.random.uniform(key)
    return t_min + (t_max - t_min) * (jnp.arange(rows) + offset) / rows


def noise(key: Array, region: Bool[Array, "B S"], config: DiffusionObjective) -> Noised:
    """Which tokens of every row are hidden; outside of `region` none is."""
    level_key, pick_key, kind_key, block_key = jax.random.split(key, 4)
    B = region.shape[0]
    t = noise_levels(level_key, B, config.t_min, config.t_max)
    if config.masking == "rolling":
        low, high = jnp.log(jnp.asarray(config.widths))
        width = jnp.exp(jax.random.uniform(kind_key, (B,), minval=low, maxval=high))
        rate, weight = rolling(t, width, region)
        hidden = region & (jax.random.uniform(pick_key, region.shape) < rate)
        return Noised(hidden, jnp.where(hidden, weight, 0.0), region.sum(1))
    later = jnp.zeros_like(region)
    if config.blockwise > 0:
        by_block = jax.random.uniform(kind_key, (B, 1)) < config.blockwise
        block = (jnp.cumsum(region, axis=1) - 1) // config.block_length  # of every token of the region
        blocks = -(-region.sum(1, keepdims=True) // config.block_length)
        chosen = jnp.floor(jax.random.uniform(block_key, (B, 1)) * blocks)
        later = region & by_block & (block > chosen)
        region = region & (~by_block | (block == chosen))
    size = region.sum(1)
    rate = (1 - config.eps) * t + config.eps
    if config.masking == "exact":
        count = jnp.clip(jnp.round(rate * size).astype(jnp.int32), 1, jnp.maximum(size, 1))
        counted, rate = exactly(pick_key, region, count), count / jnp.maximum(size, 1)
    else:
        counted = region & (jax.random.uniform(pick_key, region.shape) < rate[:, None])
    return Noised(counted | later, counted / rate[:, None], size)


def rolling(
    t: Float[Array, " B"], width: Float[Array, " B"], region: Bool[Array, "B S"]
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Rates of rolling noise at t, and the weights that make the mean over t a bound.

    Token i of a region of n has the rate p = sigmoid((i - c) / w), w the width; c falls evenly from n + 3 w at t = 0, where nearly all is
    clean, to -3 w. With any rates that grow with t a token weighs (dp / dt) / p, which is (1 - p) (n + 6 w) / w: most where the ramp
    begins, nothing where all is hidden anyway.
    """
    t, width, n = t[:, None], width[:, None], region.sum(1, keepdims=True)
    span = n + 6 * width
    place = jnp.cumsum(region, axis=1) - 1
    rate = jax.nn.sigmoid((place - (1 - t) * span) / width + 3)
    return rate, (1 - rate) * span / width


def exactly(key: Array, region: Bool[Array, "B S"], count: Int[Array, " B"]) -> Bool[Array, "B S"]:
    """count[b] random tokens of every row's region."""
    order = jnp.where(region, jax.random.uniform(key, region.shape), 2.0)
    rank = jnp.argsort(jnp.argsort(order, axis=1), axis=1)
    return region & (rank < count[:, None])


def answer_region(prompt_len: Int[Array, " B"], length: Int[Array, " B"], columns: int) -> Bool[Array, "B S"]:
    """Columns from the prompt's end to the row's."""
    column = jnp.arange(columns)
    return (column >= prompt_len[:, None]) & (column < length[:, None])


def hidden_cross_entropy(
    model: Decoder,
    tokens: Int[Array, "B S"],
    hidden: Bool[Array, "B S"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
    answer_columns: int,
    chunk: int,
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """Cross entropy of every token when `hidden` ones stand as masks, and whether it is the argmax; 0 outside of the answers.

    answer_columns: no row has more columns after its prompt, so the head runs on that many. A model with shifted logits (Dream) predicts
    a token from the position before it, the first from its own.
    """
    assert model.config.mask_token_id is not None
    x, _ = model.canvas(jnp.where(hidden, model.config.mask_token_id, tokens), length)
    B, S = tokens.shape
    column = prompt_len[:, None] + jnp.arange(answer_columns)
    label, source = _answers(model, tokens, column)
    rows = jnp.take_along_axis(x, source[..., None], axis=1)
    ce, right = _score(model, rows, label, chunk)
    put = lambda values: jnp.zeros((B, S), values.dtype).at[jnp.arange(B)[:, None], column].set(values, mode="drop")
    return put(ce), put(right)


def _answers(model: Decoder, tokens: Array, column: Array) -> tuple[Array, Array]:
    """Of columns [B, A], which may lie past the end: their tokens, and the positions that predict these."""
    at = jnp.minimum(column, tokens.shape[1] - 1)
    source = jnp.maximum(at - 1, 0) if model.config.shifted_logits else at
    return jnp.take_along_axis(tokens, at, axis=1), source


def _score(
    model: Decoder, rows: Float[Array, "B A E"], label: Int[Array, "B A"], chunk: int
) -> tuple[Float[Array, "B A"], Bool[Array, "B A"]]:
    """Cross entropy of every label, and whether it is the argmax.

    A chunk of rows at a time and computed again for the gradient, so that all logits never exist together. On a mesh, a chunk of every
    device's own rows, and the vocabulary is cut (`dflax.models.vocabulary`).
    """

    def of_rows(rows: Array, label: Array) -> tuple[Array, Array]:
        logits = model.predict(rows)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label), logits.argmax(-1) == label

    shape, count = label.shape, label.size
    rows, label = rows.reshape(count, -1), label.reshape(-1)
    slices = Slices.of(model.head, count)
    if slices.mesh is not None:
        part = jax.checkpoint(partial(slices.cross_entropy, matmul))
        one = jnp.ones((count, 1), jnp.float32)
        ce, best = slices.run(partial(in_chunks, part, chunk), model.norm(rows), model.head, label[:, None], one)
        found = ce, best == label
    elif count <= chunk:
        found = of_rows(rows, label)
    else:
        cut = lambda x: jnp.pad(x, ((0, -count % chunk), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])
        found = jax.lax.map(lambda part: jax.checkpoint(of_rows)(*part), (cut(rows), cut(label)))
    ce, right = (x.reshape(-1)[:count].reshape(shape) for x in found)
    return ce, right


def weigh(ce: Float[Array, "B S"], noised: Noised, config: DiffusionObjective) -> Float[Array, ""]:
    """The loss of cross entropies: mean over rows of sum(weight CE) / size, or as `weights` and `normalise` say."""
    if config.weights == "uniform":
        counted = noised.weight > 0
        return jnp.where(counted, ce, 0.0).sum() / jnp.maximum(counted.sum(), 1)
    rows = (noised.weight * ce).sum(1)
    if config.normalise == "token":
        return rows.sum() / jnp.maximum(noised.size.sum(), 1)
    return jnp.mean(rows / jnp.maximum(noised.size, 1))


def diffusion_loss(
    model: Decoder,
    key: Array,
    tokens: Int[Array, "B S"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
    answer_columns: int,
    config: DiffusionObjective,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Loss of a batch, and metrics: `accuracy` over hidden tokens by their weights, tokens seen.

    tokens: prompt, answer, end tokens; row b ends at length[b]. prompt_len 0: pretraining.
    """
    noised = noise(key, answer_region(prompt_len, length, tokens.shape[1]), config)
    ce, right = hidden_cross_entropy(model, tokens, noised.hidden, prompt_len, length, answer_columns, config.chunk)
    accuracy = (right * noised.weight).sum() / jnp.maximum(noised.weight.sum(), 1e-9)
    return weigh(ce, noised, config), {"accuracy": accuracy, "tokens": length.sum()}


def next_token_cross_entropy(
    model: Decoder,
    tokens: Int[Array, "B S"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
    answer_columns: int,
    chunk: int,
) -> tuple[Float[Array, "B A"], Bool[Array, "B A"]]:
    """Cross entropy of every token of the answers given the clean tokens before it, and whether it is the argmax; 0 behind a row's end.

    Beside the clean row stands a mask token for every token of the answer, at its position; it sees the clean tokens before it and
    itself, and is scored. Clean tokens see the prompt and the clean tokens up to their own.
    """
    assert model.config.mask_token_id is not None
    B, S = tokens.shape
    column = prompt_len[:, None] + jnp.arange(answer_columns)
    live = column < length[:, None]
    label, source = _answers(model, tokens, column)
    clean = jnp.broadcast_to(jnp.arange(S), (B, S))
    position = jnp.concatenate([clean, source], axis=1)
    key = jnp.arange(S)
    by_clean = (key <= clean[..., None]) | (key < prompt_len[:, None, None])
    seen = jnp.concatenate([by_clean, key < column[..., None]], axis=1) & (key < length[:, None, None])
    itself = jnp.broadcast_to(jnp.eye(S + answer_columns, dtype=bool)[:, S:], (B, S + answer_columns, answer_columns))
    masks = jnp.full((B, answer_columns), model.config.mask_token_id, tokens.dtype)
    x = model.among(jnp.concatenate([tokens, masks], axis=1), position, jnp.concatenate([seen, itself], axis=2))

    ce, right = _score(model, x[:, S:], label, chunk)
    return jnp.where(live, ce, 0.0), right & live


def next_token_loss(
    model: Decoder,
    tokens: Int[Array, "B S"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
    answer_columns: int,
    config: DiffusionObjective,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """What block diffusion (BD3-LM, arXiv 2503.09573) minimises with blocks of one token: the exact likelihood from left to right.

    Arguments and result as of `diffusion_loss`. A random rate seldom shows a token together with all that it follows from; here every
    token of a row is learnt from, so that a model that must compute learns it in far fewer steps.
    """
    ce, right = next_token_cross_entropy(model, tokens, prompt_len, length, answer_columns, config.chunk)
    size = jnp.maximum(length - prompt_len, 1)
    return jnp.mean(ce.sum(1) / size), {"accuracy": right.sum() / size.sum(), "tokens": length.sum()}


def likelihood_bound(
    model: Decoder,
    key: Array,
    tokens: Int[Array, "B S"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
    answer_columns: int,
    samples: int,
    chunk: int = 16384,
) -> Float[Array, " B"]:
    """Upper bound on every row's negative log likelihood in nats per token of its answer, by `samples` passes.

    Exactly k of its n tokens are hidden, k stratified over the passes and uniform in 1 .. n, and their mean cross entropy is taken: the
    expectation is that of the 1 / t weighted bound, the variance far less (get_log_likelihood.py of LLaDA).
    """
    region = answer_region(prompt_len, length, tokens.shape[1])
    size = region.sum(1)
    offset_key, pick_key = jax.random.split(key)
    offset = jax.random.uniform(offset_key, size.shape)

    def one(sample: Array) -> Array:
        level = (offset + sample / samples) % 1.0
        count = 1 + jnp.minimum((level * size).astype(jnp.int32), jnp.maximum(size - 1, 0))
        hidden = exactly(jax.random.fold_in(pick_key, sample), region, count)
        ce, _ = hidden_cross_entropy(model, tokens, hidden, prompt_len, length, answer_columns, chunk)
        return jnp.where(hidden, ce, 0.0).sum(1) / count

    return jax.lax.map(one, jnp.arange(samples)).mean(0)
