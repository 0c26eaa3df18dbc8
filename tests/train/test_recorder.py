"""What a recording says of a step is what the model says of that step's canvas, and rules that know the end reach it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dflax
from dflax.config import ControllerConfig
from dflax.infer.learned import TSPD
from dflax.models.controller import build
from dflax.train.recorder import Forced, Greedy, record, record_batch
from tests.infer.test_policies import observation, slot_keys
from tests.infer.tiny import random_model, target_config

VOCAB, MASK, GEN, BLOCK = 13, 12, 16, 8
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


@pytest.fixture(scope="module")
def model():
    return random_model(target_config("llada", vocab_size=VOCAB, head_dim=4, bidirectional=True, mask_token_id=MASK), 3)


@pytest.fixture(scope="module")
def plain(model):
    return record_batch(model, PROMPTS, len(PROMPTS), GEN, BLOCK)


def canvases(traces, row):
    """(block, step, canvas before that step) of a plain recording."""
    canvas = [*PROMPTS[row], *[MASK] * GEN]
    start = len(PROMPTS[row])
    for block in range(GEN // BLOCK):
        for step in range(BLOCK):
            masked = traces.masked[row, block, step]
            for slot in range(BLOCK):
                at = start + block * BLOCK + slot
                canvas[at] = MASK if masked[slot] else int(traces.final[row, block, slot])
            yield block, step, list(canvas)
        canvas[start + block * BLOCK : start + (block + 1) * BLOCK] = traces.final[row, block].tolist()


def test_every_step_is_recorded_as_it_was(model, plain):
    traces = plain["standard"]
    out = dflax.denoise(model, PROMPTS, gen_length=GEN, block_length=BLOCK)
    np.testing.assert_array_equal(traces.final.reshape(len(PROMPTS), GEN), out.tokens)
    np.testing.assert_array_equal(traces.masked.sum(axis=3), np.broadcast_to(np.arange(BLOCK, 0, -1), (3, 2, BLOCK)))
    row = 1
    places, rows = zip(*[((block, step), canvas) for block, step, canvas in canvases(traces, row)], strict=True)
    logits = np.asarray(model.logits(np.array(rows)))
    for (block, step), shown in zip(places, logits, strict=True):
        seen = shown[len(PROMPTS[row]) + block * BLOCK :][:BLOCK]
        p = np.asarray(jax.nn.softmax(seen, axis=-1), np.float64)
        token = seen[:, :MASK].argmax(axis=-1)
        at = (row, block, step)
        np.testing.assert_array_equal(traces.token[at], token)
        np.testing.assert_allclose(traces.confidence[at], np.take_along_axis(p, token[:, None], 1)[:, 0], rtol=1e-4)
        np.testing.assert_allclose(traces.entropy[at], -(p * np.log(p)).sum(axis=-1) / np.log(VOCAB), rtol=1e-3)
        others = [
            np.delete(slot, best).max() for slot, best in zip(seen, token, strict=True)
        ]  # the mask token's among them
        lead = seen[:, :MASK].max(axis=-1) - others
        np.testing.assert_allclose(traces.margin[at], lead, rtol=1e-3, atol=1e-4)


def test_the_greedy_rule_commits_what_agrees(plain):
    traces = plain["greedy"]
    np.testing.assert_array_equal(traces.final, plain["standard"].final)
    assert 1 <= traces.passes() < BLOCK
    for row, block in np.ndindex(*traces.final.shape[:2]):
        shown, token = traces.masked[row, block], traces.token[row, block]
        agrees = shown & (token == traces.final[row, block])
        for s in range(int(shown.any(axis=1).sum()) - 1):
            assert agrees[s].any()
            np.testing.assert_array_equal(shown[s + 1], shown[s] & ~agrees[s])


def test_the_greedy_rule_fills_a_block_that_stands_still():
    """Row 0: two of three agree, then nothing changes. Row 1: nothing agrees. Row 2: the candidates change, and agree one by one."""
    rule = Greedy(jnp.array([[[1, 2, 3]], [[1, 2, 3]], [[1, 2, 3]]], jnp.int32))
    everything = jnp.ones((3, 3), bool)
    state = rule.reset(rule.init(3, 3, VOCAB), everything[:, 0])

    def step(state, tokens, masked):
        seen = observation(jnp.ones((3, 3)), masked, token=jnp.array(tokens, jnp.int32))
        return rule.step(state, seen, slot_keys(3, 3))

    state, token, commit = step(state, [[1, 2, 9], [9, 9, 9], [1, 9, 9]], everything)
    np.testing.assert_array_equal(commit, [[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(token[1], [1, 2, 3])
    state, token, commit = step(
        state, [[1, 2, 9], [1, 2, 3], [1, 9, 3]], jnp.array([[0, 0, 1], [0, 0, 0], [0, 1, 1]]) > 0
    )
    np.testing.assert_array_equal(commit, [[0, 0, 1], [0, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(token[0], [1, 2, 3])
    np.testing.assert_array_equal(token[2], [1, 9, 3])


def test_rules_that_know_the_end_write_it(model, plain):
    reference = jnp.asarray(plain["standard"].final)
    controller = build(ControllerConfig(block_length=BLOCK), nnx.Rngs(0))
    for rule in (Greedy(reference), Forced(TSPD.of(controller, threshold=0.0), reference)):
        written, seen = record(model, PROMPTS, GEN, BLOCK, rule)
        np.testing.assert_array_equal(written, reference)
    assert seen.masked.any(axis=3).sum(axis=2).max() == 1  # a gate that is always open


def test_a_short_batch_is_filled_up(model, plain):
    short = record_batch(model, PROMPTS[:2], len(PROMPTS), GEN, BLOCK)
    for kind, traces in short.items():
        np.testing.assert_array_equal(traces.final, plain[kind].final[:2])
        np.testing.assert_array_equal(traces.token, plain[kind].token[:2])
