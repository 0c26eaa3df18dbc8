"""The rules as pure functions against recorded rows, and what a policy may and may not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflax import policies
from dflax.errors import DflaxError
from dflax.infer.candidates import candidates, margin
from dflax.infer.policies import Observation, at_least_one, dream_quota, linear_quota, ranks
from dflax.infer.sampling import Noise, SamplingParams, keys
from tests.golden import load_case

FAST, RULES = load_case("llada_fast").expected, load_case("sampling_rules")


def observation(confidence, masked, logits=None, **fields):
    """What a policy sees of rows whose look-ahead is off; fields: of Observation."""
    confidence, masked = jnp.asarray(confidence, jnp.float32), jnp.asarray(masked)
    B, T = confidence.shape
    row = lambda value: jnp.full((B,), value, jnp.int32)
    values = {
        "logits": jnp.zeros((B, T, 3)) if logits is None else logits, "token": jnp.zeros((B, T), jnp.int32), "raw": confidence,
        "confidence": confidence, "uncertainty": jnp.zeros((B, T)), "masked": masked, "live": jnp.ones((B, T), bool),
        "tokens": jnp.zeros((B, T), jnp.int32), "step": row(0), "steps": row(4), "entry": row(T), "quota": row(1),
        "progress": jnp.zeros((B,)), "spent": jnp.zeros((B,)), "is_end": jnp.zeros((B, T), bool),
    }  # fmt: skip
    return Observation(**(values | fields))


def slot_keys(B, T):
    params = SamplingParams.build(B, 10)
    return keys(params.seed, params.index, jnp.zeros((B, 1), jnp.int32) + jnp.arange(T, dtype=jnp.int32), Noise.POLICY)


def committed(policy, seen):
    B, T = seen.masked.shape
    state = policy.init(B, T, seen.logits.shape[-1])
    return np.asarray(policy.step(state, seen, slot_keys(B, T))[2])


@pytest.mark.parametrize(
    ("policy", "array"),
    [
        (policies.Threshold(0.9), "sel_threshold_0.9"),
        (policies.Threshold(0.7), "sel_threshold_0.7"),
        (policies.Factor(1.0), "selrule_factor_1.0"),
        (policies.Factor(0.75), "selrule_factor_0.75"),
        (policies.Factor(1.0, one_more=True), "sel_factor_1.0"),
        (policies.Factor(0.75, one_more=True), "sel_factor_0.75"),
        (policies.Frechet(0.25), "sel_frechet_0.25"),
        (policies.Frechet(0.0), "sel_frechet_0.0"),
    ],
)
def test_recorded_selections(policy, array):
    seen = observation(FAST["sel_confidence"], FAST["sel_mask"])
    np.testing.assert_array_equal(committed(policy, seen), FAST[array])


def test_the_schedule_takes_its_number():
    seen = observation(FAST["sel_confidence"], FAST["sel_mask"], quota=jnp.full((40,), 3, jnp.int32))
    np.testing.assert_array_equal(committed(policies.Schedule(), seen), FAST["sel_topk_3"])
    by_chance = committed(policies.Schedule("random"), seen)
    np.testing.assert_array_equal(by_chance.sum(1), FAST["sel_topk_3"].sum(1))
    assert not (by_chance & ~FAST["sel_mask"]).any()
    assert (by_chance != FAST["sel_topk_3"]).any()


@pytest.mark.parametrize(("masks", "steps"), [(32, 7), (10, 4), (8, 8), (3, 5)])
def test_linear_schedule(masks, steps):
    got = linear_quota(jnp.full((steps,), masks, jnp.int32), jnp.full((steps,), steps, jnp.int32), jnp.arange(steps))
    RULES.check(f"schedule_m{masks}_s{steps}", got)


@pytest.mark.parametrize(("masks", "steps"), [(24, 10), (30, 7), (16, 16)])
def test_the_schedule_of_dream(masks, steps):
    left, got = masks, []
    for i in range(steps):
        row = lambda value: jnp.array([value], jnp.int32)
        got.append(int(dream_quota(row(left), row(steps), row(i), 1e-3)[0]))
        left -= got[-1]
    RULES.check(f"dream_schedule_m{masks}_s{steps}", np.array(got))


@pytest.mark.parametrize("name", ["dream0", "dream1", "dream2", "dream3", "dream4"])
def test_scores_of_dream(name):
    told = next(run for run in RULES.info["dream"] if run["name"] == name)
    logits = jnp.asarray(RULES.expected["dream_logits"])[:, None]
    params = SamplingParams.build(12, 30, top_p=told.get("top_p"), top_k=told.get("top_k"))
    seen = candidates(logits, params, slot_keys(12, 1), mask_token_id=-1, tempered=True)
    np.testing.assert_array_equal(seen.token[:, 0], RULES.expected[f"{name}_tokens"])
    rule = "topk_margin" if told.get("margin_confidence") else "entropy" if told.get("neg_entropy") else "maskgit_plus"
    shown = observation(seen.raw, np.ones((12, 1), bool), logits=seen.logits)
    np.testing.assert_allclose(
        policies.Schedule(rule)._score(shown)[:, 0], RULES.expected[f"{name}_confidence"], 1e-4, 1e-5
    )


def test_gumbel_choice_is_that_of_the_product_form():
    """argmax of exp(logit) / (-ln u)^T in float64 is the argmax of logit / T + g, which is what a draw takes."""
    noise = -np.log(-np.log(RULES.expected["gumbel_uniforms"])).astype(np.float32)
    for i, temperature in enumerate(RULES.info["gumbel_temperatures"]):
        scaled = jax.nn.log_softmax(RULES.expected["gumbel_logits"] / temperature)
        RULES.check(f"gumbel_tokens_{i}", np.argmax(scaled + noise, axis=-1).astype(np.int32))


def test_the_mask_token_is_no_candidate_but_takes_its_share():
    logits = jnp.log(jnp.array([[[0.1, 0.6, 0.3]]]))
    for temperature in (0.0, 1.0):
        params = SamplingParams.build(1, 3, temperature=temperature, top_k=1)
        seen = candidates(logits, params, slot_keys(1, 1), mask_token_id=1)
        assert int(seen.token[0, 0]) == 2
        assert float(seen.raw[0, 0]) == pytest.approx(0.3)


def test_forced_tokens_and_ties_go_by_the_raw_confidence():
    masked = jnp.array([[True, True, True, False]])
    raw, ahead = jnp.array([[0.2, 0.5, 0.4, 0.9]]), jnp.array([[0.8, 0.8, 0.8, 0.9]])
    assert ranks(ahead, masked, raw).tolist() == [[2, 0, 1, 3]]
    assert at_least_one(jnp.zeros((1, 4), bool), raw, masked).tolist() == [[False, True, False, False]]
    seen = observation(ahead, masked, raw=raw)
    assert committed(policies.Threshold(0.9), seen).tolist() == [[False, True, False, False]]
    assert committed(policies.Threshold(0.7), seen).tolist() == [[True, True, True, False]]
    assert not committed(policies.Threshold(0.0), observation(ahead, jnp.zeros((1, 4), bool))).any()
    # Rules that count take none here: the forced slot is the one of highest raw confidence, whatever the look-ahead raised.
    seen = observation([[0.92, 0.6, 0.1]], [[True, True, True]], raw=jnp.array([[0.5, 0.6, 0.1]]), quota=jnp.array([0]))
    for policy in (
        policies.Factor(0.1),
        policies.Factor(0.1, one_more=True),
        policies.Frechet(0.99),
        policies.Prophet(9, 9, 9),
    ):
        assert committed(policy, seen).tolist() == [[False, True, False]], policy


def test_not_even_a_nan_ranks_behind_a_written_slot():
    """A model that overflows writes nonsense, but the loop ends."""
    masked = jnp.array([[False, True, False, True]])
    nan = jnp.full((1, 4), jnp.nan)
    assert (ranks(nan, masked, nan) < 2).tolist() == masked.tolist()
    seen = observation(nan, masked, raw=nan)
    for policy in (policies.Schedule(), policies.Threshold(0.9), policies.Factor(), policies.Frechet()):
        assert committed(policy, seen).sum() == 1, policy


def test_credit_by_hand():
    """The decay comes first, then the step's best token earns p^0.2, and the logits gain 0.7 ln(1 + credit)."""
    policy, masked = policies.Credit(), jnp.array([[True, False]])
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]]]))
    state, _ = policy.refine(policy.init(1, 2, 3), logits, masked)
    state, fused = policy.refine(state, logits[:, :, ::-1], masked)
    credit = np.zeros((1, 2, 3), np.float32)
    credit[0, 0] = [0.8 * 0.5**0.2, 0.0, 0.5**0.2]
    np.testing.assert_allclose(state, credit, rtol=1e-5)
    np.testing.assert_allclose(fused, logits[:, :, ::-1] + 0.7 * np.log1p(credit), rtol=1e-5)
    np.testing.assert_array_equal(policy.reset(state, jnp.array([True])), 0)


