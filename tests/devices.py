"""Part of a test in a process of its own: the number of virtual devices is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path


def on_devices(count, module, *arguments):
    """`python -m module arguments` on `count` devices of the CPU, with exact matrix products; it must end well. Returns what ended."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
