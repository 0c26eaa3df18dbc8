"""The judges of a denoising step: sizes as published, recurrences by hand, the recorded filter, folders."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflax import controllers
from dflax.config import ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.models import params
from dflax.models.controller import AcceptanceFilter, Controller, Trail, build, neighbourhood, normalised_entropy
from golden import load_case

CONFIG = ControllerConfig()
SLOTS = (2, 5)


def fresh(config=CONFIG, seed=0):
    """A controller whose standardisation is not the identity."""
    module = build(config, nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    if isinstance(config, ControllerConfig):
        module.scale.mean[...] = jnp.asarray(rng.normal(size=len(config.features)), jnp.float32)
        module.scale.std[...] = jnp.asarray(rng.uniform(0.5, 2, len(config.features)), jnp.float32)
        module.head.bias[...] = jnp.asarray([0.3], jnp.float32)
    return module


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(("hidden", "count"), [(8, 1024), (12, 2112), (16, 3584), (17, 4012), (25, 8300)])
def test_published_sizes(hidden, count):
    module = params.abstract(lambda rngs: Controller(replace(CONFIG, hidden_size=hidden), rngs=rngs))
    assert params.count(module.layers) == count
    assert params.count(module.head) == hidden + 1


def test_size_of_the_filter():
    assert params.count(params.abstract(lambda rngs: AcceptanceFilter(FilterConfig(), rngs=rngs))) == 2112


def by_hand(module, kind, inputs):
    """Logits of one slot over its steps, in numpy float64: inputs [steps, 6]."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.flatten(module).items()}
    size = module.config.hidden_size
    hidden, cell = np.zeros((2, size)), np.zeros((2, size))
    out = []
    for row in inputs:
        x = (row - p["scale.mean"]) / p["scale.std"]
        for i in range(2):
            if kind == "mlp":
                x = np.maximum(p[f"layers.{i}.linear.weight"] @ x + p[f"layers.{i}.linear.bias"], 0)
                continue
            w, u, b = (p[f"layers.{i}.{name}"] for name in ("input_weight", "state_weight", "bias"))
            if kind == "lstm":
                gate = [
                    w[k * size : (k + 1) * size] @ x + u[k * size : (k + 1) * size] @ hidden[i] + b[k * size : (k + 1) * size]
                    for k in range(4)
                ]  # fmt: skip
                cell[i] = sigmoid(gate[1]) * cell[i] + sigmoid(gate[0]) * np.tanh(gate[2])
                hidden[i] = sigmoid(gate[3]) * np.tanh(cell[i])
            else:
                given, kept = w @ x + b, u @ hidden[i]
                r, z = sigmoid(given[:size] + kept[:size]), sigmoid(given[size : 2 * size] + kept[size : 2 * size])
                hidden[i] = (1 - z) * np.tanh(given[2 * size :] + r * kept[2 * size :]) + z * hidden[i]
            x = hidden[i]
        out.append(p["head.weight"][0] @ x + p["head.bias"][0])
    return np.array(out)


@pytest.mark.parametrize("kind", ["lstm", "gru", "mlp"])
def test_recurrence_equals_numpy(kind):
    module = fresh(replace(CONFIG, kind=kind, hidden_size=7))
    inputs = np.random.default_rng(3).normal(size=(6, *SLOTS, 6)).astype(np.float32)
    memory, logits = module.empty_memory(SLOTS), []
    for step in inputs:
        z, memory = module(module.standardise(jnp.asarray(step)), memory)
        logits.append(z)
    for slot in [(0, 0), (1, 4)]:
        want = by_hand(module, kind, inputs[(slice(None), *slot)].astype(np.float64))
        np.testing.assert_allclose(np.stack(logits)[(slice(None), *slot)], want, rtol=1e-4, atol=1e-5)


def test_features_by_hand():
    raw = np.array([[0.2, 0.6], [0.5, 0.4], [0.9, 0.4]], np.float32)
    zero = jnp.zeros(2, jnp.float32)
    trail, rows = Trail.empty((2,)), []
    for row in raw:
        trail, x = trail.features(0.25, jnp.asarray(row) + 0.05, jnp.asarray(row), zero + 0.7, zero + 0.1, zero + 3)
        rows.append(x)
    average = [0.2, 0.25 * 0.5 + 0.75 * 0.2, 0.25 * 0.9 + 0.75 * 0.275]
    want = [[raw[t, 0] + 0.05, 0.7, average[t], average[t] - average[max(t - 1, 0)], 0.1, 3] for t in range(3)]
    np.testing.assert_allclose(np.stack(rows)[:, 0], want, rtol=1e-5)


