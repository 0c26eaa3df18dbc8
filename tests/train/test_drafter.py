"""The training objective against reference values, and what it must not see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dflax
from dflax.cache import KVCache
from dflax.errors import DflaxError
from dflax.kernels_pallas.block_attention import reference
from dflax.models import drafter as drafter_module
from dflax.models import params
from dflax.models.drafter import Drafter, greedy_block
from dflax.train import drafter as objective_module
from dflax.train.drafter import (
    Frozen,
    Objective,
    Rows,
    anchor_candidates,
    block_hidden,
    choose_anchors,
    decay_weights,
    dpace_weights,
    frozen_head_loss,
    make_loss,
    objective,
    supervision,
)
from dflax.train.passes import prepared
from tests.golden import load_case

KINDS = {
    "dflash_gamma": Objective(weights="decay", gamma=4.0, chunk=2),
    "dflash_nogamma": Objective(weights="none", chunk=3),
    "dpace": Objective(weights="dpace"),
    "dpace_cumulative_confidence_only": Objective(weights="dpace", dpace_kind="cumulative_confidence"),
    "dpace_continuation_value_only": Objective(weights="dpace", dpace_kind="continuation_value"),
}


def golden_rows(case):
    want = case.expected
    S = want["input_ids"].shape[1]
    return Rows(
        tokens=jnp.asarray(want["input_ids"]),
        loss_mask=jnp.asarray(want["loss_mask"] > 0),
        ctx_start=jnp.zeros((2, S), jnp.int32),
        features=jnp.asarray(want["target_features"]),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_loss_accuracy_and_gradients(layers, kind):
    case = load_case("dflash_train_loss")
    want = case.expected
    if f"{layers}_{kind}_loss" not in want:
        assert layers == "sliding"  # recorded for one kind only
        return
    drafter = dflax.load(case.folder / f"drafter_{layers}")
    frozen = Frozen(jnp.asarray(want["embed_tokens"]), jnp.asarray(want["lm_head"]))
    anchors, keep = jnp.asarray(want["anchors"]), jnp.asarray(want["keep_blocks"])

    def loss(leaves):
        return objective(params.fill(drafter.module, leaves), frozen, golden_rows(case), anchors, keep, 6, KINDS[kind])

    (value, metrics), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params.flatten(drafter.module))
    np.testing.assert_allclose(value, want[f"{layers}_{kind}_loss"], rtol=1e-4)
    np.testing.assert_allclose(metrics["accuracy"], want[f"{layers}_{kind}_accuracy"], rtol=1e-5)
    norms = [np.linalg.norm(np.asarray(gradients[str(name)], np.float64)) for name in want["grad_names"]]
    np.testing.assert_allclose(norms, want[f"{layers}_{kind}_grad_norms"], rtol=1e-3, atol=1e-5)
    if f"{layers}_{kind}_grad_fc" in want:
        np.testing.assert_allclose(gradients["fc.weight"], want[f"{layers}_{kind}_grad_fc"], rtol=1e-3, atol=1e-5)
        q_norm = gradients["layers.0.self_attn.q_norm.weight"]
        np.testing.assert_allclose(q_norm, want[f"{layers}_{kind}_grad_q_norm0"], rtol=1e-3, atol=1e-5)


def spied(monkeypatch, module, name):
    """What `module.name` is called with while it goes on to work: (args, kwargs), in order."""
    original, calls = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append((args, kwargs)) or original(*args, **kwargs))
    return calls


@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_blocks_masks_logits_and_weights(layers, monkeypatch):
    """What goes in, what a query sees, and every array that the loss is made of. (Padding blocks mean nothing, slot 0 is not scored.)"""
    case = load_case("dflash_train_loss")
    want = case.expected
    drafter = dflax.load(case.folder / f"drafter_{layers}")
    config, module = drafter.config, drafter.module
    rows, frozen = golden_rows(case), Frozen(jnp.asarray(want["embed_tokens"]), jnp.asarray(want["lm_head"]))
    anchors, keep = jnp.asarray(want["anchors"]), jnp.asarray(want["keep_blocks"])
    B, N, K, S = 2, 4, 6, rows.tokens.shape[1]
    embedded, seen = (
        spied(monkeypatch, objective_module, "lookup"),
        spied(monkeypatch, drafter_module, "block_attention"),
    )
    hidden = block_hidden(module, frozen, rows, anchors, keep, K)

    ((_, ids), _), *_ = embedded
    np.testing.assert_array_equal(ids.reshape(B, N * K), want["block_input_ids"])
    assert len(seen) == config.num_layers
    for layer, (_, how) in enumerate(seen):
        np.testing.assert_array_equal(how["q_pos"].reshape(B, N * K), want["block_positions"])
        where = how["q_pos"], how["mask"], jnp.full((B, N), K), how["window"]
        two_sided = reference.mask_is_two_sided(how["mask"])
        columns = jnp.arange(S), how["ctx_start"], how["ctx_len"], how["q_pos"], None, how["window"], two_sided
        context, block = reference.visible_context(*columns), reference.visible_block(*where)
        own = jnp.einsum("bnts,nm->bntms", block, jnp.eye(N, dtype=bool)).reshape(B, N, K, N * K)
        mask = want["mask_sliding" if config.window(layer) else "mask_full"].reshape(B, N, K, S + N * K)
        np.testing.assert_array_equal(np.concatenate([context, own], axis=-1)[keep], mask[keep])
    assert {config.window(i) for i in range(config.num_layers)} == ({None} if layers == "full" else {None, 7})

    close = lambda got, array: np.testing.assert_allclose(
        np.asarray(got)[keep], want[f"{layers}_{array}"][:, :, 1:][keep], case.rtol, case.atol, err_msg=array
    )
    close(module.logits(hidden, frozen.head), "logits")
    _, label, trained = (x[..., 1:] for x in supervision(rows, anchors, keep, K))
    flat = label.reshape(-1, 1), jnp.ones((label.size, 1))
    ce = frozen_head_loss(module.logits, hidden.reshape(-1, hidden.shape[-1]), frozen.head, *flat, chunk=7)[0]
    ce = ce.reshape(label.shape)
    close(ce, "cross_entropy")
    for name, how in KINDS.items():
        if f"{layers}_{name}_weights" in want:
            weights = {
                "decay": lambda how: jnp.where(trained, decay_weights(K, how.gamma_for(K)), 0.0),
                "none": lambda how: trained.astype(jnp.float32),
                "dpace": lambda how: dpace_weights(ce, trained, how.dpace_alpha, how.dpace_kind),
            }[how.weights](how)
            close(weights, f"{name}_weights")
            assert not want[f"{layers}_{name}_weights"][:, :, 0].any()


def test_labels_and_supervision():
    case = load_case("dflash_train_loss")
    want = case.expected
    _, label, trained = supervision(
        golden_rows(case), jnp.asarray(want["anchors"]), jnp.asarray(want["keep_blocks"]), 6
    )
    np.testing.assert_array_equal(label, want["targets"])
    np.testing.assert_array_equal(trained, want["supervision_mask"] > 0)


def packed_rows():
    """Two documents in one row: prompt, response, prompt, response."""
    mask = np.array([[0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1]], bool)
    start = np.array([[0] * 6 + [6] * 6 + [12] * 2], np.int32)
    tokens = np.arange(14, dtype=np.int32)[None]
    return Rows(jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(start), jnp.zeros((1, 14, 4)))


def test_text_without_a_prompt_has_no_anchor_at_its_first_token():
    rows = dataclasses.replace(packed_rows(), loss_mask=jnp.ones((1, 14), bool))
    assert np.flatnonzero(anchor_candidates(rows)[0]).tolist() == [1, 2, 3, 4, 7, 8, 9, 10]


def test_anchors_are_candidates_sorted_and_redrawn():
    rows = packed_rows()
    assert np.flatnonzero(anchor_candidates(rows)[0]).tolist() == [2, 3, 4, 9, 10]
    seen = set()
    for seed in range(20):
        anchors, keep = choose_anchors(rows, 3, jax.random.key(seed))
        chosen = np.asarray(anchors[0]).tolist()
        assert keep.all()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= {2, 3, 4, 9, 10}
        seen.add(tuple(chosen))
    assert len(seen) > 5
    anchors, keep = choose_anchors(rows, 8, jax.random.key(0))
    assert keep[0].tolist() == [True] * 5 + [False] * 3
    assert anchors[0, :5].tolist() == [2, 3, 4, 9, 10]


def test_a_block_never_learns_from_the_next_document():
    rows = packed_rows()
    _, label, trained = supervision(rows, jnp.asarray([[4, 10]]), jnp.ones((1, 2), bool), 4)
    assert trained.tolist() == [[[False, True, False, False], [False, True, False, False]]]
    assert label[0, 0, 1] == 5


def test_uniform_blocks_tile_the_response():
    anchors, keep = choose_anchors(packed_rows(), 8, jax.random.key(0), "uniform", block_size=3)
    assert np.asarray(anchors)[np.asarray(keep)].tolist() == [2, 4, 9]


def small(**changes):
    """A fresh drafter of the goldens' shape, its blocks of 6, and a target's part."""
    base = dflax.load(load_case("dflash_train_loss").folder / "drafter_full").config
    config = dataclasses.replace(base, **{"num_layers": 2, "causal": (), "windows": ()} | changes)
    table = jnp.asarray(np.random.default_rng(1).normal(size=(config.vocab_size, config.hidden_size)), jnp.float32)
    return Drafter(config, rngs=nnx.Rngs(0)), Frozen(table, table)


def documents(*lengths):
    """Documents packed into one row; the first four tokens of each are its prompt."""
    total, width = sum(lengths), 3 * 48
    chance = np.random.default_rng(0)
    column = np.concatenate([np.arange(n) for n in lengths])
    tokens, features = chance.integers(0, 88, (1, total)), chance.normal(size=(1, total, width))
    start = (np.arange(total) - column)[None].astype(np.int32)
    return Rows(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(column[None] >= 4),
        jnp.asarray(start),
        jnp.asarray(features, jnp.float32),
    )


@pytest.mark.parametrize("kind", ["dflash", "dflash_fused"])
def test_a_packed_document_is_learned_as_alone(kind):
    """Neither its blocks nor a fused drafter's own context see what is packed before it, and no block learns from what is behind it."""
    drafter, frozen = small(kind=kind)
    packed = documents(9, 15, 8)
    alone = Rows(
        packed.tokens[:, 9:24], packed.loss_mask[:, 9:24], packed.ctx_start[:, 9:24] - 9, packed.features[:, 9:24]
    )
    anchors, keep = jnp.asarray([[4, 8, 13]], jnp.int32), jnp.ones((1, 3), bool)

    def run(rows, anchors):
        hidden = block_hidden(drafter, frozen, rows, anchors, keep, 6)
        return hidden, objective(drafter, frozen, rows, anchors, keep, 6, Objective())[0]

    hidden, loss = jax.jit(run)(alone, anchors)
    packed_hidden, packed_loss = jax.jit(run)(packed, anchors + 9)
    np.testing.assert_allclose(packed_hidden, hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "causal", "window"), [("dflash", False, 2), ("dflash", True, 3), ("dflash_fused", False, 3)]
)
def test_a_training_block_equals_inference_at_its_anchor(kind, causal, window):
    """All blocks of a row at once, against one block over a cache of what stands before its anchor; windows smaller than the block too."""
    drafter, frozen = small(kind=kind, causal=(causal, False), windows=(window, None))
    rows, K = documents(20), 6
    anchors = [1, 5, 6, 19]
    trained = jax.jit(lambda rows, at: block_hidden(drafter, frozen, rows, at, jnp.ones_like(at, bool), K))(
        rows, jnp.asarray([anchors], jnp.int32)
    )

    @jax.jit
    def inferred(rows, anchor):
        before = jnp.arange(20)[:, None] < anchor
        fused = drafter.fuse(jnp.where(before, rows.features, 3.0))
        cache = KVCache.empty(drafter.config, 1, 32, jnp.float32)
        k, v = drafter.context(frozen.embed[rows.tokens], fused, cache)
        cache = cache.commit(k, v, jnp.arange(20, dtype=jnp.int32)[None], anchor[None])
        ids = greedy_block(rows.tokens[:, anchor][:, None], drafter.config.mask_token_id, K)
        return drafter.predictions(
            drafter.block(frozen.embed[ids], fused[:, anchor - 1][:, None], cache, anchor[None, None])
        )

    for n, anchor in enumerate(anchors):
        one = inferred(rows, jnp.asarray(anchor, jnp.int32))
        np.testing.assert_allclose(trained[:, n], one[:, 0], rtol=1e-4, atol=1e-5, err_msg=f"anchor {anchor}")


