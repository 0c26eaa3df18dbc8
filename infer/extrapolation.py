"""Confidence extrapolation (CE): a Kalman filter per position forecasts the confidence, so that a safe riser is committed early.

From arXiv 2605.30753, section 3.3 and A.7. The confidence of a masked position, in logit space, is a level with a velocity, seen
through noise. Where enough to the left is fixed, the lower confidence bound of the forecast is asked how far ahead it stays above
`min_confidence`; the bound at the furthest such horizon takes the place of the confidence. Training-free, and in front of any
policy: it only changes the confidence that the policy reads.

The paper leaves most constants open. Each is a field here, with its source: "published", or "ours" with the reason. `fit` of
`dflax.train.extrapolation` re-fits the noises to recorded traces.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dflax.errors import DflaxError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Noises:
    """The filter's variances, numbers or traced: y = level + n, n ~ N(0, observation); a step adds w ~ N(0, diag(level, velocity))."""

    level: Any
    velocity: Any
    observation: Any
    initial_velocity: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trend:
    """The filter of every position of the active block, all of one shape [B, T]."""

    level: Float[Any, "*slots"]
    """float32: estimated logit of the confidence."""
    velocity: Float[Any, "*slots"]
    """float32: its change per step."""
    p_level: Float[Any, "*slots"]
    """float32: variance of the level; with the next two the symmetric matrix P."""
    p_cross: Float[Any, "*slots"]
    p_velocity: Float[Any, "*slots"]
    innovation: Float[Any, "*slots"]
    """float32: running mean of squared innovations, the R_t(j) of `adaptive_noise`."""
    token: Int32[Any, "*slots"]
    """int32: the candidate that the series belongs to; -1 before the first observation."""
    seen: Int32[Any, "*slots"]
    """int32: observations of this series."""

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> "Trend":
        zero = jnp.zeros(shape, jnp.float32)
        return cls(zero, zero, zero, zero, zero, zero, jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConfidenceExtrapolation:
    """The look-ahead's constants: numbers are leaves (other values compile nothing), the horizon and the switches are static."""

    horizon: int = field(default=20, metadata={"static": True})
    """H, the longest forecast in steps. Published."""
    coverage: Any = 0.6
    """tau, the share of positions to the left that must be fixed before any look-ahead; at it the horizon is 0. Published."""
    z: Any = 1.28
    """Lower bound = forecast - z standard deviations. Ours: the one-sided 90 % bound; 1.0 commits earlier, 1.64 oscillates less."""
    min_confidence: Any = 0.9
    """c_min, what the lower bound must reach. Ours: the threshold that heuristic policies use."""
    level_noise: Any = 0.01
    """q_level. Ours; fitted on traces."""
    velocity_noise: Any = 0.002
    """q_velocity. Ours; fitted on traces."""
    observation_noise: Any = 0.25
    """R. Ours; fitted on traces."""
    initial_velocity_variance: Any = 0.05
    """A series starts as level y, velocity 0, P = diag(R, this). Ours; fitted on traces."""
    adaptive_noise: bool = field(default=False, metadata={"static": True})
    """R_t(j) instead of one R: the position's running mean of squared innovations, at least `noise_floor`. The paper writes R_t(j)."""
    noise_floor: Any = 0.05
    """Ours."""
    noise_memory: Any = 0.8
    """Weight of the past in that running mean. Ours."""
    clip: Any = 1e-4
    """Confidences are held in [clip, 1 - clip] before the logit. Ours."""
    min_observations: Any = 3
    """Observations of a series before its first look-ahead. Ours: two points make a velocity, the third tests it."""
    reset_on_change: bool = field(default=True, metadata={"static": True})
    """A new top-1 token starts a new series. Ours: the confidence of another candidate is not the same series."""
    signal: Literal["confidence", "margin"] = field(default="confidence", metadata={"static": True})
    """What is filtered: the logit of the confidence (section 3.3), or the top-1 minus top-2 logit (A.7): `candidates.margin`."""
    scope: Literal["block", "answer"] = field(default="block", metadata={"static": True})
    """Coverage counts positions of the block only (ours: earlier blocks are complete, so the answer's coverage says little), or of
    the whole answer before the position."""
    literal: bool = field(default=False, metadata={"static": True})
    """The equations as printed: the lower bound replaces the confidence at horizon 0 too, where it lies below it and slows decoding.
    Ours (False): horizon 0 keeps the raw confidence, and no confidence is ever lowered."""

    def check(self) -> None:
        """Raises DflaxError for a value that cannot be meant. Called on the host, where the numbers are numbers."""
        limits: dict[str, tuple[float, float]] = {
            "horizon": (1, 2**20),
            "min_observations": (1, float("inf")),
            "coverage": (0, 0.999999),
        }
        limits |= dict.fromkeys(("z", "level_noise", "velocity_noise", "initial_velocity_variance"), (0, float("inf")))
        limits |= dict.fromkeys(("observation_noise", "noise_floor"), (1e-9, float("inf")))
        limits |= {"noise_memory": (0, 0.999999), "min_confidence": (1e-9, 0.999999), "clip": (1e-9, 0.49)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise DflaxError(f"{name} of the look-ahead is {value!r}; it must be a number from {low:g} to {high:g}")
        for name in ("horizon", "min_observations"):
            if not isinstance(getattr(self, name), int):
                raise DflaxError(
                    f"{name} of the look-ahead is {getattr(self, name)!r}; it counts steps, a whole number"
                )
        for name, allowed in (("signal", ("confidence", "margin")), ("scope", ("block", "answer"))):
            if getattr(self, name) not in allowed:
                raise DflaxError(
                    f"{name} of the look-ahead is {getattr(self, name)!r}; it is one of {', '.join(allowed)}"
                )

    @property
    def noises(self) -> Noises:
        return Noises(self.level_noise, self.velocity_noise, self.observation_noise, self.initial_velocity_variance)

    def init(self, batch: int, length: int) -> Trend:
        """Nothing observed, for `length` positions a row."""
        return Trend.empty((batch, length))

    def reset(self, trend: Trend, entered: Bool[Array, "B"]) -> Trend:
        """Rows that enter a block start anew."""
        fresh = self.init(*trend.level.shape)
        return jax.tree.map(lambda new, old: jnp.where(entered[:, None], new, old), fresh, trend)

    def observe(
        self,
        trend: Trend,
        confidence: Float[Array, "*slots"],
        token: Int32[Array, "*slots"],
        masked: Bool[Array, "*slots"],
        coverage: Float[Array, "*slots"],
        margin: Float[Array, "*slots"] | None = None,
    ) -> tuple[Trend, Float[Array, "*slots"], Float[Array, "*slots"]]:
        """One step: the masked positions' confidences in, the extrapolated ones out.

        Args:
          confidence: float32, probability of the top-1 token.
          token: int32, that token.
          masked: which positions are observed; the others' series stand still.
          coverage: float32, share of fixed positions to the left (`left_coverage`).
          margin: float32, the token's logit minus the best other; read with signal="margin" only.

        Returns:
          The new state; the confidence, raised where a look-ahead is safe; and the standard deviation of the forecast level at the
          horizon taken, in logits (0 where not masked).
        """
        if self.signal == "margin" and margin is None:
            raise DflaxError("signal is 'margin' but no margin is given")
        y = margin if self.signal == "margin" and margin is not None else self.logit(confidence)
        trend, _, _ = advance(trend, y, token, masked, self.noises, self)
        taken, level, variance = self.safe_horizon(trend, coverage)
        bound = jax.nn.sigmoid(level - self.z * jnp.sqrt(variance))
        if self.literal:
            extrapolated = bound
        else:
            extrapolated = jnp.where(taken > 0, jnp.maximum(bound, confidence), confidence)
        uncertainty = jnp.where(masked, jnp.sqrt(variance), 0.0)
        return trend, jnp.where(masked, extrapolated, confidence), uncertainty

    def safe_horizon(
        self, trend: Trend, coverage: Float[Array, "*slots"]
    ) -> tuple[Int32[Array, "*slots"], Float[Array, "*slots"], Float[Array, "*slots"]]:
        """h*, the largest h up to the potential horizon whose lower bound reaches `min_confidence` (0: none), and the level and
        variance forecast there."""
        h = jnp.arange(1, self.horizon + 1, dtype=jnp.int32).reshape(-1, *(1,) * coverage.ndim)
        level, variance = forecast(trend, h, self.noises)
        least = jnp.log(self.min_confidence / (1 - self.min_confidence))
        safe = (level - self.z * jnp.sqrt(variance) >= least) & (h <= self.potential_horizon(coverage))
        safe &= trend.seen >= self.min_observations
        taken = jnp.max(jnp.where(safe, h, 0), axis=0)
        return taken, *forecast(trend, taken, self.noises)

    def potential_horizon(self, coverage: Float[Array, "*slots"]) -> Int32[Array, "*slots"]:
        """floor(H r), r = (coverage - tau) / (1 - tau) held in [0, 1]. The small number keeps rounding from taking a whole step."""
        share = jnp.clip((coverage - self.coverage) / (1 - self.coverage), 0.0, 1.0)
        return jnp.floor(self.horizon * share + 1e-4).astype(jnp.int32)

    def logit(self, confidence: Float[Array, "*slots"]) -> Float[Array, "*slots"]:
        """ln(c / (1 - c)) of the clipped confidence."""
        c = jnp.clip(confidence, self.clip, 1 - self.clip)
        return jnp.log(c) - jnp.log1p(-c)


def advance(
    trend: Trend,
    y: Float[Array, "*slots"],
    token: Int32[Array, "*slots"],
    observed: Bool[Array, "*slots"],
    noises: Noises,
    settings: ConfidenceExtrapolation,
) -> tuple[Trend, Float[Array, "*slots"], Float[Array, "*slots"]]:
    """One predict and update of the filter; `noises` beside `settings` because a fit varies them.

    Returns:
      The new state, and the innovation y - forecast with its variance S = P11 + R (0 and 1 where a series starts or nothing is observed).
    """
    level, p_level = forecast(trend, jnp.ones((), jnp.int32), noises)
    p_cross, p_velocity = trend.p_cross + trend.p_velocity, trend.p_velocity + noises.velocity
    floor = settings.noise_floor
    r = jnp.maximum(trend.innovation, floor) if settings.adaptive_noise else jnp.ones_like(y) * noises.observation
    s = p_level + r
    innovation = y - level
    gain, gain_velocity = p_level / s, p_cross / s
    keep = settings.noise_memory
    updated = Trend(
        level=level + gain * innovation,
        velocity=trend.velocity + gain_velocity * innovation,
        p_level=p_level - gain * p_level,
        p_cross=p_cross - gain * p_cross,
        p_velocity=p_velocity - gain_velocity * p_cross,
        innovation=keep * trend.innovation + (1 - keep) * innovation**2,
        token=token,
        seen=trend.seen + 1,
    )
    one = jnp.ones_like(y)
    started = Trend(
        level=y,
        velocity=0 * one,
        p_level=noises.observation * one,
        p_cross=0 * one,
        p_velocity=noises.initial_velocity * one,
        innovation=noises.observation * one,
        token=token,
        seen=jnp.ones_like(trend.seen),
    )
    starts = trend.seen == 0
    if settings.reset_on_change:
        starts |= token != trend.token
    pick = lambda old, new, first: jnp.where(observed, jnp.where(starts, first, new), old)
    went_on = observed & ~starts
    return (
        jax.tree.map(pick, trend, updated, started),
        jnp.where(went_on, innovation, 0.0),
        jnp.where(went_on, s, 1.0),
    )


def forecast(trend: Trend, h: Int32[Array, "..."], noises: Noises) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Level and its variance h steps ahead, [A^h P A^hT + sum_{i<h} A^i Q A^iT]_11 in closed form, A = [[1, 1], [0, 1]]."""
    h = h.astype(jnp.float32)
    level = trend.level + h * trend.velocity
    variance = trend.p_level + 2 * h * trend.p_cross + h**2 * trend.p_velocity
    return level, variance + h * noises.level + noises.velocity * (h - 1) * h * (2 * h - 1) / 6


def left_coverage(fixed: Bool[Array, "B T"], before: Int32[Array, "B"] | None = None) -> Float[Array, "B T"]:
    """Share of the positions left of each that are fixed; 1 where there are none.

    before: positions of the answer before the block, all fixed, for scope="answer"; None counts the block alone.
    """
    left = jnp.cumsum(fixed, axis=1) - fixed
    total = jnp.broadcast_to(jnp.arange(fixed.shape[1]), fixed.shape)
    if before is not None:
        left, total = left + before[:, None], total + before[:, None]
    return jnp.where(total > 0, left / jnp.maximum(total, 1), 1.0).astype(jnp.float32)
