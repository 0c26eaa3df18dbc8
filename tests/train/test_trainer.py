"""The training loop: it learns, it resumes exactly, it refuses what would not be the same run."""

import itertools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflax.errors import DflaxError
from dflax.train import metrics
from dflax.train.step import TrainConfig, learning_rate_schedule
from dflax.train.trainer import Stopped, fit

WEIGHTS = np.asarray([[1.0, -2.0], [0.5, 3.0], [2.0, 0.25]], np.float32)


class Regression:
    steps_per_epoch = 8

    def batch_at(self, step):
        x = np.random.default_rng(step).normal(size=(16, 3)).astype(np.float32)
        return {"x": x, "y": x @ WEIGHTS + 1.0}


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Drawing costs more than these runs; one test looks at the picture."""
    if request.node.name != "test_learns_and_writes_metrics":
        monkeypatch.setattr(metrics, "plot", lambda *paths: None)


def loss_fn(params, batch, key):
    noise = 0.01 * jax.random.normal(key, batch["y"].shape)
    error = batch["x"] @ params["w"] + params["b"] - batch["y"] + noise
    return jnp.mean(error**2), {"tokens": jnp.asarray(16.0), "bias": jnp.mean(params["b"])}


def start():
    return {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}


def config(out, **changes):
    values = {"steps": 40, "learning_rate": 0.1, "log_every": 7, "checkpoint_every": 6, "seed": 3, "out": str(out)}
    return TrainConfig(**{**values, **changes})


def lines(out):
    return [{k: v for k, v in row.items() if k not in metrics.TIMINGS} for row in metrics.read(out / "metrics.jsonl")]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


class Broken(Exception):
    pass


class Breaking(Regression):
    """Fails at one step, as a process that dies would."""

    def __init__(self, at):
        self.at = at

    def batch_at(self, step):
        if step == self.at:
            raise Broken
        return super().batch_at(step)


def test_learns_and_writes_metrics(tmp_path):
    given = start()
    params = fit(given, loss_fn, Regression(), config(tmp_path, steps=200, log_every=50))
    np.testing.assert_allclose(params["w"], WEIGHTS, atol=0.05)
    np.testing.assert_allclose(params["b"], 1.0, atol=0.05)
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [50, 100, 150, 200]
    assert rows[-1]["loss"] < 0.01 < rows[0]["loss"]
    assert rows[-1]["epoch"] == 25
    assert rows[-1]["tokens_per_second"] > 0
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert float(given["w"].sum()) == 0  # the caller's arrays survive the donation


def test_metrics_are_the_mean_since_the_last_line(tmp_path):
    fit(start(), loss_fn, Regression(), config(tmp_path / "each", steps=6, log_every=1))
    fit(start(), loss_fn, Regression(), config(tmp_path / "three", steps=6, log_every=3))
    each, three = lines(tmp_path / "each"), lines(tmp_path / "three")
    for i, row in enumerate(three):
        np.testing.assert_allclose(row["loss"], np.mean([r["loss"] for r in each[3 * i : 3 * i + 3]]), rtol=1e-6)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """(parameters, metrics lines) of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda *paths: None)
        return fit(start(), loss_fn, Regression(), config(out)), lines(out)


@pytest.mark.parametrize("at", [1, 20, 39])
def test_resumed_equals_uninterrupted(tmp_path, whole_run, at):
    whole, whole_lines = whole_run
    with pytest.raises(Broken):
        fit(start(), loss_fn, Breaking(at), config(tmp_path / "cut"))
    resumed = fit(start(), loss_fn, Regression(), config(tmp_path / "cut"))
    assert equal(whole, resumed)
    assert lines(tmp_path / "cut") == whole_lines
    kept = sorted(int(p.name) for p in (tmp_path / "cut" / "checkpoints").iterdir())
    assert kept == [36, 40]


def test_finished_run_returns_its_result(tmp_path):
    first = fit(start(), loss_fn, Regression(), config(tmp_path))
    again = fit(start(), loss_fn, Breaking(0), config(tmp_path))
    assert equal(first, again)


