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
6. A policy that `drafts` says by `policy.show` which candidates the next pass sees in place of masks, without their being final.

A policy is a frozen dataclass and a pytree: numbers and weights are leaves (other values compile nothing), choices that change the
program are static fields (`field(metadata={"static": True})`). Its state is a pytree of arrays with the rows first, so that a
row's state depends on that row alone; `reset` is called with the rows that enter a new block, before their first step there. Noise
comes from `key` [B, T]: one key per slot, made of seed, prompt number, position and step.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from dflax.errors import DflaxError
from dflax.infer.candidates import margin

T = TypeVar("T")


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
    progress: Float[Any, "B"]
    """float32 in [0, 1]: share of the whole run's scheduled steps that lie behind this one, those of complete blocks counted whole."""
    spent: Float[Any, "B"]
    """float32 in [0, 1]: passes that the row has taken over the whole run's scheduled steps."""
    is_end: Bool[Any, "B T"]
    """The candidate is an end-of-text token."""


class Policy(ABC):
    """The protocol, and what a policy without a state of its own does."""

    tempered: bool = False
    """Whether `Observation.logits` and with them the confidence are those after temperature, top-k and top-p."""
    drafts: bool = False
    """Whether slots that are not committed may show their candidate to the next pass (`show`)."""
    reads_confidence: bool = True
    """Whether the choice goes by `Observation.confidence`, so that a look-ahead or a delay of end tokens can act on it."""

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

    @abstractmethod
    def step(
        self, state: Any, seen: Observation, key: Key[Array, "B T"]
    ) -> tuple[Any, Int32[Array, "B T"], Bool[Array, "B T"]]:
        """(state, token of every slot, slots that are committed with it)."""

    def show(self, seen: Observation, commit: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
        """Of the masked slots that this step does not commit, those whose candidate the next pass sees. Asked where it `drafts`."""
        return jnp.zeros_like(commit)

    def check(self) -> None:
        """Raises DflaxError for a value that cannot be meant. Called on the host, where the numbers are numbers."""
        return  # a policy without numbers has nothing to refuse


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
    # Whether a slot is masked comes first, so that not even a NaN ranks behind a slot that is written: every step gains a token.
    order = jax.lax.sort(((~masked).astype(jnp.int32), -score, last, slot), dimension=1, num_keys=3, is_stable=True)[3]
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


def linear_quota(entry: Int32[Array, "B"], steps: Int32[Array, "..."], step: Int32[Array, "B"]) -> Int32[Array, "B"]:
    """Tokens to commit in this step (LLaDA): the remainder goes to the first steps; 1 past the end of the schedule."""
    steps = jnp.maximum(steps, 1)
    return jnp.where(step < steps, entry // steps + (step < entry % steps), 1)


def dream_quota(
    masks: Int32[Array, "B"], steps: Int32[Array, "B"], step: Int32[Array, "B"], eps: float | Array
) -> Int32[Array, "B"]:
    """Tokens that Dream's schedule writes in this step: floor(masks (1 - s / t)) on a linear grid t from 1 to eps; last all."""
    left = jnp.floor(masks * reveal(steps, step, eps)).astype(jnp.int32)
    return jnp.where(step >= steps - 1, masks, left)


def reveal(steps: Int32[Array, "B"], step: Int32[Array, "B"], eps: float | Array) -> Float[Array, "B"]:
    """Chance of a masked slot to be written in this step: 1 - s / t between times t and s of a linear grid from 1 to eps (Dream)."""
    at = lambda i: 1.0 - (1.0 - eps) * i.astype(jnp.float32) / jnp.maximum(steps, 1)
    return 1.0 - at(step + 1) / at(step)


def factor_count(
    confidence: Float[Array, "B T"], masked: Bool[Array, "B T"], factor: float | Array
) -> Int32[Array, "B"]:
    """Largest n with (n + 1) (1 - c_n) < factor, c_n the n-th highest confidence (Fast-dLLM, theorem 1); 0 if none."""
    c, n = _sorted(confidence, masked)
    return jnp.sum((n + 1) * (1 - c) < factor, axis=1, dtype=jnp.int32)


def frechet_count(
    confidence: Float[Array, "B T"], masked: Bool[Array, "B T"], margin: float | Array
) -> Int32[Array, "B"]:
    """Largest n with max(0, c_1 + ... + c_n - (n - 1)) - (1 - c_n) > margin (Fast-dLLM++, arXiv 2606.02955); 0 if none."""
    c, n = _sorted(confidence, masked)
    lower = jnp.maximum(0.0, jnp.cumsum(c, axis=1) - (n - 1))
    return jnp.sum(lower - (1 - c) > margin, axis=1, dtype=jnp.int32)


def _sorted(confidence: Array, masked: Array) -> tuple[Array, Array]:
    """Confidences of masked slots, highest first (far below any rule's cut behind them), and their ranks from 1."""
    c = -jnp.sort(-jnp.where(masked, confidence, -1e4), axis=1)
    return c, jnp.arange(1, c.shape[1] + 1, dtype=jnp.int32)


# --- policies ---

DREAM_RULES = ("entropy", "maskgit_plus", "topk_margin", "origin")
Rule = Literal["low_confidence", "random", "entropy", "maskgit_plus", "topk_margin", "origin"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule(Policy):
    """A fixed number of tokens per step: the official samplers.

    LLaDA: "low_confidence" writes the most confident, "random" any; the number is linear in the step. Dream: "entropy" (lowest),
    "maskgit_plus" (highest confidence), "topk_margin" (p1 - p2), by its own grid of times, and "origin" (every masked slot by
    chance). In as many steps as tokens "low_confidence" is plain decoding, one token per step.
    """

    rule: Rule = field(default="low_confidence", metadata={"static": True})
    alg_temp: Any = 0.0
    """float: of Dream's rules: above 0 the slots are drawn by softmax(score / alg_temp), without replacement."""
    eps: Any = 1e-3
    """float: where Dream's grid of times ends."""

    @property
    def tempered(self) -> bool:
        """As published, Dream's rules look at the distribution after temperature, top-k and top-p."""
        return self.rule in DREAM_RULES

    @property
    def reads_confidence(self) -> bool:
        """The other rules score by whole distributions or by chance."""
        return self.rule in ("low_confidence", "maskgit_plus")

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        if self.rule not in DREAM_RULES:
            score = seen.confidence if self.rule == "low_confidence" else _uniform(key)
            return state, seen.token, seen.masked & (ranks(score, seen.masked, seen.raw) < seen.quota[:, None])
        if self.rule == "origin":
            chance = reveal(seen.steps, seen.step, self.eps)
            last = seen.step >= seen.steps - 1
            return state, seen.token, seen.masked & (last[:, None] | (_uniform(key) < chance[:, None]))
        left = jnp.sum(seen.masked, axis=1, dtype=jnp.int32)
        score = self._score(seen)
        drawn = score / jnp.where(self.alg_temp > 0, self.alg_temp, 1.0) - jnp.log(-jnp.log(_uniform(key)))
        rank = ranks(jnp.where(self.alg_temp > 0, drawn, score), seen.masked, seen.raw)
        return state, seen.token, seen.masked & (rank < dream_quota(left, seen.steps, seen.step, self.eps)[:, None])

    def _score(self, seen: Observation) -> Float[Array, "B T"]:
        if self.rule == "maskgit_plus":
            return seen.confidence
        p = jax.nn.softmax(seen.logits, axis=-1)
        if self.rule == "topk_margin":
            top = jax.lax.top_k(p, 2)[0]
            return top[..., 0] - top[..., 1]
        return jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=-1)

    def check(self) -> None:
        if self.rule not in get_args(Rule):
            raise DflaxError(f"rule is {self.rule!r}; it must be one of {', '.join(get_args(Rule))}")
        check_number("alg_temp", self.alg_temp)
        check_number("eps", self.eps, top=1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Threshold(Policy):
    """Everything that is at least this confident, and at least the most confident one (Fast-dLLM, arXiv 2505.22618).

    A threshold above 1 commits one token per step: plain decoding.
    """

    threshold: Any = 0.9
    """float: confidence at which a token is committed."""
    budgeted: bool = field(default=False, metadata={"static": True})
    """Fast-dLLM's variant for Dream without cache: a step may commit entry // steps tokens and what earlier steps left of theirs."""

    def init(self, B: int, T: int, V: int) -> Any:
        return jnp.zeros((B,), jnp.int32) if self.budgeted else ()

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        commit = seen.masked & (seen.confidence >= self.threshold)
        if self.budgeted:
            # The published loop adds steps at its end, which carry what is left and nothing new.
            budget = state + jnp.where(seen.step < seen.steps, seen.entry // jnp.maximum(seen.steps, 1), 0)
            commit &= ranks(seen.confidence, seen.masked, seen.raw) < budget[:, None]
            commit = at_least_one(commit, seen.raw, seen.masked)
            state = jnp.maximum(budget - jnp.sum(commit, axis=1, dtype=jnp.int32), 0)
            return state, seen.token, commit
        return state, seen.token, at_least_one(commit, seen.raw, seen.masked)

    def check(self) -> None:
        check_number("threshold", self.threshold)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Factor(Policy):
    """As many of the most confident as (n + 1)(1 - c_n) < factor allows, at least one (Fast-dLLM, arXiv 2505.22618)."""

    factor: Any = 1.0
    one_more: bool = field(default=False, metadata={"static": True})
    """The published code takes all masked slots where the rule takes all but one; the paper's rule does not."""

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        n = factor_count(seen.confidence, seen.masked, self.factor)
        if self.one_more:
            left = jnp.sum(seen.masked, axis=1, dtype=jnp.int32)
            n = jnp.where(jnp.maximum(n, 1) == left - 1, left, n)
        return state, seen.token, _best_n(seen, n)

    def check(self) -> None:
        check_number("factor", self.factor)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frechet(Policy):
    """As many of the most confident as their joint probability surely allows, by Fréchet's bounds (arXiv 2606.02955)."""

    margin: Any = 0.25

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        return state, seen.token, _best_n(seen, frechet_count(seen.confidence, seen.masked, self.margin))

    def check(self) -> None:
        check_number("margin", self.margin, top=1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Credit(Policy):
    """A threshold on logits that remember: each step's best token of a masked slot earns credit, which fades (CreditDecoding).

    credit = decay credit + p_top1 ^ power at that token; logits + weight ln(1 + credit). The state is [B, T, V] float32.
    """

    threshold: Any = 0.9
    decay: Any = 0.8
    power: Any = 0.2
    weight: Any = 0.7

    def init(self, B: int, T: int, V: int) -> Any:
        return jnp.zeros((B, T, V), jnp.float32)

    def refine(
        self, state: Any, logits: Float[Array, "B T V"], masked: Bool[Array, "B T"]
    ) -> tuple[Any, Float[Array, "B T V"]]:
        top = jnp.argmax(logits, axis=-1)
        p = jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
        hit = (jnp.arange(logits.shape[-1], dtype=top.dtype) == top[..., None]) & masked[..., None]
        state = state * self.decay + jnp.where(hit, (p**self.power)[..., None], 0.0)
        return state, logits + self.weight * jnp.log1p(state)

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        commit = seen.masked & (seen.confidence >= self.threshold)
        return state, seen.token, at_least_one(commit, seen.raw, seen.masked)

    def check(self) -> None:
        for name in ("threshold", "power", "weight"):
            check_number(name, getattr(self, name))
        check_number("decay", self.decay, top=1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prophet(Policy):
    """The schedule, until the model is sure of all: then the whole block at once (Prophet).

    Sure is a mean gap between the logits of the masked slots' candidates and of the next best, above a bound that falls as the run goes
    on: `early` in its first third, `middle` in its second, `late` after. The published code watches the answer's place in the text, which
    the caller must know; here the block is watched, so block_length = gen_length watches everything.
    """

    early: Any = 7.5
    middle: Any = 5.0
    late: Any = 2.5

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        left = jnp.sum(seen.masked, axis=1)
        gap = jnp.sum(jnp.where(seen.masked, margin(seen.logits, seen.token), 0.0), axis=1) / jnp.maximum(left, 1)
        bound = jnp.where(seen.progress < 0.33, self.early, jnp.where(seen.progress < 0.67, self.middle, self.late))
        n = jnp.where(gap >= bound, left, seen.quota).astype(jnp.int32)
        return state, seen.token, _best_n(seen, n)

    def check(self) -> None:
        for name in ("early", "middle", "late"):
            check_number(name, getattr(self, name))


def _best_n(seen: Observation, n: Int32[Array, "B"]) -> Bool[Array, "B T"]:
    """The n most confident masked slots of a row; where n is 0 the one of highest raw confidence."""
    commit = seen.masked & (ranks(seen.confidence, seen.masked, seen.raw) < n[:, None])
    return at_least_one(commit, seen.raw, seen.masked)


def _uniform(key: Key[Array, "B T"]) -> Float[Array, "B T"]:
    """In (0, 1), one per key."""
    draw = lambda k: jax.random.uniform(k, (), jnp.float32, minval=1e-12)
    return jax.vmap(draw)(key.reshape(-1)).reshape(key.shape)


def with_floats(value: T) -> T:
    """A dataclass whose whole numbers are floats where floats are usual: an int has another dtype and would compile another program."""
    record: Any = value
    own = [f.name for f in fields(record) if isinstance(f.default, float) and isinstance(getattr(value, f.name), int)]
    return replace(record, **{name: float(getattr(value, name)) for name in own})


def check_number(name: str, value: Any, top: float = float("inf")) -> None:
    """Raises DflaxError unless `value` is a number from 0 to `top`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= top:
        limit = "at least 0" if top == float("inf") else f"from 0 to {top:g}"
        raise DflaxError(f"{name} of the policy is {value!r}; it must be a number, {limit}")
