"""The whole way: responses -> trained drafter -> folder -> speculation; features cached and online are the same training."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import dflax
from dflax.errors import DflaxError
from dflax.models import params
from dflax.train import recipe as recipe_module
from dflax.train.drafter import Objective
from dflax.train.features import FeatureStore, Picked
from dflax.train.recipe import DrafterRecipe, train_drafter
from dflax.train.trainer import TrainConfig
from tests.golden import load_case
from tests.infer.tiny import random_model, target_config

TARGET = load_case("dflash_generate").folder / "target"


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A target of two layers (every loop over it compiles in seconds) and its own greedy answers as training data."""
    folder = tmp_path_factory.mktemp("target")
    random_model(target_config(vocab_size=128, hidden_size=32, max_positions=4096)).save(folder)
    target = dflax.load(folder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 90, int(n)).tolist() for n in rng.integers(5, 12, 24)]
    answers = dflax.generate(target, prompts, max_new_tokens=24, stop_token_ids=[]).tokens
    path = tmp_path_factory.mktemp("data") / "responses.jsonl"
    rows = [{"prompt_tokens": p, "response_tokens": a} for p, a in zip(prompts, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, path


def recipe(setting, out, steps=30, **changes):
    target, path = setting
    train = TrainConfig(steps=steps, learning_rate=3e-3, log_every=5, checkpoint_every=10, out=str(out))
    fields = {
        "target": str(target), "data": (str(path),), "block_size": 4, "layers": 1, "taps": 2, "mask_token_id": 0, "length": 64,
        "rows_per_step": 2, "held_out": 0.2, "eval_prompts": 0, "eval_tokens": 16, "soft_labels": 4, "train": train,
        "objective": Objective(anchors=8, labels="soft", chunk=4),
    }  # fmt: skip
    return DrafterRecipe(**(fields | changes))


def test_learns_and_is_lossless(setting, tmp_path):
    folder = train_drafter(recipe(setting, tmp_path / "run", steps=60, eval_prompts=3))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert (
        1 <= next(line["eval/acceptance_length"] for line in reversed(lines) if "eval/acceptance_length" in line) <= 4
    )
    target, drafter = dflax.load(setting[0]), dflax.load(folder)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    plain = dflax.generate(target, prompts, max_new_tokens=20, stop_token_ids=[])
    assert dflax.speculate(target, drafter, prompts, max_new_tokens=20, stop_token_ids=[]).tokens == plain.tokens
    again = train_drafter(recipe(setting, tmp_path / "more", steps=5, init_from=str(folder)))
    assert dflax.load(again).config == drafter.config


def last_loss(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line["loss"] for line in reversed(lines) if "loss" in line)


def test_cached_features_train_as_online_ones(setting, tmp_path):
    """The cache holds bfloat16, so losses are close, not equal (Adam's first steps hang on signs); rows and anchors are the same."""
    cache = str(tmp_path / "cache")
    train_drafter(recipe(setting, tmp_path / "online", steps=3))
    cached = train_drafter(recipe(setting, tmp_path / "cached", steps=3, features=cache))
    np.testing.assert_allclose(last_loss(tmp_path / "cached"), last_loss(tmp_path / "online"), rtol=2e-3)
    other = train_drafter(recipe(setting, tmp_path / "alone", steps=3, data=(), features=cache))
    want, got = (params.flatten(dflax.load(folder).module) for folder in (cached, other))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert len(FeatureStore(cache)) > 1
    stranger = dflax.load(setting[0])
    leaves = params.flatten(stranger.module)
    leaves["norm.weight"] = leaves["norm.weight"] * 2
    dataclasses.replace(stranger, module=params.fill(stranger.module, leaves)).save(tmp_path / "stranger")
    with pytest.raises(DflaxError, match=r"has target_weights .*; use another folder"):
        train_drafter(
            recipe(setting, tmp_path / "more", steps=3, data=(), features=cache, target=str(tmp_path / "stranger"))
        )


def test_rows_of_a_cache_are_an_array_of_their_own():
    whole = np.arange(24).reshape(6, 4)
    picked = Picked(whole, np.array([5, 0, 3]))
    assert (picked.shape, picked.ndim, picked.dtype) == ((3, 4), 2, whole.dtype)
    np.testing.assert_array_equal(picked[1:3, 1:2], [[1], [13]])
    np.testing.assert_array_equal(np.asarray(picked), whole[[5, 0, 3]])


def test_a_cache_keeps_the_prompts_to_evaluate_on(setting, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        recipe_module, "speculate_held_out", lambda *arguments: asked.append(arguments[-1]) or {"x": 1.0}
    )
    cache = str(tmp_path / "cache")
    train_drafter(recipe(setting, tmp_path / "made", steps=1, features=cache, eval_prompts=2))
    settings = recipe(setting, tmp_path / "cached", steps=1, data=(), features=cache, eval_prompts=3)
    train_drafter(settings)
    few, more = asked
    assert (len(few), len(more)) == (2, 3)  # the cache keeps all of them, whatever the run that made it wanted
    assert more[:2] == few
    nothing = dataclasses.replace(settings, eval_prompts=0, train=dataclasses.replace(settings.train, eval_every=1))
    with pytest.raises(DflaxError, match="eval_every is 1, but there are no prompts to evaluate on"):
        train_drafter(nothing)


def test_a_draft_vocabulary_travels_with_the_weights(setting, tmp_path):
    folder = train_drafter(recipe(setting, tmp_path / "run", steps=3, draft_vocabulary=32))
    drafter = dflax.load(folder)
    assert drafter.config.draft_vocab_size == 32
    assert len(set(drafter.draft_ids.tolist())) == 32
    target = dflax.load(setting[0])
    plain = dflax.generate(target, [[5, 6, 7]], max_new_tokens=12, stop_token_ids=[])
    assert dflax.speculate(target, drafter, [[5, 6, 7]], max_new_tokens=12, stop_token_ids=[]).tokens == plain.tokens


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dflash_fused", marks=pytest.mark.slow),
        pytest.param("autoregressive", marks=pytest.mark.slow),
        "autoregressive_fused",
    ],
)
def test_other_kinds_of_drafter(setting, tmp_path, kind):
    folder = train_drafter(recipe(setting, tmp_path / "run", steps=3, kind=kind))
    target, drafter = dflax.load(setting[0]), dflax.load(folder)
    assert drafter.config.kind == kind
    plain = dflax.generate(target, [[5, 6, 7], [1, 2]], max_new_tokens=12, stop_token_ids=[])
    assert (
        dflax.speculate(target, drafter, [[5, 6, 7], [1, 2]], max_new_tokens=12, stop_token_ids=[]).tokens
        == plain.tokens
    )


