"""What must hold of every answer, for requests that nobody thought of. One shape each: three prompts, 12 tokens in blocks of 4."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import dflax
from dflax import policies
from dflax.config import ControllerConfig, FilterConfig
from dflax.infer.canvas import active_block
from dflax.infer.denoise import View, enter, finish, full_pass, full_step, short_pass
from dflax.infer.diffuse import prepare
from dflax.infer.learned import TSPD, Learn2PD
from dflax.models.controller import build
from tests.infer.tiny_diffusion import MASK, TOKENS, diffusion_model

GEN, BLOCK = 12, 4
MODELS = {"plain": diffusion_model(), "shifted": diffusion_model(shifted=True)}
PROMPTS = st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=18), min_size=3, max_size=3)
ONE_LENGTH = dflax.Cache("prefix", suffix_lengths=1)
CACHES = ("none", ONE_LENGTH, "dual")
PATIENT = {  # policies with a number that nothing reaches
    "factor": policies.Factor(0.0),
    "frechet": policies.Frechet(1.0),
    "tspd": TSPD.of(build(ControllerConfig(block_length=BLOCK), nnx.Rngs(0)), threshold=2.0),
    "prophet": policies.Prophet(1e9, 1e9, 1e9),
    "credit": policies.Credit(2.0, weight=0.0),
    "learn2pd": Learn2PD.of(build(FilterConfig(BLOCK), nnx.Rngs(0)), threshold=2.0),
    "threshold": policies.Threshold(2.0),
}
OF_A_ROW = ("tokens", "commit_step", "length", "nfe")
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
# The first request that fails is shown as drawn: a smaller one would take minutes, in tests/mutations too.
few = settings(
    max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False
)


def answer(kind, prompts, policy, cache="none", **settings):
    out = dflax.denoise(MODELS[kind], prompts, GEN, BLOCK, policy=policy, cache=cache, **settings)
    assert not any(MASK in tokens for tokens in out.tokens)
    return out


@pytest.mark.parametrize(
    ("kind", "cache", "policy"),
    [
        ("plain", "dual", "threshold"), ("shifted", "dual", "threshold"), slow("shifted", ONE_LENGTH, "threshold"),
        slow("shifted", "none", "threshold"), slow("plain", ONE_LENGTH, "threshold"), ("plain", "none", "threshold"),
        # every day each of the others with one cache
        *(
            ("plain", cache, policy) if i % 3 == j else slow("plain", cache, policy)
            for i, policy in enumerate(PATIENT) if policy != "threshold" for j, cache in enumerate(CACHES)
        ),
    ],
)  # fmt: skip
@few
@given(prompts=PROMPTS, temperature=st.sampled_from([0.0, 0.7]))
def test_a_policy_that_never_commits_early_is_plain_decoding(kind, cache, policy, prompts, temperature):
    temperatures = [temperature, 0.7, 0.0]
    plain = answer(kind, prompts, policies.Schedule(), cache, temperature=temperatures)
    assert plain.nfe == [GEN] * 3
    patient = answer(kind, prompts, PATIENT[policy], cache, temperature=temperatures)
    assert (patient.tokens, patient.commit_steps, patient.nfe) == (plain.tokens, plain.commit_steps, plain.nfe)


@pytest.mark.parametrize("cache", ["none", dflax.Cache("dual", refresh_every=1)])
def test_literal_remasking_shows_drafts_and_decides_them_again(cache):
    """A.2 of TSPD's paper step by step, with a gate that never opens: one token is final in every step, the most confident."""
    model, prompt = MODELS["plain"], [3, 0, 5, 1, 1]
    policy = TSPD.of(build(ControllerConfig(block_length=BLOCK), nnx.Rngs(0)), threshold=2.0)
    final, visible, drafted = np.full(GEN, MASK), np.full(GEN, MASK), 0
    for step in range(GEN):
        block = slice(step // BLOCK * BLOCK, (step // BLOCK + 1) * BLOCK)
        p = np.asarray(jax.nn.softmax(model.logits(np.array([prompt + visible.tolist()]))[0, len(prompt) :]))[block]
        token = np.where(np.arange(p.shape[1]) == MASK, -1, p).argmax(1)
        raw = np.where(final[block] == MASK, np.take_along_axis(p, token[:, None], 1)[:, 0], -1)
        order = np.argsort(-raw)
        final[block][order[0]] = token[order[0]]
        left = order[1 : BLOCK - step % BLOCK]
        shown = left[: len(left) - int(step / GEN / 2 * len(left))]
        visible[:] = final
        visible[block][shown] = token[shown]
        drafted += len(shown)
    options = {"cache": cache, "policy": replace(policy, remask="representative")}
    out = dflax.denoise(model, [prompt, [4]], GEN, BLOCK, **options)
    assert out.tokens[0] == final.tolist()
    assert 0 < drafted < GEN * (BLOCK - 1) // 2  # some are shown, some are masks again
    assert out.tokens[0] != dflax.denoise(model, [prompt, [4]], GEN, BLOCK, policy=policy).tokens[0]


@pytest.mark.parametrize("cache", ["dual", slow("prefix")])
@few
@given(prompts=PROMPTS, threshold=st.sampled_from([0.3, 0.5, 0.9]))
def test_a_cache_refreshed_in_every_step_is_no_cache(cache, prompts, threshold):
    policy = policies.Threshold(threshold)
    fresh = answer("plain", prompts, policy, dflax.Cache(cache, refresh_every=1))
    none = answer("plain", prompts, policy)
    assert (fresh.tokens, fresh.commit_steps, fresh.nfe) == (none.tokens, none.commit_steps, none.nfe)


@pytest.mark.parametrize(
    "cache", [dflax.Cache("dual", refresh_every=2), slow("none"), slow(ONE_LENGTH), slow("prefix")]
)
@few
@given(prompts=PROMPTS, others=PROMPTS, temperature=st.sampled_from([0.0, 0.7]), threshold=st.sampled_from([0.3, 0.6]))
def test_a_row_does_not_know_its_neighbours(cache, prompts, others, temperature, threshold):
    """Other prompts, lengths, temperatures and finish times beside it change nothing."""
    policy = policies.Threshold(threshold)
    end = dflax.EndOfText((2,), truncate=True, floor=0.3, anywhere=True)
    ask = lambda prompts, temperatures: answer(
        "plain",
        prompts,
        policy,
        cache,
        end_of_text=end,
        temperature=temperatures,
        extrapolation=dflax.ConfidenceExtrapolation(),
    )
    first = ask(prompts, [temperature, 0.0, 0.3])
    second = ask([prompts[0], *others[1:]], [temperature, 0.9, 0.0])
    assert first.tokens[0] == second.tokens[0]
    assert first.commit_steps[0] == second.commit_steps[0]
    assert first.nfe[0] == second.nfe[0]


@pytest.mark.parametrize(("kind", "cache"), [("plain", ONE_LENGTH), slow("plain", "prefix"), ("shifted", "dual")])
def test_a_row_that_waits_at_its_blocks_edge_is_not_cut(kind, cache):
    """Truncation as published looks far ahead in every pass; those that only its neighbours need must not cut a row."""
    end = dflax.EndOfText((2,), stop=False, truncate=True, committed=False, floor=0.0, in_order=False, anywhere=True)
    options = {"end_of_text": end, "extrapolation": None}
    prompts = [[5, 0, 0, 4, 2, 3, 0], [5, 2, 5, 4], [4, 1, 4, 0, 3, 2, 5], [1, 5, 0], [3, 3], [5, 1, 5, 4, 5, 1, 4]]
    batch = answer(kind, prompts, policies.Threshold(0.4), cache, **options)
    assert len(set(batch.nfe)) > 1
    for row, prompt in enumerate(prompts):
        alone = answer(kind, [prompt] * len(prompts), policies.Threshold(0.4), cache, **options)
        assert (batch.tokens[row], batch.commit_steps[row], batch.nfe[row]) == (
            alone.tokens[0],
            alone.commit_steps[0],
            alone.nfe[0],
        ), row


def test_a_predicted_end_in_order_is_not_hidden_by_a_surer_one_far_behind():
    end = dflax.EndOfText((2,), stop=False, truncate=True, anywhere=True)
    session = prepare(MODELS["plain"], [[1, 2]], GEN, BLOCK, policy=policies.Threshold(2.0), end_of_text=end)
    state = jax.jit(enter, static_argnums=(1, 3))(session.state, session.plan, session.request, MASK)
    block, nothing = active_block(state, BLOCK, MASK), jnp.zeros((1, BLOCK), jnp.int32)
    predicted = jnp.full(state.tokens.shape, -1.0).at[0, 2].set(0.93).at[0, 9].set(0.99)
    cut = lambda p: finish(
        state,
        View(jnp.zeros((1, BLOCK, 7)), p),
        block,
        nothing,
        nothing,
        nothing > 0,
        nothing + 0.0,
        session.request,
        MASK,
    )
    assert cut(predicted).length.tolist() == [3]
    assert cut(predicted.at[0, 2].set(0.5)).length.tolist() == [2 + GEN]  # neither: one is unsure, one is not next


@pytest.mark.parametrize(("kind", "cache"), [("shifted", "dual"), slow("plain", ONE_LENGTH), slow("plain", "none")])
@few
@given(prompts=PROMPTS, ends=st.lists(st.sampled_from(TOKENS), min_size=3, max_size=3))
def test_alone_as_in_a_batch(kind, cache, prompts, ends):
    """Every row with an end token of its own (the loop takes them by row, `denoise` gives all the same), and its number for the noise."""

    def ask(*rows):
        session = prepare(
            MODELS[kind], [prompts[row] for row in rows], GEN, BLOCK, policy=policies.Threshold(0.5), cache=cache,
            end_of_text=dflax.EndOfText((0,)), temperature=0.7, index=rows,
        )  # fmt: skip
        params = session.request.params
        params = replace(params, stop_ids=params.stop_ids.at[:, 0].set(jnp.array([ends[row] for row in rows])))
        session.request = replace(session.request, params=params)
        return session.advance()

    batch = ask(0, 1, 2)
    for row in range(3):
        alone = ask(row)
        for name in OF_A_ROW:
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(batch, name)[row], name)


