"""The vocabulary's tables cut over 8 devices: the numbers of one device, and nothing vocabulary-sized gathered."""

import pytest

from tests.devices import on_devices


@pytest.mark.parametrize("what", ["numbers", "sent"])
def test_on_eight_devices(what):
    assert on_devices(8, "tests.models.on_eight", what).stdout == "equal\n"
