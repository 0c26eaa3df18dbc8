"""Fits the look-ahead's noises to recorded confidences: the values under which the one-step forecasts were likeliest.

A Kalman filter's forecast errors (innovations) are independent and normal, so the log-likelihood of a series is a sum over its steps.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int32

from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation, Noises, Trend, advance, forecast
from dflax.train.traces import Sequences

LEAST = 1e-6  # a variance below this is 0 to any decision, and its logarithm runs away


@dataclass(frozen=True)
class Fit:
    """What a fit found."""

    constants: ConfidenceExtrapolation
    figures: dict[str, Any]
    """innovations: how many; nll_before, nll_after: mean negative log-likelihood per innovation, in nats; variance: mean squared
    innovation over its predicted variance (1 is calibrated); below_bound: share of confidences that came out below the lower bound
    forecast for them 1, 2, 4 and 8 steps before (1 - Phi(z) is calibrated)."""


def fit(series: Sequences, start: ConfidenceExtrapolation, steps: int = 300, most: int = 20_000, seed: int = 0) -> Fit:
    """`start` with the four noises re-fitted by maximum likelihood; everything else stays.

    Args:
      series: recorded slots; those of plain decoding are the longest.
      steps: of Adam on the logarithms of the variances.
      most: series used at most, drawn by `seed`.
    """
    if start.adaptive_noise:
        raise DflaxError("adaptive_noise has no constant R to fit; fit without it and switch it on afterwards")
    chosen = series.pick(np.flatnonzero(series.observed.sum(axis=1) >= 2))
    if not len(chosen):
        raise DflaxError("no slot was observed twice in these traces: there is nothing to fit the look-ahead to")
    if len(chosen) > most:
        chosen = chosen.pick(np.sort(np.random.default_rng(seed).choice(len(chosen), most, replace=False)))
    y = chosen.margin if start.signal == "margin" else np.asarray(start.logit(jnp.asarray(chosen.confidence)))
    data = tuple(jnp.asarray(array.T) for array in (y, chosen.token, chosen.observed))
    likelihood = jax.jit(lambda noises: _likelihood(noises, start, *data))
    first = jnp.log(jnp.maximum(jnp.array(jax.tree.leaves(start.noises), jnp.float32), LEAST))
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, steps))

    @jax.jit
    def search(logs: Float[Array, "4"]) -> Float[Array, "4"]:
        def descend(carry, _):
            logs, state = carry
            grads = jax.grad(lambda logs: _likelihood(_noises(logs), start, *data)[0])(logs)
            updates, state = optimizer.update(grads, state)
            return (jnp.maximum(optax.apply_updates(logs, updates), jnp.log(LEAST)), state), None  # pyright: ignore[reportArgumentType]

        return jax.lax.scan(descend, (logs, optimizer.init(logs)), None, length=steps)[0][0]

    noises = _noises(search(first))
    before, after = likelihood(_noises(first)), likelihood(noises)
    value = {name: float(v) for name, v in asdict(noises).items()}
    constants = replace(
        start, level_noise=value["level"], velocity_noise=value["velocity"], observation_noise=value["observation"],
        initial_velocity_variance=value["initial_velocity"],
    )  # fmt: skip
    return Fit(
        constants,
        {
            "series": len(chosen),
            "innovations": int(after[2]),
            "nll_before": float(before[0]),
            "nll_after": float(after[0]),
            "variance": float(after[1]),
            "below_bound": {h: _below_bound(constants, h, *data) for h in (1, 2, 4, 8) if h < len(data[0])},
        },
    )


def _noises(logs: Float[Array, "4"]) -> Noises:
    return Noises(*jnp.exp(logs))


def _likelihood(noises: Noises, settings: ConfidenceExtrapolation, y: Array, token: Array, observed: Array) -> Any:
    """Mean negative log-likelihood of the innovations, mean squared standardised innovation, and their number; arrays are [S, R]."""

    def step(trend, now):
        trend, innovation, s = advance(trend, *now, noises=noises, settings=settings)
        counts = now[2] & (trend.seen > 1)
        return trend, (jnp.where(counts, jnp.log(2 * jnp.pi * s) + innovation**2 / s, 0) / 2, innovation**2 / s, counts)

    _, (nll, square, counts) = jax.lax.scan(step, Trend.empty(y.shape[1:]), (y, token, observed))
    number = jnp.maximum(jnp.sum(counts), 1)
    return jnp.sum(nll) / number, jnp.sum(jnp.where(counts, square, 0)) / number, jnp.sum(counts)


def _below_bound(ce: ConfidenceExtrapolation, h: int, y: Array, token: Array, observed: Array) -> float | None:
    """Of the forecasts h steps ahead whose slot was still masked then with the same token: how many came out below the bound."""

    @jax.jit
    def measure(y: Float[Array, "S R"], token: Int32[Array, "S R"], observed: Array) -> Any:
        def step(trend, now):
            trend, _, _ = advance(trend, *now, noises=ce.noises, settings=ce)
            level, variance = forecast(trend, jnp.int32(h), ce.noises)
            return trend, (level - ce.z * jnp.sqrt(variance + ce.observation_noise), trend.seen)

        _, (bound, seen) = jax.lax.scan(step, Trend.empty(y.shape[1:]), (y, token, observed))
        counts = observed[h:] & observed[:-h] & (token[h:] == token[:-h]) & (seen[:-h] >= ce.min_observations)
        return jnp.sum(counts & (y[h:] < bound[:-h])), jnp.sum(counts)

    missed, count = measure(y, token, observed)
    return round(float(missed) / float(count), 4) if int(count) else None