def test_counting_empty_passes_changes_no_token():
    prompts = [[1, 2, 3, 4], [4], [3, 3, 0, 5]]
    ask = lambda counted: answer(
        "plain", prompts, policies.Threshold(0.1), dflax.Cache("dual", count_empty_pass=counted), temperature=0.9
    )
    plain, counted = ask(False), ask(True)
    assert counted.tokens == plain.tokens
    assert sum(counted.nfe) > sum(plain.nfe)


def test_an_unguided_row_among_guided_ones_is_as_it_is_alone():
    prompts = [[1, 2, 3, 4], [4], [3, 3, 0, 5]]
    batch = answer("shifted", prompts, policies.Threshold(0.5), "dual", cfg_scale=[0.0, 1.5, 0.0])
    plain = answer("shifted", prompts, policies.Threshold(0.5), "dual")
    for row in (0, 2):
        assert (batch.tokens[row], batch.commit_steps[row]) == (plain.tokens[row], plain.commit_steps[row])


@pytest.mark.parametrize(
    ("kind", "cache", "guidance"),
    [
        ("plain", "dual", 0.0), ("shifted", "prefix", 0.0), slow("plain", "prefix", 1.5), slow("shifted", "dual", 1.5),
        slow("shifted", "dual", 0.0), slow("plain", "prefix", 0.0),
    ],
)  # fmt: skip
@few
@given(
    prompts=PROMPTS,
    steps=st.integers(0, GEN - 1),
    left=st.lists(st.integers(1, GEN), min_size=3, max_size=3),
    draft=st.sampled_from([-1, *TOKENS]),
)
def test_a_short_pass_just_after_the_full_one_equals_it(kind, cache, guidance, prompts, steps, left, draft):
    """On an unchanged canvas, at the active blocks; of each row at most `left` columns are left, and a masked slot shows a draft."""
    model = MODELS[kind]
    session = prepare(model, prompts, GEN, BLOCK, cache=cache, cfg_scale=guidance)
    plan, request = session.plan, session.request
    step = jax.jit(full_step, static_argnums=2)
    state = session.state
    for _ in range(steps):
        state = step(model.module, state, plan, request)
    state = jax.jit(enter, static_argnums=(1, 3))(state, plan, request, MASK)
    block = active_block(state, BLOCK, MASK)
    first, drafted = block.column[:, 0], jnp.argmax(block.masked, axis=1)
    state = replace(
        state,
        length=jnp.minimum(state.length, first + jnp.array(left, jnp.int32)),
        shown=jnp.full_like(state.tokens, -1).at[jnp.arange(3), first + drafted].set(draft),
    )
    view, kept = jax.jit(full_pass, static_argnums=2)(model.module, state, plan, request)
    state = replace(state, cache=kept, cached_length=state.length)
    short = jax.jit(short_pass, static_argnums=2)(model.module, state, plan, request)
    live = np.asarray(active_block(state, BLOCK, MASK).live)
    assert live.sum(axis=1).tolist() == np.minimum(left, BLOCK).tolist()
    np.testing.assert_allclose(np.asarray(short.logits)[live], np.asarray(view.logits)[live], atol=2e-5)


