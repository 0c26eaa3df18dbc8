"""Which drafted tokens a verified block keeps, and the token that follows them. Pure functions.

A block has T rows: the anchor and T - 1 drafts. The target's output at row t speaks about the token after row t, so
draft t (counted from 0) is judged by row t, and the row of the last accepted token gives the bonus token.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Acceptance:
    """What a round commits."""

    path: Int32[Array, "B T"]
    """int32 [B, T]: block rows to commit, in order; the first n count. A chain's path is 0, 1, 2, ..."""
    n: Int32[Array, "B"]
    """int32 [B]: rows to commit, 1 to T: the anchor and the accepted drafts. As many tokens are gained."""
    tokens: Int32[Array, "B T"]
    """int32 [B, T]: the accepted drafts, then the bonus token at column n - 1, then 0."""


def accept_chain(drafts: Int[Array, "B drafts"], chosen: Int[Array, "B drafts+1"]) -> Acceptance:
    """Accepts drafts while they equal what the target chose: greedy decoding, and sampling with argmax drafts.

    Every committed token is the target's own choice, so the output is that of plain decoding with the same noise.

    Args:
      drafts: int32 [B, T - 1].
      chosen: int32 [B, T], the target's choice for the token after each block row.
    """
    accepted = _leading(drafts == chosen[:, :-1])
    bonus = jnp.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
    return _chain(drafts, accepted, bonus)


def accept_sampled(
    drafts: Int[Array, "B drafts"],
    draft_logprobs: Float[Array, "B drafts V"],
    target_logprobs: Float[Array, "B drafts+1 V"],
    uniforms: Float[Array, "B drafts"],
    gumbel: Float[Array, "B drafts+1 V"],
) -> Acceptance:
    """Rejection sampling of sampled drafts: tokens have the target's distribution (arXiv 2211.17192, algorithm 1).

    Args:
      drafts: int32 [B, T - 1], drawn from `draft_logprobs`.
      draft_logprobs: float32 [B, T - 1, V], log q; -inf where the drafter could not draw.
      target_logprobs: float32 [B, T, V], log p, after temperature, top-k and top-p.
      uniforms: float32 [B, T - 1] in [0, 1), independent of the draws of the drafts.
      gumbel: float32 [B, T, V], noise of the bonus token for each row it may come from, independent of both.
    """
    accepted, following = reject(drafts, draft_logprobs, target_logprobs, uniforms)
    noise = jnp.take_along_axis(gumbel, accepted[:, None, None], axis=1)[:, 0]
    return _chain(drafts, accepted, jnp.argmax(following + noise, axis=-1))


def reject(
    drafts: Int[Array, "B drafts"],
    draft_logprobs: Float[Array, "B drafts V"],
    target_logprobs: Float[Array, "B drafts+1 V"],
    uniforms: Float[Array, "B drafts"],
) -> tuple[Int32[Array, "B"], Float[Array, "B V"]]:
    """The rule of `accept_sampled` up to its last draw.

    Draft x is accepted while u q(x) < p(x). The next token is drawn from max(p - q, 0), normalised, at the first row
    that failed, or from p at the last row when none did.

    Returns:
      How many drafts are accepted, int32 [B], and the log-probabilities of the next token, float32 [B, V].
    """
    q, p = (
        jnp.exp(jnp.take_along_axis(logprobs, drafts[:, :, None], axis=-1)[..., 0])
        for logprobs in (draft_logprobs, target_logprobs[:, :-1])
    )
    accepted = _leading(uniforms * q < p)
    row = accepted[:, None, None]
    target = jnp.take_along_axis(target_logprobs, row, axis=1)[:, 0]
    # Past the last draft there is no q: the fill of 0 makes the residual p itself.
    drafted = jnp.take_along_axis(draft_logprobs, row, axis=1, mode="fill", fill_value=-jnp.inf)[:, 0]
    residual = jnp.maximum(jnp.exp(target) - jnp.exp(drafted), 0.0)
    mass = jnp.sum(residual, axis=-1, keepdims=True)
    # p = q leaves nothing and rejects nothing; rounding may still reject, and then p is the distribution to draw from.
    following = jnp.where(mass > 0, jnp.log(residual) - jnp.log(jnp.where(mass > 0, mass, 1.0)), target)
    return accepted, following


def _leading(ok: Array) -> Int32[Array, "B"]:
    """How many entries of each row are true before the first false one."""
    return jnp.sum(jnp.cumprod(ok.astype(jnp.int32), axis=1), axis=1)


def _chain(drafts: Int[Array, "B drafts"], accepted: Int32[Array, "B"], bonus: Int[Array, "B"]) -> Acceptance:
    batch, block = drafts.shape[0], drafts.shape[1] + 1
    column = jnp.arange(block, dtype=jnp.int32)[None, :]
    drafted = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(column < accepted[:, None], drafted, jnp.where(column == accepted[:, None], bonus[:, None], 0))
    return Acceptance(
        path=jnp.broadcast_to(column, (batch, block)),
        n=(accepted + 1).astype(jnp.int32),
        tokens=tokens.astype(jnp.int32),
    )
