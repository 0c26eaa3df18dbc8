"""The masked-diffusion objective: what is hidden, what it weighs (by hand, in numpy), shifted logits, chunks, the likelihood bound."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflax.config import ModelConfig, RopeConfig
from dflax.errors import DflaxError
from dflax.models import params
from dflax.train import diffusion as D
from dflax.train.language import fresh

B, S, V, MASK = 4, 12, 11, 3
PROMPT, LENGTH = jnp.array([2, 0, 5, 3]), jnp.array([10, 12, 10, 12])
ANSWER = 12


def tiny(**changes):
    shape = ModelConfig(
        "llada", V, 8, 12, 1, 2, 2, 4, 1e-5, RopeConfig(), False, 64, bidirectional=True, mask_token_id=MASK
    )
    return fresh(shape.__class__(**{**shape.__dict__, **changes}), 0)


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(4, V, (B, S)), jnp.int32)


noise = jax.jit(D.noise, static_argnames="config")
whole = jax.jit(lambda model, tokens: model.logits(model.whole(tokens).hidden))


def region(columns=S):
    return np.asarray(D.answer_region(PROMPT, LENGTH, columns))


def reference_ce(model, tokens, hidden, shift=0):
    """-log p of every token, row by row and column by column, from whole passes over each row alone."""
    out = np.zeros((B, S))
    for b in range(B):
        n = int(LENGTH[b])
        seen = np.where(hidden[b], MASK, tokens[b])[None, :n]
        logits = np.asarray(whole(model, seen)[0], np.float64)
        for s in range(int(PROMPT[b]), n):
            row = logits[max(s - shift, 0)]
            out[b, s] = np.log(np.exp(row).sum()) - row[tokens[b, s]]
    return out


def test_prompts_and_what_lies_behind_a_row_are_never_hidden():
    for masking in ("bernoulli", "exact", "rolling"):
        for seed in range(20):
            noised = noise(jax.random.key(seed), jnp.asarray(region()), config=D.DiffusionObjective(masking=masking))
            hidden = np.asarray(noised.hidden)
            for b in range(B):
                assert not hidden[b, : PROMPT[b]].any()
                assert not hidden[b, LENGTH[b] :].any()
            np.testing.assert_array_equal(noised.weight > 0, noised.hidden)
            np.testing.assert_array_equal(noised.size, LENGTH - PROMPT)
            if masking == "exact":
                assert (hidden.sum(1) >= 1).all()
                rate = hidden.sum(1) / (LENGTH - PROMPT)
                np.testing.assert_allclose(noised.weight, hidden / rate[:, None], rtol=1e-6)


def test_levels_are_stratified_and_tokens_are_hidden_at_their_rate():
    t = np.asarray(D.noise_levels(jax.random.key(1), 8))
    assert np.array_equal(np.floor(t * 8), np.arange(8))
    bounded = np.asarray(D.noise_levels(jax.random.key(1), 8, 0.3, 0.8))
    assert 0.3 <= bounded.min() < bounded.max() <= 0.8
    every = jnp.ones((16, 4000), bool)
    noised = noise(jax.random.key(2), every, config=D.DiffusionObjective(eps=0.1))
    t = np.asarray(D.noise_levels(jax.random.split(jax.random.key(2), 4)[0], 16))
    np.testing.assert_allclose(np.asarray(noised.weight).max(1), 1 / (0.9 * t + 0.1), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(noised.hidden).mean(1), 0.9 * t + 0.1, atol=0.03)


def test_rolling_noise_rises_along_the_region():
    """At every t the rates rise; widths lie between the bounds; tokens are hidden at their rates."""
    every, config = (
        jnp.ones((4000, 12), bool).at[:, :2].set(False),
        D.DiffusionObjective(masking="rolling", widths=(2.0, 2.0)),
    )
    noised = noise(jax.random.key(5), every, config=config)
    t = D.noise_levels(jax.random.split(jax.random.key(5), 4)[0], 4000)
    rate, weight = D.rolling(t, jnp.full(4000, 2.0), every)
    rate, hidden = np.asarray(rate), np.asarray(noised.hidden)
    assert (np.diff(rate[:, 2:], axis=1) >= 0).all()
    near = (np.asarray(t) > 0.4) & (np.asarray(t) < 0.6)
    np.testing.assert_allclose(hidden[near, 2:].mean(0), rate[near, 2:].mean(0), atol=0.08)
    # 1 - rate is exact to a last place of a rate near 1, and is multiplied by (10 + 6 w) / w = 11.
    np.testing.assert_allclose(
        noised.weight, np.where(hidden, weight, 0.0), rtol=1e-5, atol=11 * np.finfo(np.float32).eps
    )
    # Half of the ramp's centre: logit(rate) moves by one where the place does by the width.
    logit = np.log(rate[2000, 2:] / (1 - rate[2000, 2:]))
    np.testing.assert_allclose(np.diff(logit), 0.5, rtol=1e-3)
    assert rate[0, 2:].max() < 0.05
    assert rate[-1, 2:].min() > 0.95


@pytest.mark.parametrize("width", [1.0, 5.0])
def test_the_mean_over_rolling_noise_is_a_bound(width):
    """Of a cross entropy that is the same whatever is hidden, every token counts once: the bound is then exact.

    But for what is hidden before the ramp begins (5 % of the last token at most, less of those before it).
    """
    every = jnp.ones((20000, 30), bool)
    t = D.noise_levels(jax.random.key(0), 20000)
    rate, weight = D.rolling(t, jnp.full(20000, width), every)
    counted = np.asarray(rate * weight).mean(0)
    assert (counted < 1.001).all()
    assert (counted > 0.9).all()
    np.testing.assert_allclose(counted[10:20], 1.0, atol=0.05)


@pytest.mark.parametrize(("weights", "normalise"), [("elbo", "sequence"), ("elbo", "token"), ("uniform", "sequence")])
def test_the_weights_by_hand(weights, normalise):
    rng = np.random.default_rng(3)
    ce, hidden = rng.random((2, 5)), np.array([[0, 1, 1, 0, 0], [1, 1, 0, 1, 1]], bool)
    weight = jnp.asarray(hidden / np.array([[0.25], [0.75]]), jnp.float32)
    noised = D.Noised(jnp.asarray(hidden), weight, jnp.array([4, 5]))
    value = D.weigh(jnp.asarray(ce, jnp.float32), noised, D.DiffusionObjective(weights=weights, normalise=normalise))
    first, second = ce[0, 1] + ce[0, 2], ce[1, 0] + ce[1, 1] + ce[1, 3] + ce[1, 4]
    want = {
        ("elbo", "sequence"): (first / 0.25 / 4 + second / 0.75 / 5) / 2,
        ("elbo", "token"): (first / 0.25 + second / 0.75) / 9,
        ("uniform", "sequence"): (first + second) / 6,
    }[weights, normalise]
    np.testing.assert_allclose(value, want, rtol=1e-6)


def test_the_loss_of_a_model_by_hand(model, tokens):
    config, key = D.DiffusionObjective(), jax.random.key(7)
    loss = jax.jit(partial(D.diffusion_loss, answer_columns=ANSWER, config=config))
    value, found = loss(model, key, tokens, PROMPT, LENGTH)
    noised = noise(key, jnp.asarray(region()), config=config)
    hidden, weight = np.asarray(noised.hidden), np.asarray(noised.weight)
    ce = reference_ce(model, tokens, hidden)
    rows = [(ce[b] * weight[b]).sum() / (LENGTH[b] - PROMPT[b]) for b in range(B)]
    np.testing.assert_allclose(value, np.mean(rows), rtol=1e-4)
    assert found["tokens"] == LENGTH.sum()
    # What lies behind a row's end is seen by nobody.
    junk = jnp.where(jnp.arange(S) < LENGTH[:, None], tokens, 5)
    np.testing.assert_allclose(loss(model, key, junk, PROMPT, LENGTH)[0], value, rtol=1e-6)


def test_shifted_logits_predict_from_the_position_before(model, tokens):
    hidden, at = region() & (np.arange(S) % 2 == 0), region()
    shifted = jax.jit(partial(D.hidden_cross_entropy, answer_columns=ANSWER, chunk=1000))
    ce, right = shifted(tiny(shifted_logits=True), tokens, hidden, PROMPT, LENGTH)
    np.testing.assert_allclose(np.asarray(ce)[at], reference_ce(model, tokens, hidden, shift=1)[at], rtol=1e-4)
    assert right.shape == (B, S)


def test_blockwise_rows_are_what_block_by_block_decoding_meets():
    config = D.DiffusionObjective(blockwise=1.0, block_length=3, t_min=0.9)
    seen = set()
    for seed in range(12):
        noised = noise(jax.random.key(seed), jnp.asarray(region()), config=config)
        hidden, counted = np.asarray(noised.hidden), np.asarray(noised.weight) > 0
        for b in range(B):
            answer = slice(int(PROMPT[b]), int(LENGTH[b]))
            assert not hidden[b, : PROMPT[b]].any()
            size, block = int(noised.size[b]), np.flatnonzero(counted[b, answer]) // 3
            if not len(block):
                continue
            assert len(set(block.tolist())) == 1
            n = int(LENGTH[b] - PROMPT[b])
            assert size == min(3, n - 3 * block[0])
            assert not hidden[b, answer][: 3 * block[0]].any()
            assert hidden[b, answer][3 * block[0] + 3 :].all()
            assert not counted[b, answer][3 * block[0] + 3 :].any()
            seen.add((b, int(block[0])))
    assert {block for b, block in seen if b == 1} == {0, 1, 2, 3}


def next_token(model, tokens, **changes):
    given = {"chunk": 999} | changes
    ce, right = D.next_token_cross_entropy(model, tokens, PROMPT, LENGTH, ANSWER, **given)
    return np.asarray(ce), np.asarray(right)


def test_the_next_token_is_predicted_from_the_clean_ones_before_it_and_from_no_other(model, tokens):
    ce, right = next_token(model, tokens)
    live = np.arange(ANSWER) < (np.asarray(LENGTH) - np.asarray(PROMPT))[:, None]
    assert (ce[live] > 0).all()
    assert not ce[~live].any()
    assert not right[~live].any()
    row = int(np.argmax(live.sum(1)))
    for step in (1, 3):
        column = int(PROMPT[row]) + step
        other, _ = next_token(model, tokens.at[row, column].set((tokens[row, column] + 1) % (MASK - 1)))
        same = np.ones_like(ce, bool)
        same[row, step:] = False
        np.testing.assert_array_equal(other[same], ce[same])  # nothing before it knows of it
        assert (other[row, step:] != ce[row, step:])[live[row, step:]].all()  # its own label, and all that follows
    first, _ = next_token(model, tokens.at[row, 0].set((tokens[row, 0] + 1) % (MASK - 1)))
    assert (first[row] != ce[row])[live[row]].all()


def test_a_mask_sees_what_a_canvas_that_ends_with_it_shows(model, tokens):
    """Keys of a first and only layer know of no other token, so that tokens, positions and nothing else must be the same."""
    ce, right = next_token(model, tokens)
    ending = jax.jit(lambda tokens, length: model.predict(model.canvas(tokens, length)[0]))
    row, length = np.arange(B), np.asarray(LENGTH)
    for step in range(ANSWER):
        column = np.asarray(PROMPT) + step
        at, live = np.minimum(column, S - 1), column < length
        logits = np.asarray(ending(tokens.at[row, at].set(MASK), jnp.asarray(at + 1))[row, at], np.float64)
        label = np.asarray(tokens)[row, at]
        want = np.log(np.exp(logits).sum(1)) - logits[row, label]
        np.testing.assert_allclose(ce[live, step], want[live], rtol=1e-4)
        np.testing.assert_array_equal(right[live, step], (logits.argmax(1) == label)[live])


def test_a_shifted_model_asked_for_the_first_token_of_an_empty_prompt_stays_inside_the_row(tokens):
    shifted = tiny(shifted_logits=True)
    column = jnp.zeros((B, 1), jnp.int32)
    assert D._answers(shifted, tokens, column)[1].tolist() == [[0]] * B
    assert np.isfinite(next_token(shifted, tokens)[0]).all()


def test_the_next_token_loss_of_a_row_is_its_mean_and_chunks_change_nothing(model, tokens):
    ce, right = next_token(model, tokens)
    np.testing.assert_allclose(next_token(model, tokens, chunk=5)[0], ce, atol=1e-5)
    size = np.asarray(LENGTH) - np.asarray(PROMPT)
    loss, measured = D.next_token_loss(model, tokens, PROMPT, LENGTH, ANSWER, D.DiffusionObjective())
    np.testing.assert_allclose(loss, np.mean(ce.sum(1) / size), rtol=1e-5)
    np.testing.assert_allclose(measured["accuracy"], right.sum() / size.sum(), rtol=1e-5)


def test_chunks_change_nothing(model, tokens):
    leaves, key = params.flatten(model), jax.random.key(3)

    def grad(chunk):
        config = D.DiffusionObjective(chunk=chunk)
        loss = lambda leaves: D.diffusion_loss(params.fill(model, leaves), key, tokens, PROMPT, LENGTH, ANSWER, config)[
            0
        ]
        return jax.jit(jax.value_and_grad(loss))(leaves)

    (one, whole), (many, parts) = grad(1000), grad(7)
    np.testing.assert_allclose(one, many, rtol=1e-6)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_bound_hides_every_count_once(model, monkeypatch):
    """With as many passes as tokens each k of 1 .. n occurs once; the mean of CE over k is then exact for a CE that hangs on k only."""

    def by_count(model, tokens, hidden, *rest):
        return jnp.where(hidden, hidden.sum(1, keepdims=True).astype(jnp.float32) ** 2, 99.0), hidden

    monkeypatch.setattr(D, "hidden_cross_entropy", by_count)
    n = 6
    prompt_len, length = jnp.array([2, 4]), jnp.array([8, 10])
    found = D.likelihood_bound(
        model, jax.random.key(0), jnp.zeros((2, 12), jnp.int32), prompt_len, length, n, samples=n
    )
    np.testing.assert_allclose(found, np.mean(np.arange(1, n + 1) ** 2), rtol=1e-6)


def test_bad_values_are_named():
    for wrong in (
        {"t_min": 0.8, "t_max": 0.3},
        {"eps": 0.0},
        {"blockwise": 1.5},
        {"chunk": 0},
        {"next_token_share": -1.0},
        {"widths": (4.0, 2.0)},
        {"widths": (0.0, 2.0)},
        {"blockwise": 0.5, "masking": "rolling"},
    ):
        with pytest.raises(DflaxError, match=next(iter(wrong))):
            D.DiffusionObjective(**wrong)
