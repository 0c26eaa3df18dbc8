"""Policies compared at equal accuracy: paired differences, and passes read off a curve of accuracy against passes. Pure NumPy.

A policy with a number to tune is a curve, one point (passes, accuracy) per value. Its frontier are the points more accurate than every
point with fewer passes. Between neighbours of the frontier we interpolate linearly: answering a share of the problems with one value and
the rest with the other has just these passes and this accuracy. Plain decoding is the end of every curve, because each policy becomes it
when its number leaves nothing to commit early. A target below the first point of the frontier is met by that point; no curve is
prolonged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

NORMAL = 1.96
"""Standard errors of a 95 % interval."""

SLACK = 1e-9
"""What rounding may take from an accuracy that just reaches a target."""


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; NaN where nothing can be said."""

    value: float
    low: float
    high: float


NOTHING = Interval(np.nan, np.nan, np.nan)


def paired(ours: Float[np.ndarray, "n"], other: Float[np.ndarray, "n"]) -> Interval:
    """Mean of ours - other, problem by problem: mean +- 1.96 standard deviations of the differences / sqrt(n)."""
    differences = ours - other
    if not len(differences):
        return NOTHING
    mean = float(differences.mean())
    half = NORMAL * standard_error(differences)
    return Interval(mean, mean - half, mean + half)


def standard_error(values: Float[np.ndarray, "n"]) -> float:
    """Of a mean; NaN for less than two values."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


@dataclass(frozen=True)
class Crossing:
    """Where a curve reaches an accuracy.

    passes: NaN if it does not. below, above: numbers of the two points that it was read off; equal where it is a point's own number.
    """

    passes: float
    below: int = -1
    above: int = -1


def frontier(passes: Float[np.ndarray, "K"], accuracy: Float[np.ndarray, "K"]) -> Int[np.ndarray, "N"]:
    """Numbers of the points that no point with as few passes is as accurate as, fewest passes first."""
    order = np.lexsort((-accuracy, passes))
    best = np.maximum.accumulate(accuracy[order])
    return order[np.concatenate([[True], best[1:] > best[:-1]])]


def crossing(passes: Float[np.ndarray, "K"], accuracy: Float[np.ndarray, "K"], target: float) -> Crossing:
    """The fewest passes at which the frontier has `target` accuracy."""
    kept = frontier(passes, accuracy)
    enough = np.flatnonzero(accuracy[kept] >= target - SLACK)
    if not len(enough):
        return Crossing(float("nan"))
    i = int(enough[0])
    above, below = int(kept[i]), int(kept[max(i - 1, 0)])
    if i == 0 or accuracy[above] <= target:
        return Crossing(float(passes[above]), above, above)
    share = (target - accuracy[below]) / (accuracy[above] - accuracy[below])
    return Crossing(float(passes[below] + share * (passes[above] - passes[below])), below, above)


@dataclass(frozen=True)
class Curve:
    """A policy's sweep over the same n problems; the last point is plain decoding."""

    labels: tuple[str, ...]
    passes: Float[Any, "n K"]
    correct: Float[Any, "n K"]


@dataclass(frozen=True)
class Equal:
    """Passes of a policy at the target accuracy, with bootstrap intervals over the problems."""

    family: str
    points: int
    """Of its sweep, plain decoding not counted."""
    passes: Interval
    below: str
    above: str
    """The methods that it was read off."""
    ratio: Interval
    """These passes over those of the reference: above 1 the reference needs fewer."""


def compare(
    curves: Mapping[str, Curve],
    plain: Float[np.ndarray, "n"],
    margin: float,
    reference: str,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Equal]:
    """Every curve at the accuracy of plain decoding - margin, and its passes over the reference's.

    The intervals are percentiles over resamples of the problems, the same for all curves: in each, target, curves, frontiers and ratios
    are computed anew, so that they hold the noise of plain decoding's accuracy and of the choice among the points too.

    Args:
      plain: whether plain decoding was right, 0 or 1.
      margin: as a fraction, 0.005 for half a point.
      reference: a family; if it has no curve the ratios are NaN.
    """
    n = len(plain)
    shares = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples) / n
    weights = np.concatenate([np.full((1, n), 1 / n), shares])  # the first row: the problems as they are
    targets = weights @ plain - margin
    found = {}
    for family, curve in curves.items():
        passes, accuracy = weights @ curve.passes, weights @ curve.correct
        found[family] = [crossing(*point) for point in zip(passes, accuracy, targets, strict=True)]
    values = {family: np.array([one.passes for one in each]) for family, each in found.items()}
    of_reference = values.get(reference, np.full(resamples + 1, np.nan))
    return [
        Equal(
            family,
            len(curve.labels) - 1,
            _percentiles(values[family]),
            _label(curve, found[family][0].below),
            _label(curve, found[family][0].above),
            _percentiles(values[family] / of_reference),
        )
        for family, curve in curves.items()
    ]


def _label(curve: Curve, number: int) -> str:
    return curve.labels[number] if number >= 0 else ""


def _percentiles(values: Float[np.ndarray, "N"]) -> Interval:
    """The first value, and the middle 95 % of the others; NaN where less than all but a few of them exist."""
    rest = values[1:][np.isfinite(values[1:])]
    if not np.isfinite(values[0]) or len(rest) < 0.9 * (len(values) - 1):
        return Interval(float(values[0]), np.nan, np.nan)
    low, high = np.percentile(rest, [2.5, 97.5])
    return Interval(float(values[0]), float(low), float(high))
