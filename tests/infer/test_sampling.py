"""Sampling: the recorded filter rules, what the noise depends on, mixed batches, and what a call may cost."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from dflax.errors import DflaxError
from dflax.infer.sampling import Noise, SamplingParams, choose, filtered_logprobs, gumbel, uniform
from golden import load_case

BATCH, SLOTS, VOCAB = 6, 2, 11
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, SLOTS, VOCAB)), jnp.float32)
POSITION = jnp.asarray(np.arange(BATCH * SLOTS).reshape(BATCH, SLOTS) % 7, jnp.int32)
JITTED = jax.jit(choose)
FILTERED = jax.jit(filtered_logprobs)
GUMBEL = jax.jit(gumbel, static_argnums=(3, 4))


def filtered(logits, temperature, top_k=0, top_p=1.0):
    rows = logits.shape[:-1]
    return FILTERED(
        jnp.asarray(logits, jnp.float32),
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
    )


@pytest.mark.parametrize("number", range(5))
def test_filtered_probabilities_equal_the_recorded_ones(number):
    case = load_case("sampling_rules")
    setting = case.info["probs"][number]
    got = jnp.exp(filtered(case.expected["probs_logits"], setting["temperature"], setting["top_k"], setting["top_p"]))
    case.check(setting["name"], got)
    assert np.sum(got > 0, axis=-1).tolist() == setting["kept"]


def test_no_filter_is_log_softmax():
    np.testing.assert_allclose(filtered(LOGITS, 1.0), jax.nn.log_softmax(LOGITS), rtol=1e-6, atol=1e-6)


@given(
    data=st.lists(st.integers(-20, 20), min_size=2, max_size=8),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1e-6, 0.2, 0.55, 0.9, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_filter_equals_a_plain_loop_even_with_ties(data, temperature, top_k, top_p):
    logits = np.array(data, np.float64) / 4
    order = sorted(range(len(data)), key=lambda token: (-logits[token], token))[: top_k or None]
    weights = np.exp((logits[order] - logits.max()) / temperature)
    before = np.concatenate([[0.0], np.cumsum(weights / weights.sum())[:-1]])
    if np.any(np.abs(before - top_p) < 1e-5):
        return  # on the edge float32 may fall on either side
    kept = [token for token, mass in zip(order, before, strict=True) if mass < top_p or top_p == 1.0]
    want = np.zeros(len(data))
    want[kept] = np.exp((logits[kept] - logits.max()) / temperature)
    # Padding with impossible tokens keeps one compiled shape and must not matter.
    padded = np.full((1, 9), -np.inf)
    padded[0, : len(data)] = logits
    got = np.exp(filtered(padded, temperature, top_k, top_p))[0]
    np.testing.assert_allclose(got[: len(data)], want / want.sum(), rtol=1e-4, atol=1e-6)
    assert np.all(got[len(data) :] == 0)


def test_temperature_zero_is_the_limit_of_small_temperatures():
    point = filtered(LOGITS, 0.0, top_k=5, top_p=0.5)
    np.testing.assert_array_equal(jnp.argmax(point, -1), jnp.argmax(LOGITS, -1))
    np.testing.assert_array_equal(jnp.sort(jnp.exp(point), -1)[..., -2:], np.broadcast_to([0.0, 1.0], (6, 2, 2)))
    np.testing.assert_array_equal(jnp.exp(filtered(LOGITS, 1e-30)), jnp.exp(point))


def test_small_temperatures_of_huge_logits_stay_finite():
    assert np.isclose(np.sum(np.exp(filtered(LOGITS * 1e30, 1e-30)), -1), 1.0).all()


@given(order=st.permutations(range(BATCH)), seeds=st.lists(st.integers(0, 2**32 - 1), min_size=BATCH, max_size=BATCH))
@settings(max_examples=20, deadline=None)
def test_a_shuffled_batch_gives_the_same_tokens(order, seeds):
    params = SamplingParams.build(
        BATCH, VOCAB, temperature=[0, 1, 0.5, 2, 1, 1], top_k=[None, 3, None, 4, 1, None], top_p=[1, 1, 0.7, 0.9, 1, 1],
        seed=seeds, index=[3, 1, 4, 1, 5, 9],
    )  # fmt: skip
    picked = jnp.asarray(order)
    straight = JITTED(LOGITS, params, POSITION)
    shuffled = JITTED(LOGITS[picked], jax.tree.map(lambda leaf: leaf[picked], params), POSITION[picked])
    np.testing.assert_array_equal(straight[picked], shuffled)


@given(seed=st.integers(0, 2**32 - 1), index=st.integers(0, 10**6), position=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_noise_depends_on_seed_index_and_position_only(seed, index, position):
    def noise(seeds, indices, positions):
        return np.asarray(
            GUMBEL(jnp.asarray(seeds, jnp.uint32), jnp.asarray(indices, jnp.int32), jnp.asarray(positions), 4)
        )

    wide = noise([seed, seed, seed + 1 & 0xFFFFFFFF], [index, index + 1, index], [[position, position + 1]] * 3)
    elsewhere = noise([5, 6, seed], [7, 8, index], [[0, 1], [2, 3], [9, position]])
    np.testing.assert_array_equal(wide[0, 0], elsewhere[2, 1])
    distinct = {tuple(row) for row in wide.reshape(-1, 4)}
    assert len(distinct) == 6, "another seed, index or position must give other noise"


def test_draws_for_different_ends_are_different():
    key = jnp.zeros(3, jnp.uint32), jnp.zeros(3, jnp.int32), jnp.zeros((3, 2), jnp.int32)
    assert not np.allclose(GUMBEL(*key, 4), GUMBEL(*key, 4, Noise.DRAFT))


def test_uniforms_and_gumbels_have_their_distributions():
    key = jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32), jnp.arange(1000)[None, :]
    flips = jax.jit(uniform)(*key)
    assert np.all((flips >= 0) & (flips < 1))
    assert kstest(np.ravel(flips), "uniform").pvalue > 0.001
    assert kstest(np.ravel(GUMBEL(*key, 4)), "gumbel_r").pvalue > 0.001


def test_the_largest_values_of_a_big_vocabulary_are_distinct():
    zero = jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)
    largest = np.sort(np.ravel(GUMBEL(*zero, 200_000)))[-100:]
    assert len(set(largest.tolist())) == 100
    assert np.all(np.isfinite(largest))


def test_noise_does_not_follow_the_global_generator():
    args = (jnp.ones(1, jnp.uint32), jnp.ones(1, jnp.int32), jnp.ones((1, 1), jnp.int32), 4)
    default = gumbel(*args)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(gumbel(*args), default)


def test_greedy_rows_of_a_mixed_batch_take_the_argmax():
    params = SamplingParams.build(BATCH, VOCAB, temperature=[0, 3, 0, 3, 0, 3], top_k=5, top_p=0.9)
    tokens = JITTED(LOGITS, params, POSITION)
    np.testing.assert_array_equal(tokens[::2], jnp.argmax(LOGITS, -1)[::2])
    assert np.any(tokens[1::2] != jnp.argmax(LOGITS, -1)[1::2]), "rows at temperature 3 should differ somewhere"


def test_samples_follow_the_filtered_distribution():
    rows = 4000
    params = SamplingParams.build(rows, VOCAB, temperature=0.8, top_k=6, top_p=0.9, seed=7)
    logits = jnp.broadcast_to(LOGITS[0, 0], (rows, 1, VOCAB))
    tokens = JITTED(logits, params, jnp.zeros((rows, 1), jnp.int32))
    p = np.exp(np.asarray(filtered(LOGITS[0, 0], 0.8, 6, 0.9), np.float64))
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=VOCAB)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    statistic = np.sum((counts[kept] - rows * p[kept]) ** 2 / (rows * p[kept]))
    assert statistic < chi2.ppf(0.999, kept.sum() - 1)


def primitives(jaxpr):
    """Names of the primitives of a jaxpr, branches of cond left out."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name != "cond":
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from primitives(inner)


