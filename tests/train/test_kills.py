"""Training that is killed (-9) again and again ends exactly where an undisturbed run ends."""

import hashlib
import random
import subprocess
import sys
import threading
import time

import pytest

from dflax.train import metrics

# A real process: it imports, restores, compiles, trains with a checkpoint at every step, and prints what came out.
SCRIPT = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np
from dflax.train import metrics
from dflax.train.trainer import TrainConfig, fit

metrics.plot = lambda *paths: None

class Data:
    steps_per_epoch = 10
    def batch_at(self, step):
        return np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)

def loss_fn(params, batch, key):
    hidden = jnp.tanh(batch @ params["a"]) + 0.1 * jax.random.normal(key, (8, 32))
    return jnp.mean((hidden @ params["b"] - batch) ** 2), {"tokens": jnp.asarray(8.0)}

random = np.random.default_rng(0)
params = {"a": random.normal(size=(16, 32)).astype(np.float32), "b": random.normal(size=(32, 16)).astype(np.float32)}
config = TrainConfig(steps=int(sys.argv[2]), learning_rate=0.01, log_every=4, checkpoint_every=1, out=sys.argv[1])
print("ready", flush=True)
trained = fit(params, loss_fn, Data(), config)
print("digest", hashlib.sha256(b"".join(np.asarray(trained[k]).tobytes() for k in "ab")).hexdigest(), flush=True)
"""


def run(out, steps, kill_after=None):
    """(digest or None, seconds since the training call): the process is killed `kill_after` seconds after it calls `fit`."""
    command = [sys.executable, "-c", SCRIPT, str(out), str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    assert first == "ready\n", process.stderr.read()
    began = time.perf_counter()
    timer = threading.Timer(kill_after, process.kill) if kill_after is not None else None
    if timer:
        timer.start()
    rest, errors = process.communicate()
    if timer:
        timer.cancel()
    assert process.returncode in (0, -9), errors
    return rest.split()[1] if process.returncode == 0 else None, time.perf_counter() - began


def lines(out):
    return [{k: v for k, v in row.items() if k not in metrics.TIMINGS} for row in metrics.read(out / "metrics.jsonl")]


def survive(folder, steps, wanted):
    """Kill until `wanted` kills have struck; every run that ends must equal the undisturbed one. Returns kills inside a write."""
    digest, seconds = run(folder / "whole", steps)
    chance = random.Random(hashlib.sha256(str(wanted).encode()).digest())
    kills = inside = ended = 0
    while kills < wanted or not ended:
        out = folder / f"killed{ended}"
        found, _ = run(out, steps, chance.uniform(0, seconds * 0.7) if kills < wanted else None)
        if found is None:
            kills += 1
            inside += any((out / "checkpoints").glob("*tmp*"))
        else:
            assert found == digest
            assert lines(out) == lines(folder / "whole")
            ended += 1
    if (folder / f"killed{ended}").exists():
        assert run(folder / f"killed{ended}", steps)[0] == digest
    return inside


def test_three_kills(tmp_path):
    survive(tmp_path, steps=12, wanted=3)


@pytest.mark.slow
def test_twenty_kills_some_inside_checkpoint_writes(tmp_path):
    assert survive(tmp_path, steps=80, wanted=22) >= 3