@pytest.mark.parametrize("window", [2, 3])
def test_a_window_smaller_than_the_block_is_kept_in_training(window):
    """In a single sliding layer slot k sees the anchor if k < window, and the feature before it if k + 1 < window."""
    drafter, frozen = small(num_layers=1, windows=(window,))
    rows, anchors = documents(20), jnp.asarray([[7]], jnp.int32)
    run = jax.jit(lambda rows: block_hidden(drafter, frozen, rows, anchors, jnp.ones((1, 1), bool), 6)[0, 0])
    moved = lambda **changes: np.abs(run(dataclasses.replace(rows, **changes)) - run(rows)).max(-1) > 0
    assert moved(tokens=rows.tokens.at[0, 7].add(1)).tolist() == [k < window for k in range(1, 6)]
    assert moved(features=rows.features.at[0, 6].add(1.0)).tolist() == [k + 1 < window for k in range(1, 6)]


def step_of(layers, rows):
    """(leaves, rows, compute, remat) -> loss and gradient of a fresh drafter, and its leaves."""
    graph, frozen = small(num_layers=layers)

    def loss(leaves, compute, remat):
        merge = lambda leaves: prepared(params.fill(graph, leaves), compute, remat)
        run = make_loss(merge, 6, Objective(anchors=16, chunk=8))
        return run(leaves, rows, jax.random.key(0), frozen)

    return loss, params.flatten(graph)


