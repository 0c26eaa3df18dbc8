"""The one jitted decoding loop: draft a block, verify it, accept a path, commit it. Plain decoding is block size 1 without a drafter.

Everything here but `Program` is a pure function that the loop, its tests and a server trace alike. A round never writes what is
not accepted, so nothing is rolled back; what a row does depends on that row alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from dflax.config import DrafterConfig, ModelConfig
from dflax.infer.accept import Acceptance, accept_chain, accept_sampled
from dflax.infer.sampling import Noise, SamplingParams, choose, filtered_logprobs, gumbel, uniform
from dflax.infer.state import LoopState
from dflax.model import build
from dflax.models import params as parameters
from dflax.models.decoder import Decoder
from dflax.models.drafter import Drafter
from dflax.sharding import place_loop_state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftVocabulary:
    """The part of the target's vocabulary that a drafter scores. (Annotated Any: compiling ahead of time describes it by shapes.)"""

    ids: Int32[Any, "Vd"]
    """int32 [Vd]: target ids."""
    head: Float[Any, "Vd E"]
    """[Vd, E]: these rows of the target's head, picked once."""


@dataclass(frozen=True)
class Pair:
    """The modules a loop runs, rebuilt from their leaves while it is traced."""

    target: Decoder
    drafter: Drafter | None
    vocabulary: DraftVocabulary | None


# --- one round ---


def draft(
    pair: Pair, state: LoopState, params: SamplingParams, block_size: int, sampled: bool
) -> tuple[Int32[Array, "B drafts"], Float[Array, "B drafts V"] | None]:
    """The block_size - 1 tokens that the drafter proposes after each anchor, at once or (autoregressive kinds) one by one.

    Returns:
      Target ids, int32 [B, K - 1]: the argmax, or if `sampled` a draw from the drafter's filtered distribution; and then its
      log-probabilities over the target's vocabulary, float32 [B, K - 1, V], else None.
    """
    target, drafter, vocabulary = pair.target, pair.drafter, pair.vocabulary
    anchor = _anchors(state)
    if drafter is None or block_size == 1:
        return jnp.zeros((anchor.shape[0], 0), jnp.int32), None
    context = state.draft_cache
    assert context is not None
    head = target.head if vocabulary is None else vocabulary.head
    last = state.last_fused if state.last_fused is not None else jnp.zeros((anchor.shape[0], head.shape[1]), head.dtype)

    def score(ids: Int32[Array, "B T"]) -> Float[Array, "B drafts E"]:
        embedded = target.embed_tokens(ids)[:, None]
        return drafter.predictions(drafter.block(embedded, last[:, None], context, state.cursor[:, None]))[:, 0]

    def pick(logits: Float[Array, "B T V"], position: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
        best = (
            choose(logits, params, position, Noise.DRAFT) if sampled else jnp.argmax(logits, axis=-1).astype(jnp.int32)
        )
        return best if vocabulary is None else vocabulary.ids[best]

    mask = jnp.full((anchor.shape[0], block_size - 1), drafter.config.mask_token_id, jnp.int32)
    position = state.cursor[:, None] + jnp.arange(1, block_size, dtype=jnp.int32)
    if not drafter.config.autoregressive:
        logits = drafter.logits(score(jnp.concatenate([anchor, mask], axis=1)), head)
        drafts = pick(logits, position)
    else:
        ids, rows = anchor, []
        for i in range(block_size - 1):
            rows.append(drafter.logits(score(jnp.concatenate([ids, mask[:, :1]], axis=1))[:, -1:], head))
            ids = jnp.concatenate([ids, pick(rows[-1], position[:, i : i + 1])], axis=1)
        logits, drafts = jnp.concatenate(rows, axis=1), ids[:, 1:]
    if not sampled:
        return drafts, None
    logprobs = _logprobs(logits, params)
    if vocabulary is not None:
        everywhere = jnp.full((*drafts.shape, target.head.shape[0]), -jnp.inf)
        logprobs = everywhere.at[..., vocabulary.ids].set(logprobs)
    return drafts, logprobs


def decode_round(pair: Pair, state: LoopState, params: SamplingParams, block_size: int, sampled: bool) -> LoopState:
    """Draft, verify, accept, commit: every row that is not done gains 1 to block_size tokens."""
    drafts, draft_logprobs = draft(pair, state, params, block_size, sampled)
    ids = jnp.concatenate([_anchors(state), drafts], axis=1)
    taps = () if pair.drafter is None else pair.drafter.config.target_layer_ids
    block = pair.target.read(ids, state.cache, taps=taps)
    assert block.k is not None
    assert block.v is not None
    logits = pair.target.logits(block.hidden)
    position = state.cursor[:, None] + jnp.arange(1, block_size + 1, dtype=jnp.int32)
    if draft_logprobs is None:
        accepted = accept_chain(drafts, choose(logits, params, position))
    else:
        uniforms = uniform(params.seed, params.index, position[:, :-1])
        noise = gumbel(params.seed, params.index, position, logits.shape[-1])
        accepted = accept_sampled(drafts, draft_logprobs, _logprobs(logits, params), uniforms, noise)

    n, done = cut(state, accepted, params)
    state = write_tokens(state, accepted, n, done)
    if block.features is not None:
        state = commit_context(pair, state, jnp.take_along_axis(ids, accepted.path, axis=1),
                               jnp.take_along_axis(block.features, accepted.path[..., None], axis=1), n)  # fmt: skip
    return replace(state, cache=state.cache.commit(block.k, block.v, accepted.path, n))


def cut(state: LoopState, accepted: Acceptance, params: SamplingParams) -> tuple[Int32[Array, "B"], Bool[Array, "B"]]:
    """How many of the accepted rows a row commits, and whether it is done then: not past its budget nor its first stop token."""
    left = state.end - 1 - state.cursor
    n = jnp.minimum(accepted.n, left)
    stops = jnp.any(accepted.tokens[:, :, None] == params.stop_ids[:, None], axis=-1)
    to_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, accepted.tokens.shape[1] + 1)
    done = state.done | (n >= left) | (to_stop <= n)
    return jnp.where(state.done, 0, jnp.minimum(n, to_stop)).astype(jnp.int32), done


