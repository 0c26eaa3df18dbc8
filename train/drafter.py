"""The drafter's objective: random anchors, weighted slots, labels from the response or from the target's distribution.

DFlash, arXiv 2602.06036, section 4.2; conventions of the public trainers are named where the paper is silent. A block of K slots starts
at an anchor a: slot 0 holds the response token at a, slots 1 .. K - 1 hold masks (autoregressive drafters: the response tokens), and
the prediction of slot k is scored against the token at position a + k. Positions are columns of a packed row.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dflax.cache import KVCache
from dflax.errors import DflaxError
from dflax.models.drafter import Drafter, greedy_block
from dflax.models.vocabulary import Slices, in_chunks, lookup

PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""Decay of the slot weights by block size (paper, A.1)."""


@dataclass(frozen=True)
class Objective:
    """What is minimised."""

    anchors: int = 512
    """Blocks per packed row, drawn anew every time the row is seen."""
    anchor_choice: Literal["random", "uniform"] = "random"
    """"uniform" cuts the response into blocks one after another instead (ablation of the paper)."""
    weights: Literal["decay", "none", "dpace"] = "decay"
    """Weights of the slots: exp(-(k - 1) / gamma); all 1; or D-PACE (arXiv 2605.18810)."""
    gamma: float = 0.0
    """0: the published value for the block size, else interpolated between them."""
    dpace_alpha: float = 0.5
    dpace_kind: Literal["full", "cumulative_confidence", "continuation_value"] = "full"
    labels: Literal["hard", "soft"] = "hard"
    """"hard": the response token. "soft": cross entropy to the target's distribution truncated to the k most likely tokens and scaled to
    1: up to a constant the KL to that truncated distribution, not to the whole one."""
    chunk: int = 128
    """Blocks whose logits exist at a time."""

    def __post_init__(self) -> None:
        if self.anchors < 1 or self.chunk < 1:
            raise DflaxError(f"anchors is {self.anchors} and chunk is {self.chunk}; both must be at least 1")
        if self.gamma < 0 or not 0 <= self.dpace_alpha <= 1:
            raise DflaxError(
                f"gamma is {self.gamma} and dpace_alpha is {self.dpace_alpha}; gamma >= 0, alpha between 0 and 1"
            )

        if self.weights == "dpace" and self.labels == "soft":
            raise DflaxError(
                "weights is dpace and labels is soft; D-PACE weighs by the probability of the response's own tokens, so labels must be hard"
            )

    def gamma_for(self, block_size: int) -> float:
        return self.gamma or PUBLISHED_GAMMA.get(block_size) or max(1.0, 0.375 * block_size + 1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Packed rows of prompts and responses with what the target says of them.

    tokens [B, S] int32; loss_mask [B, S] bool: tokens of responses; ctx_start [B, S] int32: first column of the token's document;
    features [B, S, M * E]: the tapped layers of the target; soft_ids, soft_logprobs [B, S, k]: the target's k most likely tokens AT a
    position given what stands before it, or None with hard labels. Arrays of JAX, or numpy where they come from a cache.
    """

    tokens: Int[Any, "B S"]
    loss_mask: Bool[Any, "B S"]
    ctx_start: Int[Any, "B S"]
    features: Float[Any, "B S ME"]
    soft_ids: Int[Any, "B S k"] | None = None
    soft_logprobs: Float[Any, "B S k"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """The target's part in drafting, shared and never trained.

    embed: its embedding table. head: the rows of its output matrix that are scored. draft_index: target id -> row of `head`, or -1
    (the draft vocabulary); None when every id is scored.
    """

    embed: Float[Any, "V E"]
    head: Float[Any, "Vd E"]
    draft_index: Int[Any, " V"] | None = None

    @classmethod
    def make(cls, embed: Array, head: Array, draft_ids: Any = None) -> "Frozen":
        if draft_ids is None:
            return cls(embed, head)
        index = (
            jnp.full((embed.shape[0],), -1, jnp.int32).at[draft_ids].set(jnp.arange(len(draft_ids), dtype=jnp.int32))
        )
        return cls(embed, head[draft_ids], index)

    def row(self, ids: Int[Array, "..."]) -> Int[Array, "..."]:
        return ids if self.draft_index is None else self.draft_index[ids]


def anchor_candidates(rows: Rows) -> Bool[Array, "B S"]:
    """Positions a where a and a + 1 are supervised tokens of one document (SpecForge's rule), and something stands before a: text without
    a prompt has no context at its first token, which decoding never meets."""
    ok = rows.loss_mask[:, :-1] & rows.loss_mask[:, 1:] & (rows.ctx_start[:, :-1] == rows.ctx_start[:, 1:])
    ok &= jnp.arange(ok.shape[1]) > rows.ctx_start[:, :-1]
    return jnp.pad(ok, ((0, 0), (0, 1)))


def choose_anchors(
    rows: Rows, n: int, key: PRNGKeyArray, choice: str = "random", block_size: int = 1
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """n anchors per row without replacement, ascending, and which of them are real (a row may have fewer candidates)."""
    candidates = anchor_candidates(rows)
    n = min(n, candidates.shape[1])
    if choice == "uniform":
        first = candidates & ~jnp.pad(candidates, ((0, 0), (1, 0)))[:, :-1]
        column = jnp.arange(candidates.shape[1])
        start = jax.lax.cummax(jnp.where(first, column, -1), axis=1)
        candidates &= (column - start) % (block_size - 1) == 0
    score = jnp.where(candidates, jax.random.uniform(key, candidates.shape), -1.0)
    best, anchors = jax.lax.top_k(score, n)
    anchors = jnp.sort(jnp.where(best >= 0, anchors, candidates.shape[1]), axis=1)
    keep = anchors < candidates.shape[1]
    return jnp.where(keep, anchors, 0).astype(jnp.int32), keep


def supervision(
    rows: Rows, anchors: Int[Array, "B N"], keep: Bool[Array, "B N"], block_size: int
) -> tuple[Int[Array, "B N K"], Int[Array, "B N K"], Bool[Array, "B N K"]]:
    """Label position and label of every slot, and which slots are trained: k > 0, inside the row, same document, supervised."""
    slot = jnp.arange(block_size)
    position = anchors[..., None] + slot
    S = rows.tokens.shape[1]
    inside = position < S
    position = jnp.minimum(position, S - 1)
    take = lambda x: _take(x, position)
    same = take(rows.ctx_start) == _take(rows.ctx_start, anchors)[..., None]
    trained = keep[..., None] & inside & (slot > 0) & same & take(rows.loss_mask)
    return position, take(rows.tokens), trained


def _take(x: Array, position: Int[Array, "B *P"]) -> Array:
    """x [B, S, ...] at positions [B, ...] of its second axis."""
    flat = position.reshape(position.shape[0], -1)
    out = jnp.take_along_axis(x, flat.reshape(*flat.shape, *(1,) * (x.ndim - 2)), axis=1)
    return out.reshape(*position.shape, *x.shape[2:])


def block_hidden(
    drafter: Drafter, frozen: Frozen, rows: Rows, anchors: Int[Array, "B N"], keep: Bool[Array, "B N"], block_size: int
) -> Float[Array, "B N k E"]:
    """The drafter over N blocks per row; hidden states that score slots 1 .. K - 1."""
    config = drafter.config
    dtype = drafter.norm.weight[...].dtype
    fused = drafter.fuse(rows.features.astype(dtype))
    B, S, _ = fused.shape
    nothing = KVCache.empty(config, B, 0, dtype)
    embedded = lookup(frozen.embed, rows.tokens).astype(dtype) if config.fused else fused
    k, v = drafter.context(embedded, fused, nothing, rows.ctx_start)
    context = KVCache(k.transpose(0, 1, 3, 2, 4), v.transpose(0, 1, 3, 2, 4), jnp.full((B,), S, jnp.int32))
    if config.autoregressive:
        ids = supervision(rows, anchors, keep, block_size)[1]
    else:
        first = jnp.where(keep, _take(rows.tokens, anchors), config.mask_token_id)
        ids = greedy_block(first, config.mask_token_id, block_size)
    last = _take(fused, jnp.maximum(anchors - 1, 0))
    start = _take(rows.ctx_start, anchors)
    return drafter.predictions(drafter.block(lookup(frozen.embed, ids).astype(dtype), last, context, anchors, start))


def decay_weights(block_size: int, gamma: float) -> Float[Array, " k"]:
    """exp(-(k - 1) / gamma) for k = 1 .. K - 1 (paper, section 4.2)."""
    return jnp.exp(-jnp.arange(block_size - 1, dtype=jnp.float32) / gamma)


def dpace_weights(
    cross_entropy: Float[Array, "B N k"], trained: Bool[Array, "B N k"], alpha: float, kind: str
) -> Float[Array, "B N k"]:
    """D-PACE (arXiv 2605.18810): how much a slot matters for the expected accepted length, from the drafter's own probabilities.

    p~ = (1 - alpha) p + alpha; prefix products c_j = p~_1 ... p~_j. "full": sum of c_m over m >= j (the gradient of the expected length
    with respect to log p~_j). "cumulative_confidence": c_j alone. "continuation_value": that sum divided by c_j. No gradient flows.
    """
    p = jax.lax.stop_gradient(jnp.exp(-cross_entropy))
    p = jnp.where(trained, (1 - alpha) * p + alpha, 0.0)
    prefix = jnp.cumprod(p, axis=-1)
    tail = jnp.cumsum(prefix[..., ::-1], axis=-1)[..., ::-1]
    weight = {
        "full": tail,
        "cumulative_confidence": prefix,
        "continuation_value": tail / jnp.where(prefix > 0, prefix, 1.0),
    }[kind]
    return jnp.where(trained, weight, 0.0)


def objective(
    drafter: Drafter, frozen: Frozen, rows: Rows, anchors: Int[Array, "B N"], keep: Bool[Array, "B N"], block_size: int,
    config: Objective,
) -> tuple[Float[Array, ""], dict[str, Array]]:  # fmt: skip
    """Loss and metrics of given anchors.

    Decay and uniform weights: sum(w * ce) / sum(w) over the batch; D-PACE: sum(w * ce) / rows (SpecForge's normalisation). Metrics:
    accuracy over trained slots, `slot1` accuracy, and `acceptance`: the expected accepted length + 1 if the response were greedy.
    """
    hidden = block_hidden(drafter, frozen, rows, anchors, keep, block_size)
    position, label, trained = (x[..., 1:] for x in supervision(rows, anchors, keep, block_size))
    row = frozen.row(label)
    scored = trained & (row >= 0)
    row = jnp.maximum(row, 0)
    if config.labels == "soft":
        if rows.soft_ids is None or rows.soft_logprobs is None:
            raise DflaxError("soft labels need the target's distribution; these rows carry none")
        soft_row = frozen.row(_take(rows.soft_ids, position))
        share = jnp.where(soft_row >= 0, jnp.exp(_take(rows.soft_logprobs, position).astype(jnp.float32)), 0.0)
        total = share.sum(-1, keepdims=True)
        scored = trained & (total[..., 0] > 0)
        ids, shares = jnp.maximum(soft_row, 0), share / jnp.where(total > 0, total, 1.0)
    else:
        ids, shares = row[..., None], jnp.ones((*row.shape, 1), jnp.float32)
    flat = lambda x, last: x.reshape(-1, *last)
    ce, best = frozen_head_loss(
        drafter.logits, flat(hidden, hidden.shape[-1:]), frozen.head, flat(ids, ids.shape[-1:]), flat(shares, ids.shape[-1:]),
        config.chunk * (block_size - 1),
    )  # fmt: skip
    ce, best = ce.reshape(scored.shape), best.reshape(scored.shape)
    if config.weights == "dpace":
        weight = dpace_weights(ce, scored, config.dpace_alpha, config.dpace_kind)
        loss = jnp.sum(weight * ce) / rows.tokens.shape[0]
    else:
        decay = decay_weights(block_size, config.gamma_for(block_size)) if config.weights == "decay" else 1.0
        weight = jnp.where(scored, decay, 0.0)
        loss = jnp.sum(weight * ce) / jnp.maximum(weight.sum(), 1e-9)
    right = (best == row) & trained & (frozen.row(label) >= 0)
    share_of = lambda hit, of: hit.sum() / jnp.maximum(of.sum(), 1)
    whole = keep[..., None] & trained
    reached = jnp.cumprod(right | ~whole, axis=-1, dtype=jnp.float32) * whole
    metrics = {
        "accuracy": share_of(right, trained),
        "slot1": share_of(right[..., 0], trained[..., 0]),
        "acceptance": 1 + reached.sum() / jnp.maximum(keep.sum(), 1),
        "tokens": keep.sum() * block_size,
    }
    return loss, metrics


def frozen_head_loss(
    logits_of: Any,
    hidden: Float[Array, "R E"],
    head: Float[Array, "V E"],
    ids: Int[Array, "R k"],
    shares: Float[Array, "R k"],
    chunk: int,
) -> tuple[Float[Array, " R"], Int[Array, " R"]]:
    """Cross entropy of every row against sum_i shares_i * onehot(ids_i), and the argmax; [R, V] logits exist a chunk at a time.

    As the head is frozen, the gradient of a row's loss with respect to its hidden state is made in the forward pass, while the chunk's
    logits are there: nothing is computed twice. On a mesh every device takes a chunk of its own rows at a time, and the vocabulary is cut
    (`dflax.models.vocabulary`). `logits_of(hidden, head) -> float32 logits`.
    """
    cut = Slices.of(head, hidden.shape[0])

    loss_of = partial(cut.cross_entropy, logits_of)

    @jax.custom_vjp
    def whole(hidden, head, ids, shares):
        return cut.run(partial(in_chunks, loss_of, chunk), hidden, head, ids, shares)

    def forward(hidden, head, ids, shares):
        def part(h, head, ids, shares):
            ce, pull, best = jax.vjp(lambda h: loss_of(h, head, ids, shares), h, has_aux=True)
            gradient = pull(jnp.ones_like(ce) / cut.copies)[0]
            return ce, best, jax.lax.psum(gradient, cut.shared) if cut.shared else gradient

        ce, best, gradient = cut.run(partial(in_chunks, part, chunk), hidden, head, ids, shares)
        return (ce, best), gradient

    def backward(gradient, cotangents):
        return gradient * cotangents[0][:, None].astype(gradient.dtype), None, None, None

    whole.defvjp(forward, backward)
    return whole(hidden, head, ids, shares)


def make_loss(merge: Any, block_size: int, config: Objective, prepare: Any = None) -> Any:
    """The loss for `trainer.fit`: (params, batch, key, frozen) -> (loss, metrics).

    merge(params) -> Drafter. prepare(batch, frozen) -> (Rows, Frozen): runs the target where features are made online.
    """
    prepare = prepare or (lambda batch, frozen: (batch, frozen))

    def loss(params, batch, key, frozen):
        rows, shared = prepare(batch, frozen)
        anchors, keep = choose_anchors(rows, config.anchors, key, config.anchor_choice, block_size)
        return objective(merge(params), shared, rows, anchors, keep, block_size, config)

    return loss