def test_half_written_checkpoint_is_swept_away(tmp_path, whole_run):
    whole, whole_lines = whole_run
    with pytest.raises(Broken):
        fit(start(), loss_fn, Breaking(20), config(tmp_path / "cut"))
    folder = tmp_path / "cut" / "checkpoints"
    (folder / "18" / "commit_success.txt").unlink()  # the newest one was being deleted or written
    (folder / "19.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    assert equal(whole, fit(start(), loss_fn, Regression(), config(tmp_path / "cut")))
    assert lines(tmp_path / "cut") == whole_lines
    assert not list(folder.glob("*tmp*"))


def test_another_run_is_refused_by_name(tmp_path):
    fit(start(), loss_fn, Regression(), config(tmp_path), identity={"data": "mine"})
    for changes, named in [
        ({"learning_rate": 0.2}, "learning_rate"),
        ({"seed": 4}, "seed"),
        ({"steps": 50}, "total_steps"),
        ({"weight_decay": 0.1}, "weight_decay"),
    ]:
        with pytest.raises(DflaxError, match=f"{named} = "):
            fit(start(), loss_fn, Regression(), config(tmp_path, **changes), identity={"data": "mine"})
    with pytest.raises(DflaxError, match="data = 'mine'"):
        fit(start(), loss_fn, Regression(), config(tmp_path), identity={"data": "other"})


def test_cadence_may_change_and_a_constant_schedule_may_be_prolonged(tmp_path):
    constant = {"schedule": "constant", "warmup_fraction": 0.0}
    whole = fit(start(), loss_fn, Regression(), config(tmp_path / "whole", **constant))
    fit(start(), loss_fn, Regression(), config(tmp_path / "cut", steps=15, **constant))
    changed = config(tmp_path / "cut", log_every=3, checkpoint_every=9, keep=1, **constant)
    assert equal(whole, fit(start(), loss_fn, Regression(), changed))


def test_other_arrays_in_the_checkpoint(tmp_path):
    fit(start(), loss_fn, Regression(), config(tmp_path, steps=6))
    other = {"w": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}
    with pytest.raises(DflaxError, match="/bias"):
        fit(
            other, lambda p, b, k: loss_fn({"w": p["w"], "b": p["bias"]}, b, k), Regression(), config(tmp_path, steps=6)
        )


def test_evaluate_is_called_and_logged(tmp_path):
    calls = []

    def evaluate(params, step):
        calls.append(step)
        return {"distance": float(jnp.abs(params["w"] - WEIGHTS).max())}

    fit(start(), loss_fn, Regression(), config(tmp_path, eval_every=15), evaluate=evaluate)
    assert calls == [15, 30, 40]
    found = [row["eval/distance"] for row in metrics.read(tmp_path / "metrics.jsonl") if "eval/distance" in row]
    assert len(found) == 3
    assert found[-1] < found[0]


def test_evaluate_ends_a_run_for_good(tmp_path):
    calls = []

    def evaluate(params, step):
        calls.append(step)
        return {"w": float(params["w"][0, 0]), "stop": step >= 30}

    run = lambda: fit(start(), loss_fn, Regression(), config(tmp_path, eval_every=15), evaluate=evaluate)
    ended = run()
    assert calls == [15, 30]
    assert not equal(ended, fit(start(), loss_fn, Regression(), config(tmp_path / "whole", eval_every=15)))
    assert equal(run(), ended)
    assert calls == [15, 30]
    assert all("eval/stop" not in row for row in metrics.read(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize(("best", "step", "again"), [("score", 12, 3.0), ("-score", 24, 3.0), ("score", 18, 5.0)])
def test_the_best_checkpoint_is_kept_beside_the_last_ones(tmp_path, best, step, again):
    scores = {6: 2.0, 12: 5.0, 18: again, 24: 1.0, 30: 2.0, 36: 3.0, 40: 4.0}  # at step 18 perhaps as good as at 12
    weights = {}

    def evaluate(params, at):
        weights[at] = np.asarray(params["w"])
        return {"score": scores[at], "other": -at}

    settings = config(tmp_path, eval_every=6, best=best)
    trained = fit(start(), loss_fn, Regression(), settings, evaluate=evaluate)
    kept = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {step, 36, 40}
    finished = fit(start(), loss_fn, Regression(), settings, evaluate=evaluate)  # has the same result
    for result in trained, finished:
        np.testing.assert_array_equal(result["w"], weights[step])
    assert not np.array_equal(weights[step], weights[40])


def test_a_best_figure_that_is_not_measured_is_named(tmp_path):
    with pytest.raises(DflaxError, match="best is 'tau'; the evaluation finds score"):
        fit(start(), loss_fn, Regression(), config(tmp_path, best="tau"), evaluate=lambda params, step: {"score": 1.0})


def test_frozen_is_an_argument_and_is_not_trained(tmp_path):
    def with_frozen(params, batch, key, frozen):
        return loss_fn({"w": params["w"] @ frozen["mix"], "b": params["b"]}, batch, key)

    frozen = {"mix": jnp.asarray([[0.0, 1.0], [1.0, 0.0]])}
    params = fit(start(), with_frozen, Regression(), config(tmp_path, steps=200), frozen=frozen)
    np.testing.assert_allclose(params["w"], WEIGHTS[:, ::-1], atol=0.05)


def test_accumulation_gives_the_same_gradient(tmp_path):
    def plain(params, batch, key):
        error = batch["x"] @ params["w"] + params["b"] - batch["y"]
        return jnp.mean(error**2), {"tokens": jnp.asarray(error.shape[0])}

    whole = fit(start(), plain, Regression(), config(tmp_path / "whole"))
    parts = fit(start(), plain, Regression(), config(tmp_path / "parts", accumulation=4))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_not_finite_loss_names_the_step_and_keeps_the_checkpoint(tmp_path, whole_run):
    class Poisoned(Regression):
        def batch_at(self, step):
            batch = super().batch_at(step)
            return {**batch, "y": batch["y"] * np.nan} if step == 13 else batch

    with pytest.raises(DflaxError, match=r"loss is nan at step 14; step 12 is the last checkpoint"):
        fit(start(), loss_fn, Poisoned(), config(tmp_path))
    assert equal(whole_run[0], fit(start(), loss_fn, Regression(), config(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_writes_a_checkpoint_and_leaves(tmp_path, number):
    class Signalling(Regression):
        def batch_at(self, step):
            if step == 10:
                os.kill(os.getpid(), number)
            return super().batch_at(step)

    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=signal.Signals(number).name):
        fit(start(), loss_fn, Signalling(), config(tmp_path / "cut", steps=2000, checkpoint_every=5000))
    assert signal.getsignal(number) is before
    assert list((tmp_path / "cut" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "exactly one"),
        ({"steps": 5, "epochs": 1}, "exactly one"),
        ({"log_every": 0}, "log_every"),
        ({"warmup_fraction": 1.5}, "warmup_fraction"),
        ({"distributed": "auto"}, "mesh is empty"),
    ],
)
def test_impossible_config(tmp_path, changes, message):
    with pytest.raises(DflaxError, match=message):
        config(tmp_path, **changes)


def test_a_bucket_is_no_folder():
    with pytest.raises(DflaxError, match="out is 'gs://bucket/run'; it must be a folder"):
        TrainConfig(steps=1, out="gs://bucket/run")


def test_what_cannot_be_done_with_this_run_is_told_before_it_begins(tmp_path):
    with pytest.raises(DflaxError, match="this command trains in one process"):
        fit(start(), loss_fn, Regression(), config(tmp_path, distributed="auto", mesh="data=1"))
    with pytest.raises(DflaxError, match="best is 'score', but nothing is held out"):
        fit(start(), loss_fn, Regression(), config(tmp_path, best="score"))
    with pytest.raises(DflaxError, match="16 rows cannot be cut into 3 equal parts"):
        fit(start(), loss_fn, Regression(), config(tmp_path, accumulation=3))
    assert not list(tmp_path.glob("checkpoints/*"))


def test_schedule_warms_up_and_decays(tmp_path):
    rate = learning_rate_schedule(config(tmp_path, steps=100, warmup_fraction=0.1, final_fraction=0.1), 100)
    values = [float(rate(i)) for i in range(100)]
    np.testing.assert_allclose(values[:10], [0.01 * (i + 1) for i in range(10)], rtol=1e-5)
    assert max(values) == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))
    assert values[-1] == pytest.approx(0.01, rel=0.05)


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DflaxError, match="cannot write"):
        fit(start(), loss_fn, Regression(), config(tmp_path / "file" / "run"))


def test_config_is_written(tmp_path):
    fit(start(), loss_fn, Regression(), config(tmp_path, steps=0, epochs=1))
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["fixed"]["total_steps"] == 8
    assert stored["config"]["epochs"] == 1
