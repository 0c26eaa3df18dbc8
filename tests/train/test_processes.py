"""Two real processes that train together: the same curve as one, and unbroken where one of them is killed."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dflax import processes
from dflax.errors import DflaxError
from dflax.models import params
from dflax.train import metrics
from tests.infer.tiny import random_model, target_config
from tests.train.one_of_two import DAMAGED, STEPS

MESH = "data=2,fsdp=2"


def start(
    out: Path, pause: float, index: int | None, port: int = 0, devices: int = 2, damaged: Path | str = ""
) -> subprocess.Popen:
    """damaged: afterwards it speculates, and must refuse the model in this folder."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    distributed = "" if index is None else f"127.0.0.1:{port},2,{index}"
    command = [sys.executable, "-m", "tests.train.one_of_two", distributed, MESH, str(out), str(pause), str(damaged)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pair(out: Path, pause: float, damaged: Path | str = "") -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [start(out, pause, index, port, damaged=damaged) for index in (0, 1)]


def end(*running: subprocess.Popen) -> None:
    for process in running:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said


def curve(out: Path) -> list[float]:
    """Losses, and what was evaluated."""
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/distance" in row] == [4, 8, 12]
    return [row[name] for name in ("loss", "eval/distance") for row in rows if name in row]


def test_one_of_two_is_killed_and_the_curve_is_unbroken(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    damaged = tmp_path / "damaged"
    model = random_model(target_config())
    weights = params.flatten(model.module)
    weights[DAMAGED] = weights[DAMAGED].at[-1].set(jnp.nan)
    dataclasses.replace(model, module=params.fill(model.module, weights)).save(damaged)
    single = start(alone, 0.0, None, devices=4, damaged=damaged)
    running = pair(together, 0.4)
    waited = time.monotonic() + 240
    while not (together / "checkpoints" / "4" / "commit_success.txt").exists():
        assert time.monotonic() < waited, [process.poll() for process in running]
        assert all(process.poll() is None for process in running), [process.communicate()[0] for process in running]
        time.sleep(0.05)
    running[1].kill()
    end(single)  # in that time the other one could have come to the end, too; but it waits in vain
    assert running[0].poll() != 0
    assert not (together / "checkpoints" / str(STEPS)).exists()
    running[0].kill()
    for process in running:
        process.communicate()
    end(*pair(together, 0.0, damaged=damaged))
    np.testing.assert_allclose(curve(together), curve(alone), rtol=1e-5)
    kept = [{int(path.name) for path in (out / "checkpoints").iterdir()} for out in (alone, together)]
    assert kept[0] == kept[1] == {4, 10, 12}  # the best, which is the first evaluated, and the last two
    want = np.load(alone / "trained-0.npz")
    for index in (0, 1):
        got = np.load(together / f"trained-{index}.npz")
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_both_stop_at_one_step_when_one_of_them_is_told_to(tmp_path):
    running = pair(tmp_path, 0.4)
    waited = time.monotonic() + 240
    while not (tmp_path / "checkpoints" / "2" / "commit_success.txt").exists():
        assert time.monotonic() < waited, [process.poll() for process in running]
        time.sleep(0.05)
    running[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=240)[0] for process in running]
    steps = [re.findall(r"stopped by SIGTERM at step (\d+) of", text) for text in said]
    assert steps[0] == steps[1], said
    assert len(steps[0]) == 1, said
    assert 2 < int(steps[0][0]) < STEPS
    assert (tmp_path / "checkpoints" / steps[0][0] / "commit_success.txt").exists()
    end(*pair(tmp_path, 0.0))
    assert len(curve(tmp_path)) == STEPS + 3


@pytest.mark.parametrize("text", ["here", "host,2,0", "host:1,2,2", "host:1,2", "host:1,2,-1"])
def test_a_wrong_place_is_named(text):
    with pytest.raises(DflaxError, match=r"must be \"\", \"auto\" or HOST:PORT,COUNT,INDEX"):
        processes.join(text)


def test_a_process_alone_joins_nobody():
    processes.join("")
