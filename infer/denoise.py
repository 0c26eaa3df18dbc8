"""The one jitted denoising loop: look at every row's active block, commit what the policy says, until nothing is masked.

A pass is full (the whole canvas) or short (the active block over a cached canvas, or block and suffix over a cached prefix). Without
cache all passes are full and every row goes on to its next block on its own. With one, a full pass refreshes the cache of all rows,
then short passes follow until every row's block is complete (or the cache is `refresh_every` steps old): rows wait for each other
there, so that what a row computes never depends on its neighbours. The head runs on the rows of the active blocks only.

Everything here but `program` is a pure function of `CanvasState`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dflax.cache import KVCache
from dflax.config import ModelConfig
from dflax.infer.candidates import candidates, margin, probability, without
from dflax.infer.canvas import ActiveBlock, Cache, CanvasState, active_block, first_column, masked_columns, visible
from dflax.infer.endings import stop_length
from dflax.infer.extrapolation import ConfidenceExtrapolation, left_coverage
from dflax.infer.policies import Observation, Policy, linear_quota
from dflax.infer.sampling import Noise, SamplingParams, keys
from dflax.infer.speculative import merger
from dflax.models.decoder import Decoder
from dflax.sharding import place_loop_state

CHUNK = 64  # rows that a question about the whole canvas sends through the head at once


@dataclass(frozen=True)
class DenoisePlan:
    """What is static in a loop: one program each."""

    block_length: int
    gen_length: int
    cache: Cache
    guided: bool
    sampled: bool
    """Whether any row draws its candidates (`candidates`)."""

    @property
    def blocks(self) -> int:
        return self.gen_length // self.block_length

    @property
    def suffixes(self) -> list[int]:
        """Lengths of block and suffix, the longest last: multiples of the block length."""
        lengths = self.cache.suffix_lengths
        counts = {-(-self.blocks * k // lengths) for k in range(1, lengths + 1)}
        return [count * self.block_length for count in sorted(counts)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoiseRequest:
    """What rows ask for, all traced: other values compile nothing."""

    params: SamplingParams
    """Temperature, top-k, top-p, seed and prompt number of each row; `stop_ids` are its end tokens."""
    guidance: Float[Any, "B"]
    """float32 [B]: w of logits = u + (w + 1) (l - u); read in guided plans only."""
    steps: Int32[Any, ""]
    """int32: steps that the schedule has for a block."""
    count_empty: Bool[Any, ""]
    """bool: `Cache.count_empty_pass`."""
    policy: Any
    """The Policy."""
    ahead: Any
    """The ConfidenceExtrapolation, or None."""
    end: Any
    """The EndOfText, or None."""


class View(NamedTuple):
    """What a pass shows: logits of the active blocks, and where on the canvas an end token is predicted."""

    logits: Float[Array, "B T V"]
    end: Float[Array, "B S"] | None
    """`end_probability` of every column that the pass computed, -1 elsewhere; None if nobody asks for end tokens outside the block."""


# --- passes ---


def full_pass(
    model: Decoder, state: CanvasState, plan: DenoisePlan, request: DenoiseRequest
) -> tuple[View, KVCache | None]:
    """The whole canvas, whose keys and values become the cache's."""
    tokens, length = _with_unconditional(model, state, plan, visible(state, _mask(model)))
    x, cache = model.canvas(tokens, length, state.cache)
    first = jnp.zeros_like(state.length)
    return _view(model, state, plan, request, x, first), None if state.cache is None else cache