def test_sort_and_noise_happen_only_inside_cond():
    params = SamplingParams.build(BATCH, VOCAB)
    jaxpr = jax.make_jaxpr(choose)(LOGITS, params, POSITION)
    assert "sort" in str(jaxpr)
    assert "random_bits" in str(jaxpr) or "threefry2x32" in str(jaxpr)
    always = set(primitives(jaxpr.jaxpr))
    assert "cond" in always
    assert not {name for name in always if "sort" in name or "random" in name or "threefry" in name}


def test_other_values_do_not_recompile():
    JITTED(LOGITS, SamplingParams.build(BATCH, VOCAB), POSITION)
    programs = JITTED._cache_size()
    other = SamplingParams.build(BATCH, VOCAB, temperature=1.0, top_k=3, top_p=0.5, stop_ids=[1, 2, 3], seed=9)
    JITTED(LOGITS, other, POSITION)
    assert JITTED._cache_size() == programs


def test_build_lays_out_one_row_per_prompt():
    params = SamplingParams.build(
        2, 50, temperature=[0, 0.5], top_k=[None, 7], top_p=None, stop_ids=[[3], [4, 5]], seed=2**32 - 1
    )
    assert params.temperature.tolist() == [0, 0.5]
    assert params.top_k.tolist() == [0, 7]
    assert params.top_p.tolist() == [1, 1]
    assert params.seed.tolist() == [2**32 - 1] * 2
    assert params.index.tolist() == [0, 1]
    assert params.stop_ids.shape == (2, 8)
    assert [[i for i in row if i >= 0] for row in params.stop_ids.tolist()] == [[3], [4, 5]]
    assert SamplingParams.build(1, 50, stop_ids=range(9)).stop_ids.shape == (1, 16)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": [0.0]}, "temperature has 1 values for 2 prompts"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": [1.0, 1.01]}, "top_p is 1.01"),
        ({"stop_ids": [50]}, "stop id 50 is not in the vocabulary of 50"),
        ({"stop_ids": [-1]}, "stop id -1"),
        ({"seed": -1}, "seed is -1"),
        ({"index": [0, 1, 2]}, "index has 3 values"),
    ],
)
def test_bad_values_are_refused_by_name(bad, says):
    with pytest.raises(DflaxError, match=says):
        SamplingParams.build(2, 50, **bad)
