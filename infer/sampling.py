"""How one token is drawn from logits: temperature, top-k, top-p and keyed Gumbel noise.

Everything is per row and traced, so a batch may mix greedy and sampled rows and new values never recompile. The noise
of a token depends on (seed, prompt index, absolute position) and on nothing else: neither on the batch a row sits in
nor on how many positions one call decides. Speculation with argmax drafts therefore gives the very tokens of plain
sampling.
"""

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from dflax.errors import DflaxError
from dflax.sharding import each_device, laid

STOP_COLUMNS = 8
"""`SamplingParams.stop_ids` is padded to a multiple of this, so that another list of stop tokens seldom recompiles."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """What each row of a batch asks of the sampler. A pytree of arrays: values are traced, only B and n are static."""

    temperature: Float[Any, "B"]
    """float32 [B]: 0 takes the argmax; above 0 the logits are divided by it."""
    top_k: Int32[Any, "B"]
    """int32 [B]: only the k most probable tokens may be drawn; 0 is off."""
    top_p: Float[Any, "B"]
    """float32 [B]: a token may be drawn while the mass of those before it is below top_p; 1 is off."""
    stop_ids: Int32[Any, "B n"]
    """int32 [B, n]: the row ends after any of these tokens; -1 is padding."""
    seed: UInt32[Any, "B"]
    """uint32 [B]: first part of the key of the row's noise."""
    index: Int32[Any, "B"]
    """int32 [B]: which prompt of the call the row is, second part of the key."""

    @classmethod
    def build(
        cls,
        batch: int,
        vocab_size: int,
        *,
        temperature: object = 0.0,
        top_k: object = None,
        top_p: object = None,
        stop_ids: Sequence = (),
        seed: object = 0,
        index: Sequence[int] | None = None,
    ) -> "SamplingParams":
        """Checks values as a user gave them (hence no narrower annotations) and lays them out as device arrays.

        Args:
          batch: rows B.
          vocab_size: stop ids must lie below it.
          temperature: a number, finite and at least 0; like the next two and seed for all rows, or a sequence of B.
          top_k: a whole number of at least 1, or None for off.
          top_p: a number above 0 and at most 1, or None for off.
          stop_ids: token ids for all rows, or a sequence of B such sequences.
          seed: a whole number of 32 bits.
          index: prompt index of each row; 0 .. B-1 if None.

        Raises:
          DflaxError: a value out of range, or a sequence that does not have B entries.
        """
        stops = _stop_lists(stop_ids, batch, vocab_size)
        columns = STOP_COLUMNS * max(1, -(-max(map(len, stops), default=0) // STOP_COLUMNS))
        padded = np.full((batch, columns), -1, np.int32)
        for row, ids in zip(padded, stops, strict=True):
            row[: len(ids)] = ids
        rows = range(batch) if index is None else index
        host = {
            "temperature": np.array([_temperature(v) for v in _per_row("temperature", temperature, batch)], np.float32),
            "top_k": np.array([_top_k(v) for v in _per_row("top_k", top_k, batch)], np.int32),
            "top_p": np.array([_top_p(v) for v in _per_row("top_p", top_p, batch)], np.float32),
            "stop_ids": padded,
            "seed": np.array([_whole("seed", v, 0, 2**32 - 1) for v in _per_row("seed", seed, batch)], np.uint32),
            "index": np.array([_whole("index", v, 0, 2**31 - 1) for v in _per_row("index", rows, batch)], np.int32),
        }
        return cls(**jax.device_put(host))


def filtered_logprobs(
    logits: Float[Array, "*rows V"],
    temperature: Float[Array, "*rows"],
    top_k: Int[Array, "*rows"],
    top_p: Float[Array, "*rows"],
) -> Float[Array, "*rows V"]:
    """Log-probabilities a token is drawn with: temperature, then top-k, then top-p, renormalised; -inf where dropped.

    A token stays in top-p while the mass before it (most probable first, after top-k) is below top_p, so the one that
    crosses the limit stays and at least one always does. Equal logits rank by token id. Temperature 0 is the limit of
    small ones: all mass on the argmax. The sort is skipped at run time (`lax.cond`) when no row uses top-k or top-p
    above temperature 0.

    Args:
      logits: float32 [..., V]; -inf marks tokens that may never be drawn, and at least one logit of a row is finite.
      temperature: float32 [...].
      top_k: int32 [...], 0 = off.
      top_p: float32 [...], 1 = off.

    Returns:
      float32 [..., V].
    """
    vocab = logits.shape[-1]
    greedy = temperature <= 0
    limited = ~greedy & ((top_k > 0) | (top_p < 1))
    # The maximum goes first: a small temperature then overflows to -inf, never to inf - inf.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.where(greedy, 1.0, temperature)[..., None]

    def drop(scaled: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        # Rows are cut over all devices and sorted whole: along a cut vocabulary, cumulative sums would gather every row everywhere.
        cut = laid(scaled, ("batch", *(None,) * (limited.ndim - 1), "vocab"))  # else the head would be gathered for it
        rows = [x.reshape(-1, *x.shape[limited.ndim :]) for x in (cut, top_k, top_p)]
        one = ("row",)
        find = lambda *rows: list(_last_kept(*rows))
        value, token = each_device(find, rows, (("row", None), one, one), [one, one], {"row": len(rows[0])})
        last = value.reshape(limited.shape), token.reshape(limited.shape)
        return jnp.where(_ranks_before_or_at(scaled, last) | ~limited[..., None], scaled, -jnp.inf)

    kept = jax.lax.cond(jnp.any(limited), drop, lambda scaled: scaled, scaled)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocab, dtype=bool)
    point = jnp.where(best, 0.0, -jnp.inf)
    return jnp.where(greedy[..., None], point, jax.nn.log_softmax(kept, axis=-1))


class Noise(enum.IntEnum):
    """What a draw is for. Draws for different ends at one position must be independent: each has its own root key."""

    TARGET = 0
    """The target's own token (or the residual's, in rejection sampling)."""
    DRAFT = 1
    """A token the drafter samples."""
    ACCEPT = 2
    """The uniform that decides whether a sampled draft is accepted."""
    DENOISE = 3
    """A candidate of a diffusion model; the step is folded in too, as one position is drawn again and again."""
    POLICY = 4
    """What a policy of denoising draws."""


def gumbel(
    seed: UInt32[Array, "B"],
    index: Int[Array, "B"],
    position: Int[Array, "B T"],
    vocab: int,
    noise: Noise = Noise.TARGET,
) -> Float[Array, "B T V"]:
    """Gumbel noise keyed by fold_in(fold_in(fold_in(key(noise), seed), index), position).

    The uniform behind a value keeps all 32 random bits where the value is large. `jax.random.gumbel` keeps 23, which leaves
    ties among the largest values of a big vocabulary, and argmax would favour the smaller token ids.

    Args:
      seed: uint32 [B].
      index: int32 [B].
      position: int32 [B, T], the absolute position of the token to be drawn.
      vocab: V.
      noise: what the draw is for.

    Returns:
      float32 [B, T, V].
    """

    return gumbel_of(keys(seed, index, position, noise), vocab)


def gumbel_of(keys: Array, vocab: int) -> Float[Array, "B T V"]:
    """Gumbel noise of keys [B, T], float32."""

    def draw(key: Array) -> Float[Array, "V"]:
        bits = jax.random.bits(key, (vocab,), jnp.uint32)
        near_zero = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -jnp.log(-jnp.log1p(-near_zero))

    # One flat vmap: two nested ones take three times as long to compile.
    return jax.vmap(draw)(keys.reshape(-1)).reshape(*keys.shape, vocab)


def uniform(
    seed: UInt32[Array, "B"],
    index: Int[Array, "B"],
    position: Int[Array, "B T"],
    noise: Noise = Noise.ACCEPT,
) -> Float[Array, "B T"]:
    """Uniforms in [0, 1), keyed like `gumbel`: one for each draft's position in rejection sampling. float32 [B, T]."""
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(keys(seed, index, position, noise))


def choose(
    logits: Float[Array, "B T V"],
    params: SamplingParams,
    position: Int[Array, "B T"],
    noise: Noise = Noise.TARGET,
) -> Int32[Array, "B T"]:
    """Draws one token per slot: the argmax where temperature is 0, else a Gumbel-max sample of `filtered_logprobs`.

    A call whose rows are all greedy neither sorts nor draws noise at run time (`lax.cond`).

    Args:
      logits: float32 [B, T, V].
      params: of B rows.
      position: int32 [B, T], the absolute position the token of each slot goes to.
      noise: what the draw is for.

    Returns:
      int32 [B, T].
    """
    vocab = logits.shape[-1]
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sample() -> Int32[Array, "B T"]:
        per_slot = (jnp.broadcast_to(v[:, None], best.shape) for v in (params.temperature, params.top_k, params.top_p))
        perturbed = filtered_logprobs(logits, *per_slot) + gumbel(params.seed, params.index, position, vocab, noise)
        drawn = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)
        return jnp.where(params.temperature[:, None] > 0, drawn, best)

    return jax.lax.cond(jnp.any(params.temperature > 0), sample, lambda: best)


def _last_kept(
    scaled: Float[Array, "*rows V"], top_k: Int[Array, "*rows"], top_p: Float[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Int32[Array, "*rows"]]:
    """Value and id of the last token kept by top-k and then top-p; each keeps a prefix of the sorted row."""
    vocab = scaled.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
    negated, order = jax.lax.sort((-scaled, ids), num_keys=1, is_stable=True)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    probs = jax.nn.softmax(jnp.where(ids < k[..., None], -negated, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    in_mass = (before < top_p[..., None]) | (top_p >= 1)[..., None]
    last = jnp.minimum(k, jnp.sum(in_mass, axis=-1)) - 1
    value, token = (jnp.take_along_axis(a, last[..., None], axis=-1)[..., 0] for a in (-negated, order))
    return value, token


def _ranks_before_or_at(
    scaled: Float[Array, "*rows V"], last: tuple[Float[Array, "*rows"], Int32[Array, "*rows"]]
) -> Bool[Array, "*rows V"]:
    """Which tokens rank no later than `last`: a comparison in place of scattering the sorted row back."""
    value, token = (a[..., None] for a in last)
    ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
    return (scaled > value) | ((scaled == value) & (ids <= token))


def keys(seed: UInt32[Array, "B"], index: Int[Array, "B"], position: Int[Array, "B T"], noise: Noise) -> Array:
    """Keys [B, T] of what is drawn for an end at a position.

    The generator is named so that a global JAX setting cannot change anybody's samples.
    """
    root = jax.random.key(int(noise), impl="threefry2x32")

    def key(seed: Array, index: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(root, seed), index), position)

    return jax.vmap(jax.vmap(key, in_axes=(None, None, 0)))(seed, index, position)


def _per_row(name: str, value: object, batch: int) -> list:
    """`value` once per row: repeated if it is one value, checked for its length if it is a sequence."""
    if not isinstance(value, (Sequence, range, np.ndarray)):
        return [value] * batch
    if len(value) != batch:
        raise DflaxError(f"{name} has {len(value)} values for {batch} prompts: give one value, or one per prompt")
    return list(value)


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # pyright: ignore[reportArgumentType] - the check is this very call
    except (TypeError, ValueError, OverflowError):
        raise DflaxError(f"{name} is {value!r}: it must be a number") from None


def _whole(name: str, value: object, low: int, high: int) -> int:
    try:
        whole = operator.index(value)  # pyright: ignore[reportArgumentType] - the check is this very call
    except TypeError:
        raise DflaxError(f"{name} is {value!r}: it must be a whole number") from None
    if not low <= whole <= high:
        raise DflaxError(f"{name} is {whole}: it must be from {low} to {high}")
    return whole


def _temperature(value: object) -> float:
    number = _number("temperature", value)
    if not 0 <= number <= float(np.finfo(np.float32).max):
        raise DflaxError(f"temperature is {number}: it must be finite and at least 0 (0 takes the most probable token)")
    # Below the normal float32 range some devices flush to 0, which means the argmax: make it so on every device.
    return number if number >= float(np.finfo(np.float32).tiny) else 0.0


def _top_k(value: object) -> int:
    return 0 if value is None else _whole("top_k", value, 1, 2**31 - 1)


def _top_p(value: object) -> float:
    number = 1.0 if value is None else _number("top_p", value)
    if not 0 < number <= 1:
        raise DflaxError(f"top_p is {number}: it must be above 0 and at most 1 (1 turns it off)")
    return max(number, float(np.finfo(np.float32).tiny))


def _stop_lists(stop_ids: Sequence, batch: int, vocab_size: int) -> list[list[int]]:
    """One list of checked stop ids per row."""
    nested = len(stop_ids) > 0 and all(isinstance(ids, (Sequence, np.ndarray)) for ids in stop_ids)
    lists = _per_row("stop_ids", stop_ids, batch) if nested else [stop_ids] * batch
    return [[_stop_id(token, vocab_size) for token in ids] for ids in lists]


def _stop_id(token: object, vocab_size: int) -> int:
    whole = _whole("stop id", token, -(2**63), 2**63)
    if not 0 <= whole < vocab_size:
        raise DflaxError(
            f"stop id {whole} is not in the vocabulary of {vocab_size} tokens: give an id below {vocab_size}"
        )
    return whole
