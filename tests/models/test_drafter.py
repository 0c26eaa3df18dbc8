"""The drafter against reference values, cached and whole, full and sliding, causal and not; and what a block may see."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflax
from dflax.cache import KVCache
from dflax.kernels_pallas.block_attention.reference import visible_block, visible_context
from dflax.models import params
from dflax.models.drafter import greedy_block
from dflax.models.features import default_taps
from tests.golden import load_case


@jax.jit
def extended(module, cache, features):
    """The cache with the keys and values of further context."""
    fused = module.fuse(features)
    k, v = module.context(jnp.zeros_like(fused), fused, cache)
    n = features.shape[1]
    return cache.commit(k, v, jnp.arange(n, dtype=jnp.int32)[None], jnp.asarray([n], jnp.int32))


@jax.jit
def block_of(module, cache, embedded, anchors):
    return module.block(embedded, jnp.zeros((*embedded.shape[:2], embedded.shape[-1])), cache, anchors)


@jax.jit
def logits_of(module, hidden, head):
    return module.logits(hidden, head)


def context_cache(drafter, features, lengths):
    """Context keys and values written piece by piece, one piece per round."""
    cache = KVCache.empty(drafter.config, 1, features.shape[1] + 4, jnp.float32)
    for start, stop in zip([0, *lengths], lengths, strict=False):
        cache = extended(drafter.module, cache, jnp.asarray(features[:, start:stop]))
        yield cache


def run_block(drafter, case, cache, ids, anchor):
    embedded = jnp.take(jnp.asarray(case.expected["embed_tokens"]), jnp.asarray(ids), axis=0)[:, None]
    return block_of(drafter.module, cache, embedded, jnp.asarray([[anchor]], jnp.int32))[:, 0]


def test_three_rounds():
    case = load_case("dflash_drafter")
    drafter = dflax.load(case.folder / "drafter")
    want = case.expected
    case.check("fused_context", jax.jit(drafter.module.fuse)(jnp.asarray(want["target_features"])))
    for i, cache in enumerate(context_cache(drafter, want["target_features"], want["context_lengths"])):
        ids = want[f"round{i}_block_ids"]
        mask = drafter.config.mask_token_id
        np.testing.assert_array_equal(greedy_block(jnp.asarray(ids[:, :1]), mask, ids.shape[1])[0], ids)
        hidden = run_block(drafter, case, cache, ids, want["context_lengths"][i])
        case.check(f"round{i}_hidden", hidden)
        logits = logits_of(drafter.module, hidden, jnp.asarray(want["lm_head"]))
        case.check(f"round{i}_logits", logits)
        case.check(f"round{i}_draft_tokens", logits[:, 1:].argmax(-1))
        if i == 0:
            case.check("small_block_hidden", run_block(drafter, case, cache, ids[:, :4], want["context_lengths"][0]))


@pytest.mark.parametrize("kind", ["default", "noncausal", "causal"])
def test_sliding_layers(kind):
    case = load_case("dflash_drafter_sliding")
    drafter = dflax.load(case.folder / f"drafter_{kind}")
    want = case.expected
    for i, cache in enumerate(context_cache(drafter, want["target_features"], want["context_lengths"])):
        hidden = run_block(drafter, case, cache, want[f"round{i}_block_ids"], want["context_lengths"][i])
        case.check(f"{kind}_round{i}_hidden", hidden)
        logits = logits_of(drafter.module, hidden, jnp.asarray(want["lm_head"]))
        case.check(f"{kind}_round{i}_draft_tokens", logits[:, 1:].argmax(-1))


@pytest.mark.parametrize("kind", ["default", "noncausal", "causal"])
def test_masks_of_both_layer_types(kind):
    case = load_case("dflash_drafter_sliding")
    config = dflax.load(case.folder / f"drafter_{kind}").config
    S, T = int(case.expected["context_lengths"][1]), config.block_size
    for layer, layer_type in ((0, "sliding_attention"), (2, "full_attention")):
        mask, window = "causal" if config.is_causal(layer) else "full", config.window(layer) or 2**30
        start, length, position = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), S), S + jnp.arange(T)[None, None]
        context = visible_context(jnp.arange(S), start, length, position, None, window, mask == "full")
        block = visible_block(position, mask, jnp.full((1, 1), T), window)
        got = np.concatenate([context[0, 0], block[0, 0]], axis=-1)
        name = next(n for n in case.expected if n.startswith(f"{kind}_mask_round1_{layer_type.split('_')[0]}"))
        np.testing.assert_array_equal(got, case.expected[name].reshape(got.shape), err_msg=name)


def test_tap_table():
    for row in load_case("sampling_rules").expected["tap_table"]:
        layers, taps, *ids = (int(x) for x in row)
        assert default_taps(layers, taps) == tuple(i for i in ids if i >= 0)
    assert [default_taps(2, 2), default_taps(4, 3), default_taps(3, 3)] == [(0, 1), (0, 2, 3), (0, 1, 2)]  # ours


def test_what_stands_at_or_after_the_anchor_changes_nothing():
    """The strict rule of the context, and independence of blocks that share it."""
    case = load_case("dflash_drafter")
    drafter = dflax.load(case.folder / "drafter")
    rng = np.random.default_rng(0)
    features = case.expected["target_features"].copy()
    anchors, K = jnp.asarray([[5, 11, 17]], jnp.int32), 8
    embedded = jnp.asarray(rng.normal(size=(1, 3, K, drafter.config.hidden_size)), jnp.float32)

    def run(features, embedded):
        (cache,) = context_cache(drafter, features, [features.shape[1]])
        return np.asarray(block_of(drafter.module, cache, embedded, anchors))

    before = run(features, embedded)
    features[:, 11:] += 1.0
    after = run(features, embedded)
    np.testing.assert_array_equal(after[:, :2], before[:, :2])
    assert np.abs(after[:, 2] - before[:, 2]).max() > 1e-3
    moved = run(features, embedded.at[:, 1].add(1.0))
    np.testing.assert_array_equal(moved[:, [0, 2]], after[:, [0, 2]])
    features[:, 10] += 1.0
    assert np.abs(run(features, embedded)[:, 1] - after[:, 1]).max() > 1e-3
    assert jax.tree.leaves(drafter.module)


def test_names_of_other_exporters(tmp_path):
    """Prefix variants of drafter files (spec 1.8): "model.", "midlayer" for layer 0, "encoder.fc", "encoder.output_norm_enc"."""
    source = load_case("dflash_drafter").folder / "drafter"
    tensors = load_file(source / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        for here, there in (
            ("layers.0.", "midlayer."),
            ("fc.", "encoder.fc."),
            ("hidden_norm.", "encoder.output_norm_enc."),
        ):
            if name.startswith(here):
                name = there + name.removeprefix(here)
        renamed[f"model.{name}"] = tensor
    shutil.copy(source / "config.json", tmp_path)
    save_file(renamed, tmp_path / "model.safetensors")
    want, got = params.flatten(dflax.load(source).module), params.flatten(dflax.load(tmp_path).module)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
