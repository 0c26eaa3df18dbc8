"""Training over eight virtual devices, in every shape: the losses of one device, and a share of parameters and moments on each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("how", ["chosen", pytest.param("all", marks=pytest.mark.slow)])
def test_every_mesh_has_the_losses_of_one_device_and_a_share_of_the_state(how):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "tests.train.on_meshes", how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stdout + done.stderr