@few
@given(prompts=PROMPTS, cut=st.integers(1, GEN - BLOCK))
def test_a_stale_suffix_is_seen_until_the_next_full_pass(prompts, cut):
    """A cut behind the active block changes nothing of a short pass then, and something otherwise."""
    model = MODELS["plain"]
    step, short = (jax.jit(function, static_argnums=2) for function in (full_step, short_pass))

    def logits(stale, cut, refreshed=False):
        session = prepare(model, prompts, GEN, BLOCK, cache=dflax.Cache("dual", stale_suffix=stale))
        state = step(model.module, session.state, session.plan, session.request)
        state = replace(state, length=state.length - cut)
        if refreshed:
            state = step(model.module, state, session.plan, session.request)
        return np.asarray(short(model.module, state, session.plan, session.request).logits)

    whole = logits(False, 0)
    np.testing.assert_array_equal(logits(True, 0), whole)
    np.testing.assert_array_equal(logits(True, cut), whole)
    assert np.all(np.abs(logits(False, cut) - whole).max(axis=(1, 2)) > 1e-4)
    np.testing.assert_array_equal(logits(True, cut, refreshed=True), logits(False, cut, refreshed=True))


@pytest.mark.parametrize("cache", ["dual", slow("none"), slow(ONE_LENGTH)])
@few
@given(prompts=PROMPTS, end=st.sampled_from(TOKENS), passes=st.integers(1, 3))
def test_a_finished_row_never_changes_again(cache, prompts, end, passes):
    """Nor is anything counted of it, while its neighbours go on."""
    options = {"policy": policies.Threshold(0.4), "cache": cache, "end_of_text": dflax.EndOfText((end,))}
    session = prepare(MODELS["plain"], prompts, GEN, BLOCK, **options)
    before = session.advance(passes)
    while not before.done.all():
        after = session.advance(passes)
        assert after.done[before.done].all()
        for name in OF_A_ROW:
            np.testing.assert_array_equal(getattr(after, name)[before.done], getattr(before, name)[before.done], name)
        before = after


