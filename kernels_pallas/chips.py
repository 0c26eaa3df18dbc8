"""Chips by name: their published peaks, and compile-only devices for slices and servers of them that need not be there.

The real compilers run without the hardware: the TPU's comes with `libtpu` (extra `aot-tpu`), the GPU's with JAX's CUDA plugin (extra
`aot-gpu`, and whatever JAX for CUDA 12 or 13 has installed) and ptxas of the CUDA toolkit.
"""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from dflax.errors import DflaxError


@dataclass(frozen=True)
class Chip:
    """Peaks of one chip, published by its maker; nothing here is measured."""

    name: str
    platform: str
    """"tpu" or "cuda"."""
    flops: float
    """bfloat16 FLOP/s, dense."""
    bandwidth: float
    """Bytes/s of its memory."""
    memory: float
    """Bytes of its memory."""
    link: float
    """Bytes/s that it sends to its neighbours, one direction, all links together."""
    source: str


TPU, NVIDIA = "cloud.google.com/tpu/docs", "NVIDIA's data sheet"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", 197e12, 819e9, 16.0 * 2**30, 200e9, f"{TPU}/v5e"),
        Chip("v5p", "tpu", 459e12, 2765e9, 95.0 * 2**30, 600e9, f"{TPU}/v5p"),
        Chip("v6e", "tpu", 918e12, 1640e9, 32.0 * 2**30, 400e9, f"{TPU}/v6e"),
        Chip("h100", "cuda", 989e12, 3350e9, 80e9, 450e9, f"{NVIDIA} (H100 SXM)"),
        Chip("h200", "cuda", 989e12, 4800e9, 141e9, 450e9, f"{NVIDIA} (H200 SXM)"),
        Chip("b200", "cuda", 2250e12, 8000e9, 180e9, 900e9, f"{NVIDIA} (HGX B200)"),
    )
}

TARGET_CONFIG = """
platform_name: "CUDA"
device_description_str: "{description}"
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
"""
"""What XLA:GPU wants to know of a GPU (stream_executor's GpuTargetConfigProto)."""

GPUS = {
    "h100": {"description": "NVIDIA H100 80GB HBM3", "cores": 132, "clock": 1.98, "major": 9},
    "h200": {"description": "NVIDIA H200", "cores": 132, "clock": 1.98, "major": 9},
    "b200": {"description": "NVIDIA B200", "cores": 148, "clock": 1.965, "major": 10},
}


@dataclass(frozen=True)
class Topology:
    """Compile-only devices, all of one chip."""

    name: str
    chip: Chip
    devices: tuple[Any, ...]


def topology(name: str) -> Topology:
    """From "v5e:4x4", "v5p:4x4x4", "v6e:8x8", "h100" (one) or "h100:8" (a server of eight).

    DflaxError if there is no such chip, no such slice, or the compiler is not installed.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise DflaxError(f"there is no chip {kind!r} in topology {name!r}; chips are {', '.join(CHIPS)}")
    chip = CHIPS[kind]
    if not re.fullmatch(r"\d+(x\d+){0,2}", shape or "1"):
        raise DflaxError(f"topology {name!r} should read CHIP:SHAPE, such as v5e:4x4, v5p:4x4x4, h100 or h100:8")
    if chip.platform == "tpu":
        _need("aot-tpu", "libtpu")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else it looks for a TPU host on the network
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a compiler needs no chip of its own
        options: dict[str, Any] = {"topology_name": f"{kind}:{shape or '1x1'}"}
    else:
        _need("aot-gpu", "jax_cuda13_plugin", "jax_cuda12_plugin")
        count = math.prod(map(int, (shape or "1").split("x")))
        fields = GPUS[kind] | {"bandwidth": int(chip.bandwidth), "memory": int(chip.memory)}
        options = {"target_config": TARGET_CONFIG.format(**fields), "topology": f"1x1x{count}"}
    try:
        made = topologies.get_topology_desc(platform=chip.platform, **options)
    except Exception as error:  # the compilers' own errors, of many types
        raise DflaxError(f"no compiler for topology {name!r}: {' '.join(str(error).split())[:200]}") from error
    return Topology(name, chip, tuple(made.devices))


def _need(extra: str, *modules: str) -> None:
    """Any one of the modules."""
    if not any(map(importlib.util.find_spec, modules)):
        raise DflaxError(
            f"the compiler for this chip is not installed: pip install 'dflax[{extra}]' (jax {jax.__version__})"
        )
