"""TSPD and Learn2PD as policies: what the networks say, the forced slot, memories, and that weights are no constants."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import dflax
from dflax.config import ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.infer.extrapolation import left_coverage
from dflax.infer.learned import TSPD, Learn2PD, accept
from dflax.infer.policies import Observation
from dflax.models.controller import Trail, build, neighbourhood, normalised_entropy
from golden import load_case

B, T, V = 2, 8, 11
CONFIG = ControllerConfig(block_length=T)
KEY = jax.vmap(jax.vmap(jax.random.key))(jnp.zeros((B, T), jnp.uint32))
step = jax.jit(lambda policy, state, seen: policy.step(state, seen, KEY))


def seen(seed=0, masked=None):
    logits = 3 * np.random.default_rng(seed).normal(size=(B, T, V)).astype(np.float32)
    probs = np.asarray(jax.nn.softmax(logits))
    row, slots = jnp.zeros(B, jnp.int32), jnp.zeros((B, T), jnp.int32)
    live = jnp.ones((B, T), bool)
    return Observation(
        logits=jnp.asarray(logits), token=jnp.asarray(probs.argmax(-1), jnp.int32), raw=jnp.asarray(probs.max(-1)),
        confidence=jnp.asarray(probs.max(-1)), uncertainty=slots + 0.0, masked=live if masked is None else jnp.asarray(masked),
        live=live, tokens=slots, step=row, steps=row + T, entry=row + T, quota=row + 1, progress=row + 0.0, spent=row + 0.0,
        is_end=~live,
    )  # fmt: skip


def observations(steps=4):
    """Slots disappear one by one."""
    return [seen(k, np.broadcast_to(np.arange(T) >= k, (B, T))) for k in range(steps)]


@pytest.fixture(params=[0, 2], ids=["by itself", "with neighbours"])
def config(request):
    return replace(CONFIG, neighbours=request.param)


def judged(controller):
    """Logits of the controller over the observations, by its parts."""
    trail, memory = Trail.empty((B, T)), controller.empty_memory((B, T))
    position = jnp.broadcast_to(jnp.arange(T) / (T - 1), (B, T)).astype(jnp.float32)
    out = []
    for o in observations():
        entropy = normalised_entropy(o.logits)
        trail, x = trail.features(0.25, o.confidence, o.raw, entropy, position, o.uncertainty)
        around = neighbourhood(controller.config.neighbours, o.raw, entropy, o.masked, left_coverage(~o.masked))
        z, memory = controller(controller.standardise(jnp.concatenate([x, around], axis=-1)), memory)
        out.append(z)
    return np.stack(out)


def test_tspd_fixes_what_the_controller_says_and_the_best_slot(config):
    controller = build(config, nnx.Rngs(3))
    controller.head.bias[...] = jnp.array([-np.median(judged(controller))])  # so that the gate says yes and no
    policy = TSPD.of(controller)
    state = policy.init(B, T, V)
    fixed = 0
    for o, z in zip(observations(), judged(controller), strict=True):
        state, token, commit = step(policy, state, o)
        gate = np.asarray((z >= 0) & o.masked)
        forced = np.asarray(o.raw == jnp.max(jnp.where(o.masked, o.raw, -1), axis=1, keepdims=True))
        np.testing.assert_array_equal(token, o.token)
        np.testing.assert_array_equal(commit, gate | forced)
        assert np.all(np.asarray(commit)[~np.asarray(o.masked)] == 0)
        fixed += int(gate.sum())
    assert 10 < fixed < 42


def test_a_gate_that_never_opens_is_plain_decoding():
    policy = TSPD.of(build(CONFIG, nnx.Rngs(3)), threshold=2.0)
    state = policy.init(B, T, V)
    for o in observations():
        state, _, commit = step(policy, state, o)
        np.testing.assert_array_equal(np.sum(commit, axis=1), 1)
    other = Learn2PD.of(build(FilterConfig(T), nnx.Rngs(0)), threshold=2.0)
    np.testing.assert_array_equal(np.sum(step(other, other.init(B, T, V), seen())[2], axis=1), 1)


def test_a_row_that_enters_a_block_forgets_and_the_other_does_not():
    policy = TSPD.of(build(CONFIG, nnx.Rngs(3)))
    state = policy.init(B, T, V)
    for o in observations():
        state, _, _ = step(policy, state, o)
    after = policy.reset(state, jnp.array([False, True]))
    fresh = policy.init(B, T, V)
    for new, old, empty in zip(*map(jax.tree.leaves, (after, state, fresh)), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
        np.testing.assert_array_equal(new[1], empty[1])
    assert float(jnp.abs(state.memory).max()) > 0.01


def test_weights_and_thresholds_compile_nothing():
    calls = []
    counted = jax.jit(lambda policy, state, o: (calls.append(0), policy.step(state, o, KEY))[1])
    for seed in range(3):
        policy = TSPD.of(build(CONFIG, nnx.Rngs(seed)), threshold=0.3 + 0.1 * seed)
        counted(policy, policy.init(B, T, V), seen())
    assert len(calls) == 1


def test_another_block_length_is_refused_by_name():
    with pytest.raises(DflaxError, match="trained for blocks of 8 tokens, but block_length is 16"):
        TSPD.of(build(CONFIG, nnx.Rngs(0))).init(B, 16, V)
    with pytest.raises(DflaxError, match="the filter was trained for blocks of 8 tokens, but block_length is 16"):
        Learn2PD.of(build(FilterConfig(T), nnx.Rngs(0))).init(B, 16, V)
    with pytest.raises(DflaxError, match="threshold of the policy is -1"):
        replace(TSPD.of(build(CONFIG, nnx.Rngs(0))), threshold=-1).check()
    other = TSPD.of(build(CONFIG, nnx.Rngs(0)))
    object.__setattr__(other, "remask", "all")  # as a caller without type checks would make it
    with pytest.raises(DflaxError, match="remask is 'all'; it must be one of unfixed, representative"):
        other.check()


def test_learn2pd_accepts_by_the_filter_and_forces_the_best():
    module = build(FilterConfig(T), nnx.Rngs(1))
    policy = Learn2PD.of(module, threshold=0.55)
    o = seen(2, np.broadcast_to(np.arange(T) % 3 > 0, (B, T)))
    o = replace(o, live=o.live.at[1, 5:].set(False), masked=o.masked.at[1, 5:].set(False))
    _, _, commit = step(policy, (), o)
    p = jax.nn.sigmoid(module(jnp.where(o.live, o.confidence, 0)))
    forced = o.raw == jnp.max(jnp.where(o.masked, o.raw, -1), axis=1, keepdims=True)
    np.testing.assert_array_equal(commit, o.masked & ((p > 0.55) | forced))
    assert 2 < int(commit.sum()) < int(o.masked.sum())


@pytest.mark.parametrize("name", [pytest.param("l2p", marks=pytest.mark.slow), "l2p_eot"])
def test_recorded_decoding_with_a_filter(name):
    """The published loop: tokens and passes, with and without cutting at a predicted end of text."""
    case = load_case("learn2pd")
    run = next(run for run in case.info["runs"] if run["name"] == name)
    leaves = jax.tree.map(jnp.asarray, load_file(case.folder / "filter.safetensors"))
    policy = Learn2PD(leaves, FilterConfig(32), case.info["arguments"]["accept_threshold"])
    end = dflax.EndOfText((1,), stop=False, truncate=True, floor=0.0, in_order=False, anywhere=True)
    out = dflax.denoise(
        dflax.load(case.folder / "model"), case.expected["prompt"].tolist(), 96, 32, policy=policy,
        end_of_text=end if name == "l2p_eot" else None,
    )  # fmt: skip
    want = case.expected[f"{name}_output_ids"][case.expected["prompt"].shape[1] :].tolist()
    assert out.tokens[0] == want + [1] * (96 - len(want))
    assert out.nfe == [run["forward_calls"]]


def test_recorded_acceptance():
    case = load_case("learn2pd")
    threshold = case.info["arguments"]["accept_threshold"]
    masked = jnp.asarray(case.expected["filter_mask"])
    case.check("filter_accept", accept(jnp.asarray(case.expected["filter_outputs"]), masked, threshold))
