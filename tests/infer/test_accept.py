"""Acceptance: the recorded rejections, the exactness of the result, and the two ends of drafting quality."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from dflax.infer.accept import accept_chain, accept_sampled, reject
from dflax.infer.sampling import Noise, SamplingParams, choose, filtered_logprobs, gumbel, uniform
from golden import load_case

CASE = load_case("sampling_rules")
CHAIN = jax.jit(accept_chain)
GUMBEL = jax.jit(gumbel, static_argnums=(3, 4))
REJECT, SAMPLED = jax.jit(reject), jax.jit(accept_sampled)


def recorded(number):
    """Arrays of one recorded rejection as a batch of one, a candidate-only q spread over the vocabulary."""
    names = ("draft_tokens", "draft_probs", "target_probs", "uniforms")
    tokens, q, p, uniforms = (CASE.expected[f"reject{number}_{name}"] for name in names)
    if f"reject{number}_draft_indices" in CASE.expected:
        full = np.zeros((len(tokens), p.shape[1]), np.float32)
        np.put_along_axis(full, CASE.expected[f"reject{number}_draft_indices"], q, axis=1)
        q = full
    with np.errstate(divide="ignore"):
        return (jnp.asarray(tokens)[None], jnp.log(q)[None], jnp.log(p)[None], jnp.asarray(uniforms)[None])


@pytest.mark.parametrize("number", range(14))
def test_recorded_rejections(number):
    accepted, following = REJECT(*recorded(number))
    CASE.check(f"reject{number}_accepted", accepted[0])
    CASE.check(f"reject{number}_next_distribution", jnp.exp(following[0]))


def test_the_recorded_rejections_cover_both_kinds_of_q_and_both_ends():
    assert {f"reject{n}_draft_indices" in CASE.expected for n in range(14)} == {True, False}
    assert {0, CASE.info["rejections"][0]["drafts"]} <= {r["accepted"] for r in CASE.info["rejections"]}


@pytest.mark.parametrize("number", [0, 3])
def test_accept_sampled_commits_the_accepted_drafts_and_a_token_of_the_next_distribution(number):
    drafts, q, p, uniforms = recorded(number)
    got = SAMPLED(drafts, q, p, uniforms, jnp.zeros(p.shape))
    accepted = int(CASE.expected[f"reject{number}_accepted"])
    best = int(np.argmax(CASE.expected[f"reject{number}_next_distribution"]))  # no noise: the most probable one
    assert got.n.tolist() == [accepted + 1]
    assert got.tokens[0, : accepted + 1].tolist() == [*drafts[0, :accepted].tolist(), best]
    assert got.tokens[0, accepted + 1 :].tolist() == [0] * (p.shape[1] - accepted - 1)
    assert got.path.tolist() == [list(range(p.shape[1]))]


@given(
    drafts=st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=4, max_size=4),
    chosen=st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=4, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_chain_equals_a_plain_loop(drafts, chosen):
    got = CHAIN(jnp.asarray(drafts), jnp.asarray(chosen))
    for row in range(4):
        want = []
        for slot in range(4):
            want.append(chosen[row][slot])
            if slot == 3 or drafts[row][slot] != chosen[row][slot]:
                break
        assert got.n[row] == len(want)
        assert got.tokens[row, : len(want)].tolist() == want
        assert not np.any(got.tokens[row, len(want) :])


def test_perfect_drafts_fill_the_block_and_a_wrong_first_draft_leaves_the_bonus():
    chosen = jnp.asarray([[5, 6, 7, 8], [5, 6, 7, 8]])
    drafts = chosen[:, :3].at[1, 0].set(9)
    got = CHAIN(drafts, chosen)
    assert got.n.tolist() == [4, 1]
    assert got.tokens.tolist() == [[5, 6, 7, 8], [5, 0, 0, 0]]


def test_a_block_without_drafts_is_plain_decoding():
    logprobs, noise = jnp.asarray(np.random.default_rng(2).normal(size=(2, 2, 1, 5)), jnp.float32)
    empty = jnp.zeros((2, 0), jnp.int32)
    got = SAMPLED(empty, jnp.zeros((2, 0, 5)), logprobs, jnp.zeros((2, 0)), noise)
    np.testing.assert_array_equal(got.tokens[:, 0], jnp.argmax(logprobs[:, 0] + noise[:, 0], -1))
    assert got.n.tolist() == [1, 1]
    assert accept_chain(empty, jnp.asarray([[3], [4]])).tokens.tolist() == [[3], [4]]


def test_argmax_drafts_give_the_tokens_of_plain_sampling():
    """Walks 24 positions of a first-order chain by blocks of 4 and one by one: the same tokens."""
    vocab, length, block = 7, 24, 4
    table = np.random.default_rng(3).normal(size=(vocab, vocab)).astype(np.float32)
    params = SamplingParams.build(1, vocab, temperature=0.9, top_p=0.95, seed=11)
    jitted = jax.jit(choose)

    def target(tokens, position):
        return jitted(jnp.asarray(table[tokens])[None], params, jnp.asarray(position, jnp.int32)[None])[0]

    plain = [0]
    for position in range(1, length + 1):
        plain.append(int(target([plain[-1]] * block, [position] * block)[0]))

    written, lengths = [0], []
    while len(written) <= length:
        drafts = [written[-1]]
        while len(drafts) < block:
            drafts.append(int(np.argmax(table[drafts[-1]])))
        position = np.arange(block) + len(written)
        got = CHAIN(jnp.asarray([drafts[1:]]), target(drafts, position)[None])
        lengths.append(int(got.n[0]))
        written += got.tokens[0, : lengths[-1]].tolist()
    assert written[: length + 1] == plain
    assert 1 in lengths
    assert max(lengths) > 1, "both ends must occur for the test to say anything"


ROWS, VOCAB = 20_000, 5


@pytest.fixture(scope="module")
def block():
    """ROWS independent blocks of two drafts drawn from q, verified against a p that shares half of its mass."""
    rng = np.random.default_rng(1)
    p, q = (jax.nn.log_softmax(jnp.asarray(rng.normal(size=(n, VOCAB)) * 1.5, jnp.float32)) for n in (3, 2))
    p = p.at[:, 4].set(-jnp.inf)  # a token the target never draws, though the drafter does
    p = jax.nn.log_softmax(p)
    p, q = (jnp.broadcast_to(a, (ROWS, *a.shape)) for a in (p, q))
    seed, index = jnp.zeros(ROWS, jnp.uint32), jnp.arange(ROWS)
    position = jnp.broadcast_to(jnp.arange(3), (ROWS, 3))
    drafts = jnp.argmax(q + GUMBEL(seed, index, position, VOCAB, Noise.DRAFT)[:, :2], -1)
    return drafts, q, p, jax.jit(uniform)(seed, index, position[:, :2]), GUMBEL(seed, index, position, VOCAB)


def statistic(tokens, logprobs):
    p = np.exp(np.asarray(logprobs, np.float64))
    counts = np.bincount(np.asarray(tokens), minlength=len(p))
    assert counts[p == 0].sum() == 0
    want = len(tokens) * p[p > 0] / p.sum()
    return np.sum((counts[p > 0] - want) ** 2 / want)


def test_sampled_drafts_leave_the_distribution_of_the_target(block):
    drafts, q, p, uniforms, noise = block
    got = SAMPLED(drafts, q, p, uniforms, noise)
    limit = chi2.ppf(0.999, VOCAB - 2)
    for slot in range(3):
        reached = np.asarray(got.n) > slot  # later slots are judged given that the earlier ones were accepted
        assert reached.sum() > 1000
        assert statistic(np.asarray(got.tokens)[reached, slot], p[0, slot]) < limit
    without_residual = jnp.where(got.n > 1, drafts[:, 0], jnp.argmax(p[:, 0] + noise[:, 0], -1))
    assert statistic(without_residual, p[0, 0]) > 10 * limit, "the test must notice a missing residual"


def test_acceptance_rate_is_one_minus_total_variation(block):
    drafts, q, p, uniforms, _ = block
    accepted, _ = REJECT(drafts, q, p, uniforms)
    shared = float(jnp.sum(jnp.minimum(jnp.exp(p[0, 0]), jnp.exp(q[0, 0]))))
    assert abs(float(jnp.mean(accepted > 0)) - shared) < 0.015


def test_q_equal_to_p_accepts_everything(block):
    drafts, q, p, uniforms, noise = block
    got = SAMPLED(drafts, q, jnp.concatenate([q, p[:, 2:]], axis=1), uniforms, noise)
    assert np.all(got.n == 3)


def test_a_rejection_by_rounding_falls_back_to_the_target():
    """p below q by one rounding step everywhere: the residual is empty, and token 0 must not be what remains."""
    q = jnp.log(jnp.asarray([[[0.0, 0.5, 0.5]]]))
    p = jnp.concatenate([q - 1e-3, q], axis=1)
    _, following = REJECT(jnp.asarray([[1]]), q, p, jnp.asarray([[0.9999999]]))
    np.testing.assert_allclose(jnp.exp(following)[0], [0, 0.5, 0.5], atol=1e-3)


def test_greedy_rows_of_a_sampled_batch_follow_the_argmax():
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(2, 3, VOCAB)), jnp.float32)
    zero, off, one = jnp.zeros((2, 3)), jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3))
    p = jax.jit(filtered_logprobs)(logits, zero, off, one)
    best = jnp.argmax(logits, -1)
    drafts = best[:, :2].at[1, 1].add(1) % VOCAB
    q = jnp.log(jax.nn.one_hot(drafts, VOCAB))
    noise = jnp.asarray(np.random.default_rng(6).gumbel(size=(2, 3, VOCAB)), jnp.float32)
    got = SAMPLED(drafts, q, p, jnp.full((2, 2), 0.999), noise)
    assert got.n.tolist() == [3, 2]
    np.testing.assert_array_equal(got.tokens[0], best[0])
    np.testing.assert_array_equal(got.tokens[1, :2], best[1, :2])