def write_tokens(state: LoopState, accepted: Acceptance, n: Int32[Array, "B"], done: Bool[Array, "B"]) -> LoopState:
    """Tokens [:n] behind the anchor, and the round into the statistics. The cursor moves when the cache is committed."""
    B, S = state.tokens.shape
    row = jnp.arange(B, dtype=jnp.int32)
    slot = jnp.arange(accepted.tokens.shape[1], dtype=jnp.int32)
    column = jnp.where(slot < n[:, None], state.cursor[:, None] + 1 + slot, S)
    live = ~state.done
    return replace(
        state,
        tokens=state.tokens.at[row[:, None], column].set(accepted.tokens, mode="drop"),
        acceptance=state.acceptance.at[row, jnp.where(live, state.rounds, S)].set(accepted.n, mode="drop"),
        rounds=state.rounds + live,
        done=done,
    )


def commit_context(
    pair: Pair, state: LoopState, ids: Int32[Array, "B T"], features: Float[Array, "B T ME"], n: Int32[Array, "B"]
) -> LoopState:
    """The drafter's keys and values of the first n of these tokens, from the target's features of them, behind its cache."""
    drafter, cache = pair.drafter, state.draft_cache
    assert drafter is not None
    assert cache is not None
    fused = drafter.fuse(features)
    k, v = drafter.context(pair.target.embed_tokens(ids), fused, cache)
    path = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    last = state.last_fused
    return replace(
        state,
        draft_cache=cache.commit(k, v, path, n),
        last_fused=None if last is None else _last_live(fused, n, last),
    )


# --- the prompt ---


def prefill_chunk(
    pair: Pair,
    state: LoopState,
    hidden: Float[Array, "B E"],
    length: Int32[Array, "B"],
    start: Int32[Array, ""],
    size: int,
) -> tuple[LoopState, Float[Array, "B E"]]:
    """Reads prompt columns start .. start + size - 1, of each row those below its prompt `length`.

    `hidden` carries the target's final state of every row's last prompt token read so far.
    """
    ids = jnp.take(state.tokens, start + jnp.arange(size, dtype=jnp.int32), axis=1, mode="clip")
    n = jnp.clip(length - start, 0, size)
    taps = () if pair.drafter is None else pair.drafter.config.target_layer_ids
    block, cache = pair.target.write(ids, state.cache, n, taps=taps)
    state = replace(state, cache=cache)
    if block.features is not None:
        state = commit_context(pair, state, ids, block.features, n)
    return state, _last_live(block.hidden, n, hidden)