def test_several_processes_cannot_make_one_cache(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(DflaxError, match="several processes cannot make a cache together"):
        train_drafter(recipe(setting, tmp_path / "run", features=str(tmp_path / "cache")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"target_layer_ids": (99,)}, "target_layer_ids"),
        ({"draft_vocabulary": 10**6}, "draft_vocabulary"),
        ({"block_size": 1}, "block_size"),
        ({"target": ""}, "target"),
        ({"layers": 0}, "layers is 0"),
        ({"taps": 0}, "taps is 0"),
        ({"taps": 99}, "taps is 99, but .* has 2 layers"),
        ({"length": 0}, "length is 0"),
        ({"eval_tokens": 0}, "eval_tokens is 0"),
        ({"held_out": 1.0}, "held_out is 1"),
        ({"init_from": str(TARGET)}, "is no drafter"),
        ({"init_from": str(load_case("dflash_drafter_sliding").folder / "drafter_causal")}, "does not fit target"),
        ({"target": str(load_case("dflash_generate").folder / "drafter_fitted")}, "is a drafter"),
        ({"target": str(load_case("llada").folder / "model")}, "is a diffusion language model"),
    ],
)
def test_impossible_recipes(setting, tmp_path, change, says):
    with pytest.raises(DflaxError, match=says):
        train_drafter(recipe(setting, tmp_path / "run", **change))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"response_tokens": [1, 10**6]}, "responses.jsonl:1: token id 1000000 is outside the model's vocabulary"),
        ({"response_tokens": [1, 2], "thinking": None}, "responses.jsonl:1: the response was written with enable_thinking None"),
        ({"response_tokens": [1, 2], "thinking": True}, "responses.jsonl:1: the response was written with enable_thinking True"),
    ],
)  # fmt: skip
def test_responses_that_do_not_fit(setting, tmp_path, row, says):
    path = tmp_path / "responses.jsonl"
    path.write_text(json.dumps({"prompt_tokens": [1, 2], **row}) + "\n")
    with pytest.raises(DflaxError, match=says):
        train_drafter(recipe(setting, tmp_path / "run", data=(str(path),), held_out=0.0, enable_thinking=False))


def test_a_target_of_another_dtype_and_a_run_that_is_bound_to_its_data(setting, tmp_path):
    """Evaluation takes the drafter as it will be used; whoever changes the responses in their place does not go on with the run."""
    path = tmp_path / "responses.jsonl"
    path.write_text(setting[1].read_text())
    settings = recipe(setting, tmp_path / "run", steps=2, data=(str(path),), dtype="bfloat16", eval_prompts=2)
    train_drafter(settings)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("eval/acceptance_length" in row for row in rows)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(DflaxError, match="holds a run with rows = "):
        train_drafter(settings)