def test_what_is_around_a_slot_by_hand():
    """Written slots are certain, and so is what lies before the block; what lies behind block or canvas is unknown."""
    confidence = jnp.array([[0.5, 0.6, 0.7, 0.8]])
    masked, live = jnp.array([[True, False, True, False]]), jnp.array([[True, True, True, False]])
    coverage = jnp.array([[1.0, 0.0, 0.5, 1 / 3]])
    around = neighbourhood(2, confidence, 0.5 * confidence, masked, coverage, live)
    want = [  # coverage; confidence: left, two left, right, two right; entropy: the same
        [1, 1, 1, 1, 0.7, 0, 0, 0, 0.35],
        [0, 0.5, 1, 0.7, 0, 0.25, 0, 0.35, 1],
        [0.5, 1, 0.5, 0, 0, 0, 0.25, 1, 1],
        [1 / 3, 0.7, 1, 0, 0, 0.35, 0, 1, 1],
    ]
    np.testing.assert_allclose(around[0], want, rtol=1e-6)
    assert neighbourhood(0, confidence, confidence, masked, coverage).shape == (1, 4, 0)
    config = replace(CONFIG, features=("entropy",), neighbours=2)
    assert config.inputs == 10
    module = build(config, nnx.Rngs(0))
    seen = jnp.concatenate([jnp.arange(4.0)[:, None] + jnp.arange(6.0), around[0]], axis=-1)
    np.testing.assert_array_equal(module.standardise(seen)[:, 1:], around[0])
    np.testing.assert_array_equal(module.standardise(seen)[:, 0], jnp.arange(4.0) + 1)
    with pytest.raises(DflaxError, match="neighbours of a controller is 32; a block of 32 has 0 to 31"):
        build(replace(CONFIG, neighbours=32), nnx.Rngs(0))


def test_features_left_out_and_an_absent_uncertainty():
    module = fresh(replace(CONFIG, features=("entropy", "uncertainty")))
    features = jnp.arange(6, dtype=jnp.float32)
    mean, std = np.asarray(module.scale.mean[...]), np.asarray(module.scale.std[...])
    np.testing.assert_allclose(module.standardise(features), (np.array([1, 5]) - mean) / std, rtol=1e-5)
    without = module.standardise(features.at[5].set(0))
    np.testing.assert_allclose(without, [(1 - mean[0]) / std[0], 0], rtol=1e-5)


def test_entropy_of_known_distributions():
    logits = jnp.stack(
        [jnp.zeros(8), jnp.where(jnp.arange(8) < 2, 0.0, -jnp.inf), jnp.where(jnp.arange(8) < 1, 0.0, -1e9)]
    )
    np.testing.assert_allclose(normalised_entropy(logits), [1, 1 / 3, 0], atol=1e-6)


def test_recorded_filter():
    case = load_case("learn2pd")
    names = ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias")
    leaves = {name: jnp.asarray(case.expected[f"filter_{name.replace('.', '_')}"]) for name in names}
    module = params.fill(params.abstract(lambda rngs: AcceptanceFilter(FilterConfig(), rngs=rngs)), leaves)
    case.check("filter_outputs", module(jnp.asarray(case.expected["filter_inputs"])))
    case.check("filter_short_outputs", module(jnp.asarray(case.expected["filter_short_inputs"])))
    for run in ("l2p", "l2p_eot"):
        visible = case.expected[f"{run}_block_visible"][:, None] > np.arange(32)
        got = np.where(visible, module(jnp.asarray(case.expected[f"{run}_block_confidence"])), 0)
        want = np.where(visible, case.expected[f"{run}_filter_logits"], 0)
        np.testing.assert_allclose(got, want, case.rtol, case.atol)
    with pytest.raises(DflaxError, match="blocks of 32 tokens; this block has 33"):
        module(jnp.zeros((1, 33)))


@pytest.mark.parametrize(
    ("config", "kind"), [(replace(CONFIG, kind="gru"), "tspd_controller"), (FilterConfig(16), "learn2pd_filter")]
)
def test_folder_and_back(tmp_path, config, kind):
    module = fresh(config)
    controllers.save(tmp_path / "judge", module)
    back = controllers.load(tmp_path / "judge", kind)
    assert back.config == config
    jax.tree.map(np.testing.assert_array_equal, params.flatten(back), params.flatten(module))
    constants = ConfidenceExtrapolation(z=1.5, literal=True)
    controllers.save_extrapolation(tmp_path / "judge", constants)
    assert controllers.load_extrapolation(tmp_path / "judge") == constants
    (tmp_path / "judge").rename(tmp_path / controllers.FOLDERS[kind])  # beside the model that it comes with
    assert controllers.load(tmp_path, kind).config == config


def test_wrong_folders(tmp_path):
    controllers.save(tmp_path / "filter", fresh(FilterConfig(4)))
    with pytest.raises(DflaxError, match=r"filter is 'learn2pd_filter' by its config.json, not 'tspd_controller'"):
        controllers.load(tmp_path / "filter", "tspd_controller")
    config = tmp_path / "filter" / "config.json"
    config.write_text(json.dumps({"model_type": "learn2pd_filter", "block_length": 8}))
    with pytest.raises(DflaxError, match=r"linear1.bias has shape \[4\], the config asks for \[8\]"):
        controllers.load(tmp_path / "filter", "learn2pd_filter")
    config.write_text(json.dumps({"model_type": "learn2pd_filter", "width": 4}))
    with pytest.raises(DflaxError, match="unknown key 'width'"):
        controllers.load(tmp_path / "filter", "learn2pd_filter")
    with pytest.raises(DflaxError, match=r"features of a controller are \['colour'\]"):
        Controller(replace(CONFIG, features=("colour",)), rngs=nnx.Rngs(0))