def first_token(pair: Pair, state: LoopState, hidden: Float[Array, "B E"], params: SamplingParams) -> LoopState:
    """The token after the prompt becomes the anchor; it belongs to no round."""
    B, S = state.tokens.shape
    token = choose(pair.target.logits(hidden)[:, None], params, state.cursor[:, None])
    tokens = state.tokens.at[jnp.arange(B, dtype=jnp.int32), jnp.minimum(state.cursor, S - 1)].set(token[:, 0])
    stopped = jnp.any(token == params.stop_ids, axis=1)
    return replace(state, tokens=tokens, done=state.done | stopped | (state.cursor + 1 >= state.end))


# --- compiled ---


@dataclass(frozen=True)
class Program:
    """The jitted functions of a target and a drafter (or none), compiled once per shape, block size and kind of drafts.

    They depend on the configurations, not on the weights, which come as flat leaves (`Model.leaves`) with every call: the same
    programs serve every checkpoint of a drafter in training. States are donated.

      start(prompts [B, S], end [B], dtype=, mesh=) -> (state, hidden [B, E]): placed over the mesh if there is one
      vocabulary(weights, ids [Vd]) -> DraftVocabulary
      prefill(weights, state, hidden, length [B], start, size=) -> (state, hidden)
      first(weights, state, hidden, params) -> state
      run(weights, state, params, rounds, block_size=, sampled=) -> state: until every row is done, `rounds` at most

    where weights = (target leaves, drafter leaves or None, DraftVocabulary or None).
    """

    start: Any
    vocabulary: Any
    prefill: Any
    first: Any
    run: Any

    def compiled(self) -> int:
        """How many programs were compiled so far."""
        return sum(f._cache_size() for f in (self.start, self.vocabulary, self.prefill, self.first, self.run))


@lru_cache(maxsize=16)
def program(target: ModelConfig, drafter: DrafterConfig | None) -> Program:
    """The program of this pair of configurations."""
    merge_target, merge_drafter = merger(target), merger(drafter)

    def pair(weights: Any) -> Pair:
        target_leaves, drafter_leaves, vocabulary = weights
        return Pair(merge_target(target_leaves), merge_drafter(drafter_leaves), vocabulary)

    @partial(jax.jit, static_argnames=("dtype", "mesh"))
    def start(prompts, end, dtype, mesh=None):
        B = prompts.shape[0]
        state = LoopState.start(prompts, end, target, drafter, dtype), jnp.zeros((B, target.hidden_size), dtype)
        return state if mesh is None else place_loop_state(state, mesh, B)

    @jax.jit
    def vocabulary(weights, ids):
        return DraftVocabulary(ids, pair(weights).target.head[ids])

    @partial(jax.jit, donate_argnames="state", static_argnames="size")
    def prefill(weights, state, hidden, length, start, size):
        return prefill_chunk(pair(weights), state, hidden, length, start, size)

    @partial(jax.jit, donate_argnames="state")
    def first(weights, state, hidden, params):
        return first_token(pair(weights), state, hidden, params)

    @partial(jax.jit, donate_argnames="state", static_argnames=("block_size", "sampled"))
    def run(weights, state, params, rounds, block_size, sampled=False):
        modules = pair(weights)

        def unfinished(carry):
            done_rounds, state = carry
            return (done_rounds < rounds) & ~jnp.all(state.done)

        def body(carry):
            done_rounds, state = carry
            return done_rounds + 1, decode_round(modules, state, params, block_size, sampled)

        return jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]

    return Program(start, vocabulary, prefill, first, run)


def merger(config: ModelConfig | DrafterConfig | None) -> Callable[[Any], Any]:
    """leaves -> module for any weights of this configuration."""
    if config is None:
        return lambda leaves: None
    graphdef, abstract = nnx.split(parameters.abstract(lambda rngs: build(config, rngs)))
    treedef = jax.tree.structure(abstract)
    return lambda leaves: nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def _anchors(state: LoopState) -> Int32[Array, "B 1"]:
    return jnp.take_along_axis(state.tokens, state.cursor[:, None], axis=1, mode="clip")


def _last_live(rows: Float[Array, "B T E"], n: Int32[Array, "B"], old: Float[Array, "B E"]) -> Float[Array, "B E"]:
    """Row n - 1 of each; the old one where n = 0."""
    last = jnp.take_along_axis(rows, jnp.maximum(n - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(n[:, None] > 0, last, old)


def _logprobs(logits: Float[Array, "B T V"], params: SamplingParams) -> Float[Array, "B T V"]:
    slots = (jnp.broadcast_to(v[:, None], logits.shape[:2]) for v in (params.temperature, params.top_k, params.top_p))
    return filtered_logprobs(logits, *slots)
