"""What a diffusion model would write into a slot now, and how sure it is.

Temperature, top-k and top-p are those of autoregressive sampling. LLaDA's form, argmax of exp(logit) / (-ln U) ^ T in float64, is the
argmax of logit + T g with Gumbel noise g, which float32 holds without loss where it matters; so is Dream's draw from softmax(logit /
T). What differs is the confidence: LLaDA's is the plain distribution's, Dream's the tempered one's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from dflax.infer.sampling import SamplingParams, filtered_logprobs, gumbel_of


class Candidates(NamedTuple):
    """logits: what `raw` is a softmax of, float32 [B, T, V]. token: int32 [B, T]. raw: the candidate's probability, float32 [B, T]."""

    logits: Array
    token: Array
    raw: Array


def candidates(
    logits: Float[Array, "B T V"],
    params: SamplingParams,
    key: Key[Array, "B T"],
    mask_token_id: int,
    tempered: bool = False,
    sampled: bool = True,
) -> Candidates:
    """One candidate per slot: the argmax, or at a temperature a draw. The mask token is never one.

    tempered: confidences after temperature, top-k and top-p (as published for Dream), where at temperature 0 top-k and top-p act on
    the plain distribution; else of the plain distribution over the whole vocabulary. sampled: False where no row has a
    temperature, nor (tempered) top-k or top-p: a smaller program, same result.
    """
    is_mask = jnp.arange(logits.shape[-1], dtype=jnp.int32) == mask_token_id
    allowed = jnp.where(is_mask, -jnp.inf, logits)
    best = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    if not sampled:
        return Candidates(logits, best, probability(logits, best))
    warm = params.temperature > 0
    per_slot = lambda v: jnp.broadcast_to(v[:, None], logits.shape[:2])
    scale, top_k, top_p = (
        per_slot(jnp.where(warm, params.temperature, 1.0)),
        per_slot(params.top_k),
        per_slot(params.top_p),
    )
    seen = filtered_logprobs(logits, scale, top_k, top_p) if tempered else logits

    def draw() -> Int32[Array, "B T"]:
        drawn = filtered_logprobs(allowed, scale, top_k, top_p) + gumbel_of(key, logits.shape[-1])
        return jnp.where(warm[:, None], jnp.argmax(drawn, axis=-1).astype(jnp.int32), best)

    token = jax.lax.cond(jnp.any(warm), draw, lambda: best)
    return Candidates(seen, token, probability(seen, token))


def probability(logits: Float[Array, "... V"], token: Int[Array, "..."]) -> Float[Array, "..."]:
    """softmax(logits) at a token, float32."""
    at = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return jnp.exp(at - jax.nn.logsumexp(logits, axis=-1))


def margin(logits: Float[Array, "... V"], token: Int[Array, "..."]) -> Float[Array, "..."]:
    """How far a token's logit is ahead of the best of all others, float32: of the most probable one the gap of the top two.

    The mask token counts among the others: where it is ahead, its gap is no sureness of the token that would be written.
    """
    at = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    own = jnp.arange(logits.shape[-1], dtype=token.dtype) == token[..., None]
    return at - jnp.max(jnp.where(own, -jnp.inf, logits), axis=-1)


def without(logits: Float[Array, "B T V"], ids: Int[Array, "B n"]) -> Float[Array, "B T V"]:
    """Logits with these tokens of each row (-1: none) at -inf."""
    return jnp.where(among(ids, logits.shape[-1])[:, None], -jnp.inf, logits)


def among(ids: Int[Array, "B n"], vocab: int) -> Bool[Array, "B V"]:
    """Which tokens are in each row's list (-1: none)."""
    B = ids.shape[0]
    target = jnp.where(ids < 0, vocab, ids)
    rows = jnp.arange(B, dtype=jnp.int32)[:, None]
    return jnp.zeros((B, vocab), bool).at[rows, target].set(True, mode="drop")
