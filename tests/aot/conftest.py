"""Compilers for chips that are not here: `make test-aot` installs them, elsewhere these tests say why they do not run."""

import importlib.util

import jax
import pytest

from dflax.kernels_pallas import chips

# A cached program has no HLO text, and ahead-of-time compilation is what is tested.
jax.config.update("jax_enable_compilation_cache", False)


def devices(name):
    """Compile-only devices. `make test-aot` installs both compilers before it begins, so nothing is passed over there."""
    module = "jax_cuda13_plugin" if name.startswith("h") else "libtpu"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (make test-aot)")
    return chips.topology(name)


@pytest.fixture(scope="module", params=["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "h100:4"])
def topology(request):
    """Four of them."""
    return devices(request.param)