@pytest.mark.parametrize("cache", ["dual", slow("none"), slow(ONE_LENGTH)])
def test_finished_rows_never_change_and_pieces_add_up(cache):
    prompts = [[1, 2, 3], [4], [3, 3, 0, 5, 1, 1]]
    asked = {"policy": policies.Threshold(0.4), "cache": cache, "end_of_text": dflax.EndOfText((2,))}
    whole = dflax.denoise(MODELS["plain"], prompts, GEN, BLOCK, **asked)
    for passes in (1, 2):
        answers = [{} for _ in prompts]
        last = {}
        for piece in dflax.stream(MODELS["plain"], prompts, GEN, BLOCK, **asked, passes_per_call=passes):
            assert piece.row not in last, "a finished row wrote again"
            assert piece.positions == sorted(piece.positions)
            assert not set(piece.positions) & set(answers[piece.row]), "a written token was written again"
            answers[piece.row] |= dict(zip(piece.positions, piece.tokens, strict=True))
            answers[piece.row] = {at: token for at, token in answers[piece.row].items() if at < piece.length}
            if piece.done:
                last[piece.row] = piece.nfe
        assert [last[row] for row in range(3)] == whole.nfe
        for tokens, steps, got in zip(whole.tokens, whole.commit_steps, answers, strict=True):
            assert got == {i: token for i, (token, step) in enumerate(zip(tokens, steps, strict=True)) if step >= 0}


