"""What surrounds the kernels in the public function: the custom gradient, a layer that is a number or data, meshes."""

import jax.numpy as jnp
import pytest

from tests.devices import on_devices
from tests.kernels_pallas import public

slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("layer", [-1, jnp.int32(1)], ids=["fixed", "traced"])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_output_and_gradients_by_kernels(platform, layer):
    public.check(platform, layer)


@pytest.mark.parametrize(
    ("platform", "mesh"),
    [("gpu", "data=2,tensor=2"), slow("gpu", "tensor=4"), slow("tpu", "data=2,tensor=2"), slow("tpu", "tensor=4")],
)
def test_output_and_gradients_on_a_mesh(platform, mesh):
    """Four virtual devices, which need a process of their own."""
    on_devices(4, "tests.kernels_pallas.public", platform, mesh)
