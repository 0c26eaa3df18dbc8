"""Policies with a network inside: TSPD and Learn2PD. Both also commit the most confident masked slot in every step.

Their weights are leaves, so that one compiled loop serves every controller of a shape. What the papers leave open:

* TSPD's paper remasks a share of the positions it did not fix (A.2), which read literally leaves tokens visible that are not final.
  Here, as in Learn2PD, a slot is final or it is the mask token; `remask="representative"` reads literally.
* The paper has no rule for a step in which the gate fixes nothing; the forced slot is Learn2PD's.
* The position is the offset in the block (equation 3), not in the answer (A.3): a controller serves answers of any length.

Ours beside the paper's: a controller with `neighbours` reads what is around a slot too.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from dflax import controllers
from dflax.config import ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.infer.extrapolation import left_coverage
from dflax.infer.policies import Observation, Policy, best, check_number, ranks
from dflax.models import params
from dflax.models.controller import (
    AcceptanceFilter,
    Controller,
    Trail,
    build,
    memory_shape,
    neighbourhood,
    normalised_entropy,
)

Remask = Literal["unfixed", "representative"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """What TSPD remembers of the block's slots."""

    trail: Trail
    memory: Float[Any, "B T L M"]
    """float32 [B, T, layers, M]: the controller's recurrent state of every slot."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TSPD(Policy):
    """Temporal-spatial parallel decoding (arXiv 2605.30753): a recurrent controller fixes a slot when sigmoid(z) reaches `threshold`.

    A slot's memory is zero when its block is entered. `TSPD.load(name)` and `TSPD.of(controller)` make one.
    """

    weights: Any
    """dict of arrays: the controller's leaves by path."""
    config: ControllerConfig = field(metadata={"static": True})
    threshold: Any = 0.5
    """float: of the hard gate. Published; above 1 nothing is fixed but the forced slot, which is plain decoding."""
    remask: Remask = field(default="unfixed", metadata={"static": True})
    """What the next pass sees as masks: every slot that is not fixed, or (A.2, literally) of n such slots the floor(n t / 2K) least
    confident, t passes of the K that the schedule has, while the others show their candidates and are decided again."""

    @property
    def drafts(self) -> bool:
        return self.remask == "representative"

    @classmethod
    def of(cls, controller: Controller, threshold: float = 0.5, remask: Remask = "unfixed") -> "TSPD":
        return cls(params.flatten(controller), controller.config, threshold, remask)

    @classmethod
    def load(cls, name: str, threshold: float = 0.5, remask: Remask = "unfixed") -> "TSPD":
        """From a folder that `dflax train controller` wrote, a hub id or a built-in name."""
        return cls.of(controllers.load(name, "tspd_controller"), threshold, remask)

    def init(self, B: int, T: int, V: int) -> Watch:
        if self.config.block_length != T:
            raise DflaxError(
                f"the controller was trained for blocks of {self.config.block_length} tokens, but block_length is {T}: "
                f"use block_length={self.config.block_length} or train a controller for {T}"
            )
        return Watch(Trail.empty((B, T)), jnp.zeros((B, T, *memory_shape(self.config)), jnp.float32))

    def step(self, state: Watch, seen: Observation, key: Key[Array, "B T"]) -> tuple[Watch, Array, Array]:
        controller = params.fill(_abstract(self.config), self.weights)
        slots = jnp.arange(self.config.block_length, dtype=jnp.float32) / max(self.config.block_length - 1, 1)
        entropy = normalised_entropy(seen.logits)
        trail, own = state.trail.features(
            self.config.smoothing,
            seen.confidence,
            seen.raw,
            entropy,
            jnp.broadcast_to(slots, seen.raw.shape),
            seen.uncertainty,
        )
        coverage = left_coverage(~seen.masked)
        around = neighbourhood(self.config.neighbours, seen.raw, entropy, seen.masked, coverage, seen.live)
        z, memory = controller(controller.standardise(jnp.concatenate([own, around], axis=-1)), state.memory)
        fixed = seen.masked & (jax.nn.sigmoid(z) >= self.threshold)
        return Watch(trail, memory), seen.token, fixed | best(seen.raw, seen.masked)

    def show(self, seen: Observation, commit: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
        left = seen.masked & ~commit
        count = jnp.sum(left, axis=1, dtype=jnp.int32)
        remasked = jnp.floor(0.5 * seen.spent * count).astype(jnp.int32)
        return left & (ranks(seen.confidence, left, seen.raw) < (count - remasked)[:, None])

    def check(self) -> None:
        check_number("threshold", self.threshold)
        if self.remask not in get_args(Remask):
            raise DflaxError(f"remask is {self.remask!r}; it must be one of {', '.join(get_args(Remask))}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Learn2PD(Policy):
    """Learning to parallel decode (arXiv 2509.25188): a filter over the block's confidences accepts slots, sigmoid(logit) > `threshold`.

    It reads the confidence of committed slots too (what the model gives its own choice there), and 0 behind the end of the canvas.
    """

    weights: Any
    """dict of arrays: the filter's leaves by path."""
    config: FilterConfig = field(metadata={"static": True})
    threshold: Any = 0.96
    """float: published for LLaDA."""

    @classmethod
    def of(cls, filter: AcceptanceFilter, threshold: float = 0.96) -> "Learn2PD":
        return cls(params.flatten(filter), filter.config, threshold)

    @classmethod
    def load(cls, name: str, threshold: float = 0.96) -> "Learn2PD":
        """From a folder that `dflax train controller` wrote, a hub id or a built-in name."""
        return cls.of(controllers.load(name, "learn2pd_filter"), threshold)

    def init(self, B: int, T: int, V: int) -> Any:
        if self.config.block_length != T:
            raise DflaxError(
                f"the filter was trained for blocks of {self.config.block_length} tokens, but block_length is {T}: "
                f"use block_length={self.config.block_length} or train a filter for {T}"
            )
        return ()

    def step(self, state: Any, seen: Observation, key: Key[Array, "B T"]) -> tuple[Any, Array, Array]:
        logits = params.fill(_abstract(self.config), self.weights)(jnp.where(seen.live, seen.confidence, 0.0))
        return state, seen.token, accept(logits, seen.masked, self.threshold) | best(seen.raw, seen.masked)

    def check(self) -> None:
        check_number("threshold", self.threshold)


def accept(logits: Float[Array, "*rows T"], masked: Bool[Array, "*rows T"], threshold: Any) -> Bool[Array, "*rows T"]:
    """The masked slots that the filter lets through."""
    return masked & (jax.nn.sigmoid(logits) > threshold)


@lru_cache(maxsize=32)
def _abstract(config: ControllerConfig | FilterConfig) -> Any:
    return params.abstract(lambda rngs: build(config, rngs))
