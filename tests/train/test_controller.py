"""The controller learns what tells right from wrong, the filter too, and a killed run ends as an uninterrupted one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflax.config import ControllerConfig
from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation, left_coverage
from dflax.models import params
from dflax.models.controller import Trail, build, neighbourhood
from dflax.train import metrics, trainer
from dflax.train.controller import (
    ControllerObjective,
    alive,
    class_weights,
    constant_loss,
    features,
    make_loss,
    train_controller,
    train_filter,
)  # fmt: skip
from dflax.train.traces import sequences
from dflax.train.trainer import TrainConfig
from tests.train.synthetic import T, traces

CONFIG = ControllerConfig(block_length=T)
CE = ConfidenceExtrapolation()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(metrics, "plot", lambda *paths: None)


@pytest.fixture(scope="module")
def slots():
    return sequences(traces()), sequences(traces(16, seed=1))


def settings(out, **changes):
    values = {
        "steps": 120,
        "learning_rate": 1e-2,
        "weight_decay": 1e-2,
        "log_every": 20,
        "eval_every": 40,
        "checkpoint_every": 40,
    }
    return TrainConfig(**{**values, "out": str(out), **changes})  # fmt: skip


def train(out, slots, objective=None, **changes):
    return train_controller(
        CONFIG, *slots, CE, objective or ControllerObjective(), settings(out, **changes), batch=256, patience=0
    )


def test_features_are_those_of_the_loop():
    """One block of a recording, step by step, as the policy and the look-ahead in front of it compute them."""
    made = features(sequences(traces(1, 1), neighbours=3), CE, 0.25)
    shown = traces(1, 1).trimmed()
    trend, trail = CE.init(1, T), Trail.empty((1, T))
    position = jnp.arange(T, dtype=jnp.float32)[None] / (T - 1)
    for s in range(shown.confidence.shape[2]):
        now = {
            name: jnp.asarray(getattr(shown, name)[:, 0, s]) for name in ("confidence", "entropy", "token", "masked")
        }
        coverage = left_coverage(~now["masked"])
        trend, _, uncertainty = CE.observe(trend, now["confidence"], now["token"], now["masked"], coverage)
        raw = now["confidence"]
        trail, want = trail.features(0.25, raw, raw, now["entropy"], position, uncertainty)
        around = neighbourhood(3, raw, now["entropy"], now["masked"], coverage)
        np.testing.assert_allclose(made[:, s], jnp.concatenate([want, around], axis=-1)[0], rtol=1e-5, atol=1e-6)
    assert np.all(made[:, 0, 5] > 0.1)  # the look-ahead's uncertainty is there
    raised = features(sequences(traces(1, 1)), CE, 0.25, extrapolated=True)
    assert np.all(raised[..., 0] >= made[..., 0])
    np.testing.assert_array_equal(raised[..., 1:], made[..., 1:6])


def test_class_weights_and_the_constant_answer(slots):
    agrees = np.array([[True, True], [True, False]])
    observed = np.array([[True, False], [True, True]])
    objective = ControllerObjective()
    assert class_weights(agrees, observed, objective) == (3 / 2, 3 / 4)
    assert class_weights(agrees, observed, replace(objective, wrong_weight=2.0)) == (3, 3 / 4)
    assert class_weights(agrees, observed, replace(objective, balanced=False)) == (1, 1)
    np.testing.assert_allclose(
        constant_loss(slots[0], class_weights(slots[0].agrees, slots[0].observed, objective)), np.log(2)
    )
    with pytest.raises(DflaxError, match="every token of the traces is right"):
        class_weights(agrees | True, observed, objective)


def test_loss_by_hand(slots):
    controller = build(CONFIG, nnx.Rngs(1))
    held = slots[1]
    batch = {
        "features": jnp.asarray(features(held, CE, 0.25)),
        "agrees": jnp.asarray(held.agrees),
        "observed": jnp.asarray(held.observed),
    }
    loss, figures = make_loss(lambda leaves: leaves, ControllerObjective(), (3.0, 0.5))(controller, batch, None)
    memory, total, fixed = controller.empty_memory((len(slots[1]),)), 0.0, []
    for s in range(slots[1].observed.shape[1]):
        z, memory = controller(controller.standardise(batch["features"][:, s]), memory)
        p, y, seen = 1 / (1 + np.exp(-np.asarray(z, np.float64))), slots[1].agrees[:, s], slots[1].observed[:, s]
        total += np.sum(np.where(y, -0.5 * np.log(p), -3 * np.log(1 - p))[seen])
        fixed += list(zip((p >= 0.5)[seen], y[seen], strict=True))
    np.testing.assert_allclose(loss, total / slots[1].observed.sum(), rtol=1e-5)
    fixed = np.array(fixed)
    np.testing.assert_allclose(figures["precision"], fixed[fixed[:, 0], 1].mean(), rtol=1e-6)
    np.testing.assert_allclose(figures["recall"], fixed[fixed[:, 1], 0].mean(), rtol=1e-6)


def test_straight_through():
    z = jnp.array([[-1.0, 2.0, 1.0, 3.0], [1.0, -1.0, -1.0, 1.0]])
    observed = jnp.array([[True, True, True, True], [False, True, True, True]])
    np.testing.assert_allclose(alive(z, observed), [[1, 1, 0, 0], [0, 1, 1, 1]])
    grad = jax.grad(lambda z: jnp.sum(alive(z, observed)[0, 1]))(z)
    p = 1 / (1 + np.exp(1.0))
    np.testing.assert_allclose(grad[0], [-p * (1 - p), 0, 0, 0], rtol=1e-5)


def test_training_beats_the_constant_answer(tmp_path, slots):
    controller, figures = train(tmp_path, slots)
    losses = [row["loss"] for row in metrics.read(tmp_path / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < 0.6 * losses[0]
    assert figures["loss"] < 0.5 * figures["constant_loss"]
    assert figures["precision"] > 0.85
    assert figures["recall"] > 0.8
    np.testing.assert_array_equal(controller.scale.std[...] > 0, True)
    assert params.count(controller.layers) == 2112


def test_killed_and_resumed_equals_uninterrupted(tmp_path, slots, monkeypatch):
    whole, _ = train(tmp_path / "whole", slots, ControllerObjective(straight_through=True))
    save = trainer._Run._save

    def die(run):
        save(run)
        if run.step == 80:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer._Run, "_save", die)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", slots, ControllerObjective(straight_through=True))
    monkeypatch.setattr(trainer._Run, "_save", save)
    resumed, _ = train(tmp_path / "cut", slots, ControllerObjective(straight_through=True))
    jax.tree.map(np.testing.assert_array_equal, params.flatten(whole), params.flatten(resumed))


def test_stops_when_validation_gets_no_better_and_keeps_the_best(tmp_path):
    recording = traces()
    shuffled = np.random.default_rng(0).permuted(recording.token, axis=0)  # nothing to learn from: it can only overfit
    noise = replace(recording, token=shuffled)
    held = replace(traces(16, seed=1), token=np.random.default_rng(1).permuted(traces(16, seed=1).token, axis=0))
    run = lambda: train_filter(
        noise, held, settings(tmp_path, steps=4000, learning_rate=0.03, eval_every=20), 256, patience=3
    )
    module, figures = run()
    rows = [row for row in metrics.read(tmp_path / "metrics.jsonl") if "eval/loss" in row]
    assert rows[-1]["step"] < 2000
    assert figures["loss"] == pytest.approx(min(row["eval/loss"] for row in rows), rel=1e-6)
    assert rows[-1]["eval/loss"] > figures["loss"]
    again, _ = run()  # finished: nothing moves
    jax.tree.map(np.testing.assert_array_equal, params.flatten(module), params.flatten(again))


def test_the_filter_learns(tmp_path):
    figures = train_filter(traces(), traces(16, seed=1), settings(tmp_path, steps=300), 256, patience=0)[1]
    base = sequences(traces(16, seed=1)).agrees.mean()
    assert figures["accuracy"] > max(base, 1 - base) + 0.04