@pytest.fixture(scope="module")
def long_rows():
    chance = np.random.default_rng(0)
    tokens = jnp.asarray(chance.integers(0, 90, (1, 48)), jnp.int32)
    features = jnp.asarray(chance.normal(size=(1, 48, 3 * 48)), jnp.float32)
    return Rows(tokens, jnp.ones((1, 48), bool), jnp.zeros((1, 48), jnp.int32), features)


@pytest.fixture(scope="module")
def gradients(long_rows):
    loss, leaves = step_of(1, long_rows)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 2))
    return {how: run(leaves, *how) for how in (("float32", False), ("float32", True), ("bfloat16", True))}


def test_layers_that_are_computed_again_give_the_same_gradient(gradients):
    want, got = gradients["float32", False], gradients["float32", True]
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_layers_that_are_computed_again_keep_little(long_rows):
    """Bytes of what a forward pass leaves for the backward one. (The temporaries of a program for CPUs hardly tell: with six such layers
    they fall by 8 %, as attention's own take most there.)"""

    def kept(layers, remat):
        loss, leaves = step_of(layers, long_rows)
        pull = jax.eval_shape(lambda leaves: jax.vjp(lambda x: loss(x, None, remat)[0], leaves)[1], leaves)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))

    assert kept(3, True) - kept(2, True) < 0.4 * (kept(3, False) - kept(2, False))


def test_bfloat16_passes_have_float32_loss_and_gradients(gradients):
    ((want, _), exact), ((loss, _), rounded) = gradients["float32", True], gradients["bfloat16", True]
    assert loss.dtype == jnp.float32
    assert float(loss) != float(want)
    np.testing.assert_allclose(loss, want, rtol=5e-3)
    for name, gradient in rounded.items():
        assert gradient.dtype == jnp.float32
        apart = np.linalg.norm(gradient - exact[name]) / np.linalg.norm(exact[name])
        assert 0 < apart < 0.05, (name, apart)


def test_dpace_needs_the_probability_of_the_response():
    with pytest.raises(DflaxError, match="weights is dpace and labels is soft"):
        Objective(weights="dpace", labels="soft")
