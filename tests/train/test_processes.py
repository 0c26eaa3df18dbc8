"""Two real processes that train together: the same curve as one, and unbroken where one of them is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dflax import processes
from dflax.errors import DflaxError
from dflax.train import metrics
from tests.train.one_of_two import STEPS

MESH = "data=2,fsdp=2"


def start(
    out: Path, pause: float, index: int | None, port: int = 0, devices: int = 2, then: str = ""
) -> subprocess.Popen:
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    distributed = "" if index is None else f"127.0.0.1:{port},2,{index}"
    command = [sys.executable, "-m", "tests.train.one_of_two", distributed, MESH, str(out), str(pause), then]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pair(out: Path, pause: float, then: str = "") -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [start(out, pause, index, port, then=then) for index in (0, 1)]


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
    single = start(alone, 0.0, None, devices=4, then="speculate")
    running = pair(together, 0.4)
    waited = time.monotonic() + 240
    while not (together / "checkpoints" / "4" / "commit_success.txt").exists():
        assert time.monotonic() < waited, [process.poll() for process in running]
        assert all(process.poll() is None for process in running), [process.communicate()[0] for process in running]
        time.sleep(0.05)
    running[1].send_signal(signal.SIGKILL)
    for process in running:  # the other one waits for it in vain
        process.kill()
        process.communicate()
    assert not (together / "checkpoints" / str(STEPS)).exists()
    end(single, *pair(together, 0.0, then="speculate"))
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
