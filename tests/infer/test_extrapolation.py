"""CE: the filter against a Kalman filter in matrices, the horizon, and what never happens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation, Trend, forecast, left_coverage

CE = ConfidenceExtrapolation()
SHAPE = (2, 32)
A = np.array([[1.0, 1.0], [0.0, 1.0]])


def sigmoid(y):
    return 1 / (1 + np.exp(-y))


def kalman(ys, ce=CE):
    """State and covariance after the observations `ys` of one position, written with matrices."""
    x, p = np.array([ys[0], 0.0]), np.diag([ce.observation_noise, ce.initial_velocity_variance])
    for y in ys[1:]:
        x, p = A @ x, A @ p @ A.T + np.diag([ce.level_noise, ce.velocity_noise])
        gain = p[:, 0] / (p[0, 0] + ce.observation_noise)
        x, p = x + gain * (y - x[0]), p - np.outer(gain, p[0])
    return x, p


def ahead(x, p, h, ce=CE):
    """Level and variance h steps later, by the sum of matrix powers."""
    power = np.linalg.matrix_power
    noise = sum(
        power(A, i) @ np.diag([ce.level_noise, ce.velocity_noise]) @ power(A, i).T for i in range(h)
    ) + np.zeros((2, 2))
    return (power(A, h) @ x)[0], (power(A, h) @ p @ power(A, h).T + noise)[0, 0]


def trace(seed=0, steps=7):
    """Logits that rise, fall and wander, [steps, B, T]."""
    rng = np.random.default_rng(seed)
    slope = rng.normal(0.3, 0.5, SHAPE)
    return np.cumsum(slope + rng.normal(0, 0.2, (steps, *SHAPE)), axis=0) + rng.normal(-1, 1, SHAPE)


observe = jax.jit(ConfidenceExtrapolation.observe)


def run(ce, ys, coverage=1.0, token=0, masked=True):
    """All observations through `ce`; its last answer."""
    trend = ce.init(*SHAPE)
    full = lambda value, kind: jnp.broadcast_to(jnp.asarray(value, kind), SHAPE)
    for step, y in enumerate(ys):
        ids = token[step] if isinstance(token, list) else token
        out = observe(
            ce,
            trend,
            full(sigmoid(y), jnp.float32),
            full(ids, jnp.int32),
            full(masked, bool),
            full(coverage, jnp.float32),
        )
        trend = out[0]
    return out


def test_filter_and_forecast_equal_the_matrix_form():
    ys = np.clip(trace(), -6, 6)
    trend = run(CE, ys)[0]
    for slot in [(0, 0), (1, 5), (0, 31)]:
        x, p = kalman(ys[(slice(None), *slot)])
        np.testing.assert_allclose([trend.level[slot], trend.velocity[slot]], x, rtol=1e-4, atol=1e-5)
        got = [trend.p_level[slot], trend.p_cross[slot], trend.p_velocity[slot]]
        np.testing.assert_allclose(got, [p[0, 0], p[0, 1], p[1, 1]], rtol=1e-4)
        for h in (0, 1, 2, 7, 20):
            level, variance = forecast(trend, jnp.int32(h), CE.noises)
            np.testing.assert_allclose((level[slot], variance[slot]), ahead(x, p, h), rtol=1e-4, atol=1e-5)


def test_potential_horizon():
    coverage = np.array([0.0, 0.5999, 0.6, 0.7, 0.8, 0.98, 1.0], np.float32)
    np.testing.assert_array_equal(CE.potential_horizon(jnp.asarray(coverage)), [0, 0, 0, 5, 10, 19, 20])


def test_horizon_is_the_largest_safe_one_and_none_at_the_coverage_threshold():
    ys = np.clip(trace(), -6, 6)
    for coverage in (0.6, 0.8, 1.0):
        _, confidence, uncertainty = run(CE, ys, coverage)
        most = {0.6: 0, 0.8: 10, 1.0: 20}[coverage]
        for slot in np.ndindex(*SHAPE):
            x, p = kalman(ys[(slice(None), *slot)])
            raw, bound, spread = sigmoid(ys[-1][slot]), 0.0, p[0, 0]
            for h in range(1, most + 1):
                level, variance = ahead(x, p, h)
                lower = sigmoid(level - CE.z * np.sqrt(variance))
                if lower >= CE.min_confidence:
                    bound, spread = lower, variance
            np.testing.assert_allclose(confidence[slot], max(raw, bound), atol=2e-5)
            np.testing.assert_allclose(uncertainty[slot], np.sqrt(spread), rtol=1e-3)
        raised = int(np.sum(np.asarray(confidence) > sigmoid(ys[-1]) + 1e-4))
        assert (raised == 0) if coverage == 0.6 else raised > 5


variance = st.floats(1e-3, 1.0)
constants = st.builds(
    ConfidenceExtrapolation, coverage=st.floats(0.0, 0.9), z=st.floats(0.0, 3.0), min_confidence=st.floats(0.3, 0.99),
    level_noise=variance, velocity_noise=variance, observation_noise=variance, initial_velocity_variance=variance,
    min_observations=st.integers(1, 4),
)  # fmt: skip


@settings(max_examples=30, deadline=None, derandomize=True)
@given(ce=constants, seed=st.integers(0, 999), share=st.none() | st.floats(0.0, 1.0), h=st.integers(0, 20))
def test_whatever_the_constants(ce, seed, share, h):
    """One program for all: the forecast is the matrix form's, nothing is lowered, and nothing raised without coverage.

    share: of the coverage; None is exactly the threshold, which two draws hardly ever meet.
    """
    share = ce.coverage if share is None else share
    ys = np.clip(trace(seed), -6, 6)
    raw = sigmoid(ys[-1]).astype(np.float32)
    trend, confidence, _ = run(ce, ys, share)
    assert np.all(np.asarray(confidence) >= raw)
    if share <= ce.coverage:
        np.testing.assert_array_equal(confidence, raw)
    level, spread = forecast(trend, jnp.int32(h), ce.noises)
    for slot in [(0, 3), (1, 30)]:
        want = ahead(*kalman(ys[(slice(None), *slot)], ce), h, ce)
        np.testing.assert_allclose((level[slot], spread[slot]), want, rtol=2e-3, atol=1e-3)


def test_a_confidence_is_never_lowered_but_by_the_printed_equations():
    lowered = 0
    for seed in range(4):
        ys = trace(seed)
        for coverage in (0.3, 0.9, 1.0):
            _, confidence, _ = run(CE, ys, coverage)
            assert np.all(np.asarray(confidence) >= sigmoid(ys[-1]).astype(np.float32))
        _, confidence, _ = run(replace(CE, literal=True), ys, 0.3)
        lowered += int(np.sum(np.asarray(confidence) < sigmoid(ys[-1]) - 1e-3))
    assert lowered > 50


def test_a_new_candidate_starts_a_new_series():
    ys = np.broadcast_to(np.linspace(-2, 1, 6)[:, None, None], (6, *SHAPE))
    steady, raised, _ = run(CE, ys)
    changed, raw, _ = run(CE, ys, token=[3, 3, 3, 3, 3, 4])
    assert np.all(np.asarray(steady.velocity) > 0.3)
    assert np.all(np.asarray(raised) >= CE.min_confidence)
    np.testing.assert_array_equal(changed.velocity, 0)
    np.testing.assert_array_equal(changed.seen, 1)
    np.testing.assert_allclose(changed.p_velocity, CE.initial_velocity_variance)
    np.testing.assert_allclose(raw, sigmoid(1.0), rtol=1e-6)
    kept, again, _ = run(replace(CE, reset_on_change=False), ys, token=[3, 3, 3, 3, 3, 4])
    np.testing.assert_array_equal(kept.velocity, steady.velocity)
    np.testing.assert_array_equal(again, raised)


def test_observations_needed_before_a_look_ahead():
    rise = np.broadcast_to(np.array([-3.0, 0.0, 3.0, 3.1])[:, None, None], (4, *SHAPE))
    sure = replace(CE, min_confidence=0.5)
    raw = lambda count: sigmoid(rise[count - 1])
    np.testing.assert_allclose(run(sure, rise[:2])[1], raw(2), rtol=1e-5)
    assert np.all(np.asarray(run(sure, rise[:3])[1]) > raw(3) + 0.01)


def test_what_is_not_masked_stands_still():
    masked = np.arange(32) % 2 == 0
    ys = trace()
    trend, confidence, uncertainty = run(CE, ys, masked=masked)
    np.testing.assert_array_equal(np.asarray(trend.seen), np.broadcast_to(np.where(masked, 7, 0), SHAPE))
    off = np.broadcast_to(~masked, SHAPE)
    np.testing.assert_array_equal(np.asarray(confidence)[off], sigmoid(ys[-1]).astype(np.float32)[off])
    np.testing.assert_array_equal(np.asarray(uncertainty)[off], 0)


def test_rows_that_enter_a_block_start_anew():
    trend = run(CE, trace())[0]
    after = CE.reset(trend, jnp.array([True, False]))
    for field in vars(trend):
        new, old = getattr(after, field), getattr(trend, field)
        np.testing.assert_array_equal(new[0], getattr(Trend.empty(SHAPE), field)[0])
        np.testing.assert_array_equal(new[1], old[1])


def test_running_noise_makes_a_noisy_position_wait():
    rng = np.random.default_rng(5)
    ys = np.broadcast_to(np.linspace(-1, 1.6, 9)[:, None, None], (9, *SHAPE)) + 0.0
    ys[:, 1] += rng.choice([-1.2, 1.2], (9, 32))
    adaptive = replace(CE, adaptive_noise=True)
    trend = run(adaptive, ys)[0]
    assert np.all(np.asarray(trend.innovation)[0] < 0.2)
    assert np.all(np.asarray(trend.p_level)[1] > np.asarray(trend.p_level)[0])


def test_margin_is_a_signal_of_its_own():
    margin = replace(CE, signal="margin")
    ones = jnp.ones(SHAPE, jnp.float32)
    arguments = (margin.init(*SHAPE), 0.5 * ones, jnp.zeros(SHAPE, jnp.int32), ones > 0, ones)
    trend, _, _ = margin.observe(*arguments, margin=4 * ones)
    np.testing.assert_array_equal(trend.level, 4)
    with pytest.raises(DflaxError, match="no margin"):
        margin.observe(*arguments)


def test_left_coverage():
    fixed = jnp.array([[True, False, True, True], [False, False, False, True]])
    np.testing.assert_allclose(left_coverage(fixed), [[1, 1, 1 / 2, 2 / 3], [1, 0, 0, 0]])
    before = jnp.array([4, 0], jnp.int32)
    np.testing.assert_allclose(left_coverage(fixed, before), [[1, 1, 5 / 6, 6 / 7], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    "wrong",
    [
        {"horizon": 0}, {"coverage": 1.0}, {"observation_noise": 0.0}, {"z": -1.0}, {"min_confidence": 1.0}, {"clip": 0.5},
        {"min_observations": 0}, {"z": "1"},
    ],
)  # fmt: skip
def test_impossible_constants(wrong):
    with pytest.raises(DflaxError, match=f"^{next(iter(wrong))} of the look-ahead is "):
        ConfidenceExtrapolation(**wrong).check()
