"""The vocabulary's tables cut over 8 devices: the numbers of one device, and nothing vocabulary-sized gathered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("what", ["numbers", "sent"])
def test_on_eight_devices(what):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "tests.models.on_eight", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stdout + done.stderr
