"""Training over eight virtual devices, in every shape: the losses of one device, and a share of parameters and moments on each."""

import pytest

from tests.devices import on_devices


@pytest.mark.parametrize("how", ["chosen", pytest.param("all", marks=pytest.mark.slow)])
def test_every_mesh_has_the_losses_of_one_device_and_a_share_of_the_state(how):
    assert on_devices(8, "tests.train.on_meshes", how).stdout == "equal\n"