def short_pass(model: Decoder, state: CanvasState, plan: DenoisePlan, request: DenoiseRequest) -> View:
    """The active blocks, with a prefix cache all behind them too."""
    cache, kept = plan.cache, state.cache
    assert kept is not None
    lead = 1 if model.config.shifted_logits and not cache.unconditional_first else 0
    first = first_column(state, plan.block_length) - lead

    def run(T: int) -> View:
        S = state.tokens.shape[1]
        column = first[:, None] + jnp.arange(T, dtype=jnp.int32)
        tokens = jnp.take_along_axis(visible(state, _mask(model)), jnp.minimum(column, S - 1), axis=1)
        n = jnp.clip(state.length - first, 0, T)
        if cache.kind == "dual":
            ctx = state.cached_length if cache.stale_suffix else state.length
            hole = jnp.stack([first, first + n], axis=1)
        else:
            ctx, hole = first, None
        tokens, n, at, ctx, hole = _with_unconditional(model, state, plan, tokens, n, first, ctx, hole)
        x = model.stretch(tokens, kept, at, n, ctx, hole)
        return _view(model, state, plan, request, x, first)

    if cache.kind == "dual":
        return run(plan.block_length + lead)
    active = jnp.any(active_block(state, plan.block_length, _mask(model)).masked, axis=1)
    longest = jnp.max(jnp.where(active, state.length - first, 0))
    widths = [width + lead for width in plan.suffixes]
    which = jnp.sum(longest > jnp.array(widths[:-1], jnp.int32)) if len(widths) > 1 else jnp.int32(0)
    return jax.lax.switch(which, [partial(run, width) for width in widths])


def _with_unconditional(model: Decoder, state: CanvasState, plan: DenoisePlan, tokens: Array, *per_row: Any) -> tuple:
    """Under guidance the rows twice, in the second half with every prompt token masked; tokens are those from a column on."""
    if not plan.guided:
        return (tokens, *(per_row or (state.length,)))
    first = per_row[1] if per_row else jnp.zeros_like(state.length)
    column = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    without_prompt = jnp.where(column < state.start[:, None], _mask(model), tokens)
    twice = lambda x: None if x is None else jnp.concatenate([x, x])
    return (jnp.concatenate([tokens, without_prompt]), *map(twice, per_row or (state.length,)))