def test_an_early_stop_keeps_the_answer_and_saves_passes():
    prompts = [[1, 2, 3], [4], [3, 3, 0, 5, 1, 1]]
    whole = answer("plain", prompts, policies.Schedule())
    for end in TOKENS:
        short = answer("plain", prompts, policies.Schedule(), end_of_text=dflax.EndOfText((end,)))
        for long, cut, steps, nfe in zip(whole.tokens, short.tokens, short.commit_steps, short.nfe, strict=True):
            n = long.index(end) + 1 if end in long else GEN
            assert cut == long[:n] + [end] * (GEN - n)
            assert steps[n:] == [-1] * (GEN - n)
            assert nfe == max(steps) + 1


def test_switches_for_end_tokens():
    prompts = [[1, 2, 3], [4], [3, 3, 0, 5, 1, 1]]
    plain = answer("plain", prompts, policies.Schedule())
    first = [tokens[steps.index(0)] for tokens, steps in zip(plain.tokens, plain.commit_steps, strict=True)]
    end = max(set(first), key=first.count)
    forbidden = answer("plain", prompts, policies.Schedule(), end_of_text=dflax.EndOfText((end,), forbid=True))
    assert not any(end in tokens for tokens in forbidden.tokens)
    delayed = answer("plain", prompts, policies.Schedule(), end_of_text=dflax.EndOfText((end,), stop=False, delay=True))
    for tokens, steps, before in zip(delayed.tokens, delayed.commit_steps, first, strict=True):
        assert before != end or tokens[steps.index(0)] != end


def test_seeds():
    prompts = [[1, 2, 3]] * 3
    draw = lambda seed: answer("plain", prompts, policies.Schedule(), temperature=1.0, seed=seed).tokens
    assert draw(1) == draw(1) != draw(2)
    assert len({tuple(tokens) for tokens in draw(1)}) == 3  # prompts of one batch draw apart


@pytest.mark.parametrize("rule", ["entropy", slow("origin")])
def test_rules_that_draw_write_everything(rule):
    out = answer("shifted", [[1, 2, 3], [4], [5, 0]], policies.Schedule(rule, alg_temp=0.3), temperature=0.5, top_p=0.9)
    assert all(-1 not in steps for steps in out.commit_steps)
    for nfe, steps in zip(
        out.nfe, out.commit_steps, strict=True
    ):  # by chance a block may be complete before its last step
        assert nfe == max(steps) + 1 <= GEN


@pytest.mark.parametrize("switch", [{"scope": "answer"}, {"signal": "margin"}])
def test_either_switch_of_the_look_ahead_makes_it_bolder(switch):
    """Complete blocks count as coverage; the gap to the second logit is at least the logit of the probability."""
    prompts = [[token] * n for token in TOKENS for n in (1, 2, 5)]
    usual = dflax.ConfidenceExtrapolation(  # follows every rise
        coverage=0.3, z=0.0, min_confidence=0.7, min_observations=1,
        velocity_noise=1.0, observation_noise=0.05, initial_velocity_variance=1.0,
    )  # fmt: skip
    ask = lambda ahead: answer("plain", prompts, policies.Threshold(0.7), extrapolation=ahead)
    plain, bold = ask(usual), ask(replace(usual, **switch))
    assert sum(bold.nfe) < sum(plain.nfe)
    if "scope" in switch:  # nothing is complete before the first block
        assert [steps[:BLOCK] for steps in bold.commit_steps] == [steps[:BLOCK] for steps in plain.commit_steps]
