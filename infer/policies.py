"""Who gets committed: policies of the denoising loop (`dflax.infer.denoise`), one protocol for all.

A step of the loop looks at the T slots of every row's active block. What happens, in this order:

1. `logits` [B, T, V] of the slots, float32: after guidance, already shifted for models whose row i - 1 predicts token i.
2. `policy.refine(state, logits, masked)` may change them (`Credit`).
3. The sampler draws a candidate per slot (`dflax.infer.candidates`): the argmax, or at a temperature a draw. The mask token is left
   out of that choice only; `raw`, the candidate's probability, is a softmax over the whole vocabulary.
4. A look-ahead (`dflax.infer.extrapolation.ConfidenceExtrapolation`), if there is one, turns `raw` into the `confidence` that the
   policy decides by, and gives an `uncertainty`. Without one confidence is raw, uncertainty 0. It stands in front of any policy and
   no policy knows of it: a policy compares `confidence`, and breaks ties and picks its forced token by `raw`.
5. `policy.step(state, observation, key)` says which tokens stand in the slots and which slots are committed now. The loop commits
   only `masked` slots, whatever the policy says.

A policy is a frozen dataclass and a pytree: numbers and weights are leaves (other values compile nothing), choices that change the
program are static fields (`field(metadata={"static": True})`). Its state is a pytree of arrays with the rows first, so that a
row's state depends on that row alone; `reset` is called with the rows that enter a new block, before their first step there. Noise
comes from `key` [B, T]: one key per slot, made of seed, prompt number, position and step.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from dflax.errors import DflaxError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Observation:
    """What a policy sees of B active blocks of T slots. Slot t of row b is column start[b] + t of its canvas.

    (Fields are annotated Any: jit describes arguments by trees of other leaves than arrays.)
    """

    logits: Float[Any, "B T V"]
    """float32: what the candidates were drawn from; for a policy with `tempered` after temperature, top-k and top-p."""
    token: Int32[Any, "B T"]
    """The candidate of every slot, committed ones too (there: what the model would write now)."""
    raw: Float[Any, "B T"]
    """float32: softmax(logits) at the candidate, over the whole vocabulary; of committed slots too."""
    confidence: Float[Any, "B T"]
    """float32: what decides, `raw` or the look-ahead's."""
    uncertainty: Float[Any, "B T"]
    """float32: of the look-ahead; 0 without one."""
    masked: Bool[Any, "B T"]
    """Live and not committed: the slots that may be committed. A row that is done or waits has none."""
    live: Bool[Any, "B T"]
    """Slots before the end of the row's canvas."""
    tokens: Int32[Any, "B T"]
    """The canvas: committed tokens, the mask token elsewhere."""
    step: Int32[Any, "B"]
    """Steps that the row has taken in this block so far."""
    steps: Int32[Any, "B"]
    """Steps that the schedule has for a block."""
    entry: Int32[Any, "B"]
    """Masked slots when the row entered the block."""
    quota: Int32[Any, "B"]
    """What the linear schedule commits in this step: entry // steps, one more in the first entry % steps steps."""
    coverage: Float[Any, "B T"]
    """float32: share of the block's slots left of this one that are committed; 1 for the first slot."""
    progress: Float[Any, "B"]
    """float32 in [0, 1]: share of the whole run's scheduled steps that the row has behind it."""
    is_end: Bool[Any, "B T"]
    """The candidate is an end-of-text token."""


class Policy:
    """The protocol, and what a policy without a state of its own does."""

    tempered: bool = False
    """Whether `Observation.logits` and with them the confidence are those after temperature, top-k and top-p."""

    def init(self, B: int, T: int, V: int) -> Any:
        """The state before the first step: a pytree of arrays with leading axis B."""
        return ()

    def reset(self, state: Any, entered: Bool[Array, "B"]) -> Any:
        """The state with the rows of `entered` as new."""
        return reset_rows(state, entered)

    def refine(
        self, state: Any, logits: Float[Array, "B T V"], masked: Bool[Array, "B T"]
    ) -> tuple[Any, Float[Array, "B T V"]]:
        """Logits to draw candidates from."""
        return state, logits

    def step(
        self, state: Any, seen: Observation, key: Key[Array, "B T"]
    ) -> tuple[Any, Int32[Array, "B T"], Bool[Array, "B T"]]:
        """(state, token of every slot, slots that are committed with it)."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises DflaxError for a value that cannot be meant. Called on the host, where the numbers are numbers."""


def reset_rows(state: Any, entered: Bool[Array, "B"], fresh: float = 0) -> Any:
    """Every leaf [B, ...] with the rows of `entered` set to `fresh`."""
    return jax.tree.map(
        lambda leaf: jnp.where(entered.reshape(-1, *(1,) * (leaf.ndim - 1)), jnp.asarray(fresh, leaf.dtype), leaf),
        state,
    )


# --- pure rules ---


def ranks(
    score: Float[Array, "B T"], masked: Bool[Array, "B T"], raw: Float[Array, "B T"] | None = None
) -> Int32[Array, "B T"]:
    """Rank of every slot, 0 the highest score; masked slots first, ties by `raw`, then from left to right."""
    T = score.shape[1]
    slot = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
    last = jnp.zeros_like(score) if raw is None else -raw
    order = jax.lax.sort((jnp.where(masked, -score, jnp.inf), last, slot), dimension=1, num_keys=2, is_stable=True)[2]
    return (
        jnp.zeros_like(slot)
        .at[jnp.arange(score.shape[0], dtype=jnp.int32)[:, None], order]
        .set(jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), order.shape))
    )


def best(raw: Float[Array, "B T"], masked: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """The single most confident masked slot of every row (the leftmost of equals); none where nothing is masked."""
    score = jnp.where(masked, raw, -jnp.inf)
    return masked & (jnp.arange(raw.shape[1], dtype=jnp.int32) == jnp.argmax(score, axis=1)[:, None])


def at_least_one(
    commit: Bool[Array, "B T"], raw: Float[Array, "B T"], masked: Bool[Array, "B T"]
) -> Bool[Array, "B T"]:
    """`commit`, and in rows where it chooses nothing the most confident slot: every step gains a token."""
    commit &= masked
    return jnp.where(jnp.any(commit, axis=1, keepdims=True), commit, best(raw, masked))


def linear_quota(entry: Int32[Array, "B"], steps: Int32[Array, "B"], step: Int32[Array, "B"]) -> Int32[Array, "B"]:
    """Tokens to commit in this step (LLaDA): the remainder goes to the first steps; 1 past the end of the schedule."""
    steps = jnp.maximum(steps, 1)
    return jnp.where(step < steps, entry // steps + (step < entry % steps), 1)


def _is_share(name: str, value: Any, *, top: float = 1.0) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= top:
        raise DflaxError(f"{name} is {value!r}; it must be a number from 0 to {top:g}")


# --- policies ---


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Threshold(Policy):
    """Everything that is at least this confident, and at least the most confident one (Fast-dLLM, arXiv 2505.22618).

    A threshold above 1 commits one token per step: plain decoding.
    """

    threshold: Any = 0.9
    """float: confidence at which a token is committed."""

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        commit = seen.masked & (seen.confidence >= self.threshold)
        return state, seen.token, at_least_one(commit, seen.raw, seen.masked)

    def check(self) -> None:
        _is_share("threshold", self.threshold, top=float("inf"))