def _view(
    model: Decoder,
    state: CanvasState,
    plan: DenoisePlan,
    request: DenoiseRequest,
    x: Float[Array, "R W E"],
    first: Int32[Array, "B"],
) -> View:
    """x: the residual stream of columns first[b] .. first[b] + W - 1, of B rows or (guided) 2 B."""
    B, W = state.tokens.shape[0], x.shape[1]
    shift = int(model.config.shifted_logits)  # the one place where it is undone: row i - 1 predicts column i

    def logits(row: Int32[Array, "B T"]) -> Float[Array, "B T V"]:
        """Of the columns that rows `row` of x predict."""
        index = jnp.clip(row, 0, W - 1)[..., None]
        if not plan.guided:
            return model.predict(jnp.take_along_axis(x, index, axis=1))
        both = model.predict(jnp.take_along_axis(x, jnp.concatenate([index, index]), axis=1))
        with_prompt, without_prompt = both[:B], both[B:]
        w = request.guidance[:, None, None]
        return jnp.where(
            w == 0, with_prompt, without_prompt + (w + 1) * (with_prompt - without_prompt)
        )  # 0: as it is alone

    block = active_block(state, plan.block_length, _mask(model))
    of_block = logits(block.column - shift - first[:, None])
    if request.end is None or not (request.end.truncate and request.end.anywhere):
        return View(of_block, None)
    masked = masked_columns(state, _mask(model)) & ~state.done[:, None]

    def chunk(i: Array) -> tuple[Array, Array]:
        row = jnp.broadcast_to(i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32), (B, CHUNK))
        column = first[:, None] + row + shift
        asked = jnp.take_along_axis(masked, jnp.clip(column, 0, masked.shape[1] - 1), axis=1)
        asked &= (row < W) & (column < state.length[:, None])
        return column, end_probability(logits(row), asked, request.params, _mask(model))

    column, p = jax.lax.map(chunk, jnp.arange(-(-W // CHUNK), dtype=jnp.int32))  # [chunks, B, CHUNK]
    return View(of_block, _on_canvas(state, column.swapaxes(0, 1).reshape(B, -1), p.swapaxes(0, 1).reshape(B, -1)))


def end_probability(
    logits: Float[Array, "B C V"], asked: Bool[Array, "B C"], params: SamplingParams, mask: int
) -> Float[Array, "B C"]:
    """Probability of a place's argmax where that is an end token; -1 where it is none or was not asked for."""
    is_mask = jnp.arange(logits.shape[-1], dtype=jnp.int32) == mask
    top = jnp.argmax(jnp.where(is_mask, -jnp.inf, logits), axis=-1).astype(jnp.int32)
    return jnp.where(asked & _is_end(top, params), probability(logits, top), -1.0)


def _on_canvas(state: CanvasState, column: Int32[Array, "B C"], p: Float[Array, "B C"]) -> Float[Array, "B S"]:
    """p at its columns, -1 elsewhere."""
    nowhere = jnp.full(state.tokens.shape, -1.0)
    at = jnp.where((p >= 0) & (column >= 0), column, state.tokens.shape[1])
    return nowhere.at[jnp.arange(len(p), dtype=jnp.int32)[:, None], at].set(p, mode="drop")


# --- steps ---


def enter(state: CanvasState, plan: DenoisePlan, request: DenoiseRequest, mask: int) -> CanvasState:
    """Rows whose block is complete go on to their next one."""
    block = active_block(state, plan.block_length, mask)
    moves = ~jnp.any(block.masked, axis=1) & ~state.done
    state = replace(state, block=state.block + moves, step=jnp.where(moves, 0, state.step))
    inside = jnp.sum(active_block(state, plan.block_length, mask).masked, axis=1, dtype=jnp.int32)
    trend = None if request.ahead is None else request.ahead.reset(state.trend, moves)
    return replace(
        state,
        entry=jnp.where(moves, inside, state.entry),
        policy=request.policy.reset(state.policy, moves),
        trend=trend,
    )


def decide(state: CanvasState, view: View, plan: DenoisePlan, request: DenoiseRequest, mask: int) -> CanvasState:
    """What the policy commits of the active blocks is written."""
    params, policy, end = request.params, request.policy, request.end
    block = active_block(state, plan.block_length, mask)
    active = jnp.any(block.masked, axis=1)
    logits = without(view.logits, params.stop_ids) if end is not None and end.forbid else view.logits
    policy_state, logits = policy.refine(state.policy, logits, block.masked)
    step_keys = lambda noise: _step_keys(params, block.column, state.nfe, noise)
    seen = candidates(logits, params, step_keys(Noise.DENOISE), mask, policy.tempered, plan.sampled)
    is_end = _is_end(seen.token, params)
    raw = jnp.where(is_end, 0.0, seen.raw) if end is not None and end.delay else seen.raw
    fixed = block.live & ~block.masked
    trend, confidence, uncertainty = state.trend, raw, jnp.zeros_like(raw)
    if request.ahead is not None:
        trend, confidence, uncertainty = _look_ahead(state, request.ahead, seen, raw, block, fixed, plan)
    budget = plan.blocks * request.steps
    observation = Observation(
        logits=seen.logits, token=seen.token, raw=raw, confidence=confidence, uncertainty=uncertainty,
        masked=block.masked, live=block.live, tokens=block.tokens, step=state.step,
        steps=jnp.broadcast_to(request.steps, state.step.shape), entry=state.entry,
        quota=linear_quota(state.entry, request.steps, state.step),
        progress=jnp.minimum((jnp.maximum(state.block, 0) * request.steps + state.step) / budget, 1.0),
        spent=jnp.minimum(state.nfe / budget, 1.0), is_end=is_end,
    )  # fmt: skip
    policy_state, token, commit = policy.step(policy_state, observation, step_keys(Noise.POLICY))
    state = replace(state, policy=policy_state, trend=trend)
    state = write(state, block, token, commit & block.masked & (token != mask), active)
    if policy.drafts:
        state = show(state, block, token, policy.show(observation, commit & block.masked))
    return finish(state, view, block, seen.token, token, commit & block.masked, raw, request, mask)


def write(
    state: CanvasState,
    block: ActiveBlock,
    token: Int32[Array, "B T"],
    commit: Bool[Array, "B T"],
    active: Bool[Array, "B"],
) -> CanvasState:
    """Committed tokens go into the canvas; active rows have taken a step and a pass."""
    S = state.tokens.shape[1]
    at = (jnp.arange(token.shape[0], dtype=jnp.int32)[:, None], jnp.where(commit, block.column, S))
    stamp = jnp.broadcast_to((state.nfe + state.empty)[:, None], token.shape)
    return replace(
        state,
        tokens=state.tokens.at[at].set(token, mode="drop"),
        commit_step=state.commit_step.at[at].set(stamp, mode="drop"),
        nfe=state.nfe + active,
        step=state.step + active,
    )


def show(state: CanvasState, block: ActiveBlock, token: Int32[Array, "B T"], shown: Bool[Array, "B T"]) -> CanvasState:
    """The masked slots of the active blocks that passes see a token in, until the next step."""
    assert state.shown is not None
    at = (
        jnp.arange(token.shape[0], dtype=jnp.int32)[:, None],
        jnp.where(block.live, block.column, state.tokens.shape[1]),
    )
    return replace(state, shown=state.shown.at[at].set(jnp.where(shown, token, -1), mode="drop"))


def finish(
    state: CanvasState, view: View, block: ActiveBlock, candidate: Array, token: Array, commit: Array, raw: Array,
    request: DenoiseRequest, mask: int,
) -> CanvasState:  # fmt: skip
    """Ends: canvases are cut, and rows with nothing left to write are done."""
    end = request.end
    if end is not None and end.truncate:
        p = view.end
        if p is None:
            p = _on_canvas(state, block.column, jnp.where(block.masked & _is_end(candidate, request.params), raw, -1.0))
        active = jnp.any(block.masked, axis=1, keepdims=True)  # a row that waits for others decides nothing
        p = jnp.where(active, p, -1.0)
        if end.in_order:
            before = jnp.cumsum(masked_columns(state, mask), axis=1) - masked_columns(state, mask)
            p = jnp.where(before == 0, p, -1.0)
        column = jnp.argmax(p, axis=1).astype(jnp.int32)
        written = commit & _is_end(token, request.params)
        length = end.cut(written, block.column, column, jnp.max(p, axis=1), state.length)
        state = replace(state, length=jnp.where(state.done, state.length, length))
    left = masked_columns(state, mask)
    if end is not None and end.stop:
        inside = jnp.arange(left.shape[1], dtype=jnp.int32) >= state.start[:, None]
        is_end = _is_end(state.tokens, request.params) & inside & (state.commit_step >= 0)
        length = stop_length(state.tokens, is_end, left, state.length)
        state = replace(state, length=jnp.where(state.done, state.length, length))
        left = masked_columns(state, mask)
    return replace(state, done=state.done | ~jnp.any(left, axis=1))


def _look_ahead(
    state: CanvasState,
    ahead: ConfidenceExtrapolation,
    seen: Any,
    raw: Array,
    block: ActiveBlock,
    fixed: Array,
    plan: DenoisePlan,
) -> tuple[Any, Array, Array]:
    before = jnp.maximum(state.block, 0) * plan.block_length if ahead.scope == "answer" else None
    lead = margin(seen.logits, seen.token) if ahead.signal == "margin" else None
    return ahead.observe(state.trend, raw, seen.token, block.masked, left_coverage(fixed, before), lead)


def full_step(model: Decoder, state: CanvasState, plan: DenoisePlan, request: DenoiseRequest) -> CanvasState:
    """Rows enter their blocks, the whole canvas is computed, the policy decides."""
    mask = _mask(model)
    state = enter(state, plan, request, mask)
    active = jnp.any(active_block(state, plan.block_length, mask).masked, axis=1)
    counts = request.count_empty & (state.step == 0)  # a pass that only refreshes has no empty one behind it
    view, cache = full_pass(model, state, plan, request)
    state = replace(state, cache=cache, cached_length=state.length)
    if plan.cache.unconditional_first:
        block = active_block(state, plan.block_length, mask)
        key = _step_keys(request.params, block.column, state.nfe, Noise.DENOISE)
        first = candidates(view.logits, request.params, key, mask, sampled=plan.sampled)
        at_first = jnp.arange(plan.block_length, dtype=jnp.int32) == 0
        commit = block.masked & at_first
        state = write(state, block, first.token, commit, active)
        state = finish(state, view, block, first.token, first.token, commit, first.raw, request, mask)
    else:
        state = decide(state, view, plan, request, mask)
    complete = ~jnp.any(active_block(state, plan.block_length, mask).masked, axis=1)
    state = replace(state, empty=state.empty + (active & complete & counts))
    return replace(state, age=jnp.int32(1), passes=state.passes + jnp.array([1, 0], jnp.int32))


def short_step(model: Decoder, state: CanvasState, plan: DenoisePlan, request: DenoiseRequest) -> CanvasState:
    """The active blocks over the cache; rows whose block is complete stay as they are."""
    view = short_pass(model, state, plan, request)
    state = decide(state, view, plan, request, _mask(model))
    return replace(state, age=state.age + 1, passes=state.passes + jnp.array([0, 1], jnp.int32))


def wants_short(state: CanvasState, plan: DenoisePlan, mask: int) -> Bool[Array, ""]:
    """Whether a short pass comes next: some block is incomplete, and the cache is not too old."""
    incomplete = jnp.any(active_block(state, plan.block_length, mask).masked)
    every = plan.cache.refresh_every
    return incomplete & (state.age > 0) & (True if every is None else state.age < every)


# --- compiled ---


@dataclass(frozen=True)
class Program:
    """The jitted functions of a diffusion model, compiled once per shapes, plan, kind of policy, look-ahead and end of text.

    start(prompts [B, S], start [B], request, plan=, dtype=, mesh=) -> state, placed over the mesh if there is one
    run(leaves, state, request, passes, plan=) -> state: until every row is done, `passes` at most; the state is donated
    """

    start: Any
    run: Any

    def compiled(self) -> int:
        """How many programs were compiled so far."""
        return self.start._cache_size() + self.run._cache_size()


@lru_cache(maxsize=16)
def program(config: ModelConfig) -> Program:
    """The program of models of this configuration."""
    merge: Callable[[Any], Decoder] = merger(config)
    mask = config.mask_token_id
    assert mask is not None

    @partial(jax.jit, static_argnames=("plan", "dtype", "mesh"))
    def start(prompts, start, request, plan, dtype, mesh=None):
        B, S = prompts.shape
        column = jnp.arange(S, dtype=jnp.int32)
        zero = jnp.zeros((B,), jnp.int32)
        policy: Policy = request.policy
        rows = 2 * B if plan.guided else B
        state = CanvasState(
            cache=None if plan.cache.kind == "none" else KVCache.empty(config, rows, S, dtype),
            tokens=jnp.where(column < start[:, None], prompts, mask),
            shown=jnp.full((B, S), -1, jnp.int32) if policy.drafts else None,
            start=start,
            length=start + plan.gen_length,
            cached_length=start + plan.gen_length,
            block=zero - 1,
            step=zero,
            entry=zero,
            nfe=zero,
            empty=zero,
            commit_step=jnp.full((B, S), -1, jnp.int32),
            age=jnp.int32(0),
            passes=jnp.zeros((2,), jnp.int32),
            done=jnp.zeros((B,), bool),
            policy=policy.init(B, plan.block_length, config.vocab_size),
            trend=None if request.ahead is None else request.ahead.init(B, plan.block_length),
        )
        return state if mesh is None else place_loop_state(state, mesh, B)

    @partial(jax.jit, donate_argnames="state", static_argnames="plan")
    def run(leaves, state, request, passes, plan):
        model = merge(leaves)
        count = lambda state: jnp.sum(state.passes)
        last = count(state) + passes
        unfinished = lambda state: (count(state) < last) & ~jnp.all(state.done)
        full = lambda state: full_step(model, state, plan, request)
        if plan.cache.kind == "none":
            return jax.lax.while_loop(unfinished, full, state)

        def to_the_edge(state):
            # The full pass is a loop of at most one turn, which a call that resumes in the middle of a block skips.
            state = jax.lax.while_loop(lambda s: unfinished(s) & (s.age == 0), full, state)
            short = lambda s: short_step(model, s, plan, request)
            state = jax.lax.while_loop(lambda s: unfinished(s) & wants_short(s, plan, mask), short, state)
            return replace(state, age=jnp.where(wants_short(state, plan, mask), state.age, 0))

        return jax.lax.while_loop(unfinished, to_the_edge, state)

    return Program(start, run)


def _mask(model: Decoder) -> int:
    mask = model.config.mask_token_id
    assert mask is not None
    return mask


def _is_end(token: Int32[Array, "B N"], params: SamplingParams) -> Bool[Array, "B N"]:
    return jnp.any(token[..., None] == params.stop_ids[:, None], axis=-1)


def _step_keys(params: SamplingParams, column: Int32[Array, "B T"], step: Int32[Array, "B"], noise: Noise) -> Array:
    """Keys of seed, prompt number, column and the row's pass."""
    base = keys(params.seed, params.index, column, noise)
    return jax.vmap(jax.vmap(jax.random.fold_in, (0, None)))(base, step)
