"""Curves compared at equal accuracy, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from dflax.infer.frontier import Crossing, Curve, compare, crossing, frontier, paired, standard_error


def pair_of(ours, other):
    return paired(np.array(ours, float), np.array(other, float))


def test_paired_interval():
    found = pair_of([1, 1, 0, 1], [1, 0, 0, 0])  # differences 0 1 0 1: mean 1/2, deviation sqrt(1/3)
    half = 1.96 * math.sqrt(1 / 3) / 2
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    same = pair_of([1, 0, 1], [1, 0, 1])
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert math.isnan(pair_of([], []).value)
    assert math.isnan(pair_of([1], [0]).low)
    assert math.isnan(standard_error(np.ones(1)))
    assert standard_error(np.array([1.0, 0, 1, 0])) == pytest.approx(math.sqrt(1 / 3) / 2)


# (8, 0.80) is worse and dearer than (6, 0.85); (10, 0.9) needs more passes than (9, 0.9)
PASSES = np.array([10.0, 4.0, 6.0, 8.0, 9.0, 64.0])
ACCURACY = np.array([0.90, 0.60, 0.85, 0.80, 0.90, 0.95])


def test_frontier_leaves_out_what_is_beaten():
    assert frontier(PASSES, ACCURACY).tolist() == [1, 2, 4, 5]
    assert frontier(np.array([5.0, 5.0]), np.array([0.7, 0.8])).tolist() == [1]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (0.85, Crossing(6.0, 2, 2)),
        (0.88, Crossing(6 + 3 * 0.03 / 0.05, 2, 4)),
        (0.92, Crossing(9 + 55 * 0.02 / 0.05, 4, 5)),
        (0.95, Crossing(64.0, 5, 5)),
        (0.50, Crossing(4.0, 1, 1)),  # below the curve: its first point, nothing is prolonged
    ],
)
def test_crossing(target, expected):
    found = crossing(PASSES, ACCURACY, target)
    assert found.passes == pytest.approx(expected.passes)
    assert (found.below, found.above) == (expected.below, expected.above)


def test_an_accuracy_that_is_never_reached():
    assert math.isnan(crossing(PASSES, ACCURACY, 0.96).passes)


def test_a_target_that_rounding_just_misses():
    assert crossing(np.array([3.0]), np.array([0.1 + 0.2 - 1e-16]), 0.3).passes == 3.0


def test_compare_by_hand():
    """Plain is right on all ten problems, at 20 passes each; a and b on the first eight at 4 and 6, so at 90 % both are half way."""
    right = np.array([1.0] * 8 + [0.0] * 2)
    plain = np.ones(10)
    curve = lambda passes: Curve(
        ("one", "plain"), np.stack([np.full(10, passes), np.full(10, 20.0)], 1), np.stack([right, plain], 1)
    )
    a, b = compare({"a": curve(4.0), "b": curve(6.0)}, plain, 0.1, "a", resamples=200)
    assert a.passes.value == pytest.approx(12)
    assert b.passes.value == pytest.approx(13)
    assert (a.ratio.value, a.ratio.low, a.ratio.high) == pytest.approx((1, 1, 1))
    assert b.ratio.value == pytest.approx(13 / 12)
    assert 1 < b.ratio.low <= b.ratio.value <= b.ratio.high <= 1.5 + 1e-9
    assert a.passes.low == pytest.approx(4)  # a resample with at most one wrong problem
    assert (a.points, a.below, a.above) == (1, "one", "plain")
    assert math.isnan(compare({"b": curve(6.0)}, plain, 0.1, "a", resamples=10)[0].ratio.value)


def test_intervals_cover_what_they_should():
    """Passes of a policy that is always right: the interval is that of a mean."""
    rng = np.random.default_rng(0)
    passes = rng.normal(10, 2, 400)
    curve = Curve(("one", "plain"), np.stack([passes, np.full(400, 64.0)], 1), np.ones((400, 2)))
    found = compare({"a": curve}, np.ones(400), 0.005, "a")[0].passes
    assert found.value == pytest.approx(passes.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * standard_error(passes), rel=0.1)
