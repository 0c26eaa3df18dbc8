"""Every caller of the op lowered for TPU and CUDA on a machine that has neither."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dflax.kernels_pallas.block_attention import block_attention
from dflax.sharding import MESH_AXES
from tests.kernels_pallas.calls import CALLS, Call, arguments, traced


@pytest.mark.parametrize("name", CALLS)
def test_lowers_for_every_platform(name):
    program = traced(CALLS[name])
    text = lambda platform: program.lower(lowering_platforms=(platform,)).as_text()
    assert text("tpu").count("@tpu_custom_call(") == CALLS[name].kernels
    assert text("cuda").count("@__gpu$xla.gpu.triton(") == CALLS[name].kernels
    assert "custom_call" not in text("cpu")


@pytest.mark.parametrize("gradient", [False, True])
def test_every_device_attends_for_its_rows_and_heads(gradient):
    call = Call(16, "causal", B=4, gradient=gradient)
    mesh = AbstractMesh((2, 1, 4), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    program = traced(call, lambda axes: NamedSharding(mesh, P(*axes)))
    for platform in ("tpu", "cuda"):
        text = program.lower(lowering_platforms=(platform,)).as_text()
        part = "tensor<2x2x2x4096x128xbf16>"  # half of the rows, a quarter of the kv heads
        calls = [line for line in text.splitlines() if "custom_call(" in line or "custom_call @" in line]
        calls = [line for line in calls if "tpu_custom_call" in line or "xla.gpu.triton" in line]
        assert sum(part in line for line in calls) == (3 if gradient else 1), platform


def test_a_layer_counted_from_the_end_is_the_same_program():
    """Kernels would read before the cache's beginning, which their interpreter forgives."""
    arrays, named = arguments(Call(16), lambda axes: None)

    def text(layer):
        attend = lambda arrays, named: block_attention(*arrays, layer=layer, mask="full", scale=1.0, **named)
        return jax.jit(attend).trace(arrays, named).lower(lowering_platforms=("cuda",)).as_text()

    assert text(-1) == text(1)