def test_prophet_exits_when_it_is_sure():
    logits = jnp.array([[[9.0, 3.0, 0.0], [8.0, 2.0, 1.0]]])
    seen = observation([[0.9, 0.8]], [[True, True]], logits=logits)
    assert committed(policies.Prophet(), seen).tolist() == [
        [True, False]
    ]  # a gap of 6 is too little in the first third
    seen = observation([[0.9, 0.8]], [[True, True]], logits=logits, progress=jnp.array([0.5]))
    assert committed(policies.Prophet(), seen).tolist() == [[True, True]]


def test_a_mask_token_that_is_ahead_makes_nobody_sure():
    """The candidate is the best of the others (index 0), and 9 logits behind."""
    logits = jnp.array([[[0.0, -1.0, 9.0], [0.0, -1.0, 9.0]]])
    assert margin(logits, jnp.zeros((1, 2), jnp.int32)).tolist() == [[-9.0, -9.0]]
    seen = observation([[0.9, 0.8]], [[True, True]], logits=logits, progress=jnp.array([0.9]))
    assert committed(policies.Prophet(), seen).tolist() == [[True, False]]


def test_draws_by_alg_temp_follow_the_scores():
    """2,000 rows draw one of three slots: softmax(score / 0.5)."""
    n, p = 2000, np.array([0.2, 0.5, 0.8])
    seen = observation(np.tile(p, (n, 1)), np.ones((n, 3), bool), steps=jnp.full((n,), 2, jnp.int32))
    chosen = committed(policies.Schedule("maskgit_plus", alg_temp=0.5), seen)
    assert (chosen.sum(1) == 1).all()
    want = np.exp(p / 0.5) / np.exp(p / 0.5).sum()
    np.testing.assert_allclose(chosen.mean(0), want, atol=5 * 0.5 / np.sqrt(n))


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        (policies.Threshold(-0.1), "threshold"),
        (policies.Factor("much"), "factor"),
        (policies.Frechet(2), "margin"),
        (policies.Credit(decay=1.5), "decay"),
        (policies.Prophet(late=True), "late"),
        (policies.Schedule("entropy", alg_temp=-1), "alg_temp"),
    ],
)
def test_values_that_cannot_be_meant(policy, word):
    with pytest.raises(DflaxError, match=word):
        policy.check()
