"""The package as tests see it: lazily imported, one import package over several folders, annotations checked."""

import importlib
import subprocess
import sys

import pytest

import dflax


@pytest.mark.smoke
def test_import_is_quick_and_quiet() -> None:
    code = "import sys, dflax; assert 'jax' not in sys.modules, 'import dflax imports jax'"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd="/")


@pytest.mark.smoke
def test_public_names_resolve() -> None:
    for name in dflax.__all__:
        assert getattr(dflax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dflax.nonsense


def test_installed_and_checked_out_are_the_same_version() -> None:
    code = "import dflax, importlib.metadata as m; print(dflax.__version__, m.version('dflax'))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, cwd="/", capture_output=True, text=True).stdout
    assert printed.split() == [dflax.__version__] * 2


def test_annotations_are_checked_in_every_folder() -> None:
    for name in ("dflax", "dflax.models", "dflax.train", "dflax.infer", "dflax.kernels_pallas.block_attention"):
        loader = importlib.import_module(name).__loader__
        assert type(loader).__module__.startswith("jaxtyping"), f"{name} escapes the run-time checks of tests"
