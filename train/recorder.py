"""Recording what the steps of a denoising run show of every slot, inside the loop, under rules that know how the answer ends.

A policy is wrapped, so everything runs in the one loop of `dflax.infer.denoise`, a batch of prompts at a time. First the model's own
plain decoding, which is a recording too and gives the reference; then a rule that follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Key

from dflax.infer.candidates import margin
from dflax.infer.diffuse import prepare
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.infer.policies import Observation, Policy, Schedule
from dflax.model import Model
from dflax.models.controller import normalised_entropy
from dflax.train.traces import Traces

# --- rules that know the end ---


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Greedy(Policy):
    """The extremely greedy policy (arXiv 2509.25188): every step commits all slots whose candidate is the reference's token.

    Where the candidates have not changed since the step before, or none agrees, waiting longer shows nothing new: the block is filled
    with the reference.
    """

    reference: Int32[Any, "B N T"]
    """int32 [B, blocks, T]: the tokens to end with."""

    def init(self, B: int, T: int, V: int) -> Any:
        return jnp.full((B,), -1, jnp.int32), jnp.full((B, T), -1, jnp.int32)

    def reset(self, state: Any, entered: Bool[Array, "B"]) -> Any:
        block, last = state
        return block + entered, jnp.where(entered[:, None], -1, last)

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        block, last = state
        want = _of_block(self.reference, block)
        agrees = seen.masked & (seen.token == want)
        stuck = jnp.all((seen.token == last) | ~seen.live, axis=1) | ~jnp.any(agrees, axis=1)
        commit = jnp.where(stuck[:, None], seen.masked, agrees)
        return (block, seen.token), jnp.where(stuck[:, None], want, seen.token), commit


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forced(Policy):
    """A policy's choice of slots, with the reference's tokens written into them: its own pace on the right path."""

    policy: Any
    reference: Int32[Any, "B N T"]
    """int32 [B, blocks, T]."""

    def init(self, B: int, T: int, V: int) -> Any:
        return jnp.full((B,), -1, jnp.int32), self.policy.init(B, T, V)

    def reset(self, state: Any, entered: Bool[Array, "B"]) -> Any:
        return state[0] + entered, self.policy.reset(state[1], entered)

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        inner, _, commit = self.policy.step(state[1], seen, key)
        return (state[0], inner), _of_block(self.reference, state[0]), commit


def _of_block(reference: Int32[Array, "B N T"], block: Int32[Array, "B"]) -> Int32[Array, "B T"]:
    return jnp.take_along_axis(reference, jnp.maximum(block, 0)[:, None, None], axis=1)[:, 0]


# --- the recorder ---


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Record:
    """Arrays [B, blocks, steps, T]: one entry per slot of the block that was active in that step."""

    confidence: Float[Any, "*places T"]
    """float32: raw probability of the top-1 token."""
    entropy: Float[Any, "*places T"]
    """float32: over the vocabulary, divided by ln V."""
    margin: Float[Any, "*places T"]
    """float32: top-1 minus top-2 logit."""
    token: Int32[Any, "*places T"]
    """int32: the top-1 token."""
    masked: Bool[Any, "*places T"]
    """Whether the slot could be committed; all false behind the last step of a block."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recording:
    """The recorder's state."""

    inner: Any
    block: Int32[Any, "B"]
    """int32 [B]: which block the row is in."""
    record: Record


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recorder(Policy):
    """Does what `rule` does, and keeps what it saw. A block takes T steps at most, because every step commits a slot."""

    rule: Any
    blocks: int = field(metadata={"static": True})

    def init(self, B: int, T: int, V: int) -> Recording:
        zero = jnp.zeros((B, self.blocks, T, T), jnp.float32)
        record = Record(zero, zero, zero, zero.astype(jnp.int32), zero.astype(bool))
        return Recording(self.rule.init(B, T, V), jnp.full((B,), -1, jnp.int32), record)

    def reset(self, state: Recording, entered: Bool[Array, "B"]) -> Recording:
        return Recording(self.rule.reset(state.inner, entered), state.block + entered, state.record)

    def step(self, state: Recording, seen: Observation, key: Key[Array, "B T"]) -> tuple[Recording, Array, Array]:
        inner, token, commit = self.rule.step(state.inner, seen, key)
        lead = margin(seen.logits, seen.token)
        shown = Record(seen.raw, normalised_entropy(seen.logits), lead, seen.token, seen.masked)
        row = jnp.arange(seen.raw.shape[0], dtype=jnp.int32)
        block = jnp.where(jnp.any(seen.masked, axis=1), state.block, self.blocks)  # idle rows write nothing
        write = lambda kept, now: kept.at[row, block, seen.step].set(now, mode="drop")
        return Recording(inner, state.block, jax.tree.map(write, state.record, shown)), token, commit


# --- runs ---


def record(
    model: Model,
    prompts: Sequence[Sequence[int]],
    gen_length: int,
    block_length: int,
    rule: Policy,
    ahead: ConfidenceExtrapolation | None = None,
) -> tuple[Int32[np.ndarray, "P N T"], Record]:
    """Denoises a batch greedily, without cache, under `rule`; what was written, block by block, and what was seen (on the host).

    ahead: a look-ahead in front of the rule. The confidences recorded are the raw ones all the same.
    """
    blocks, B = gen_length // block_length, len(prompts)
    policy = Recorder(rule, blocks)
    session = prepare(model, prompts, gen_length, block_length, policy=policy, extrapolation=ahead)
    written = session.advance()
    answers = [row[n : n + gen_length] for row, n in zip(written.tokens, session.lengths, strict=True)]
    return np.stack(answers).reshape(B, blocks, block_length), jax.device_get(session.state.policy.record)


def record_batch(
    model: Model, prompts: Sequence[Sequence[int]], size: int, gen_length: int, block_length: int
) -> dict[str, Traces]:
    """Recordings of plain decoding ("standard") and of the extremely greedy policy ("greedy"), of up to `size` prompts.

    A smaller batch is filled up with its last prompt, so that all batches run the same program.
    """
    full = [*prompts, *[prompts[-1]] * (size - len(prompts))]
    final, seen = record(model, full, gen_length, block_length, Schedule())
    greedy = record(model, full, gen_length, block_length, Greedy(jnp.asarray(final)))[1]
    records = {"standard": seen, "greedy": greedy}
    return {kind: of_record(seen, final, len(prompts)) for kind, seen in records.items()}


def of_record(seen: Record, final: Int32[np.ndarray, "P N T"], prompts: int) -> Traces:
    """A recording and its end as traces of the first `prompts` rows."""
    return Traces(**{name: array[:prompts] for name, array in vars(seen).items()}, final=final[:prompts])
