"""Settings of every test: the CPU, exact matrix products, and run-time checks of all annotations of the package."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never waits for a network
# Tests compile more than they compute.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
# The older emitters of XLA compile in a third less time; jaxlib 0.12 refuses the flag as unknown.
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))

import jax  # noqa: E402  the settings above must come first
from jaxtyping import install_import_hook  # noqa: E402  as above: it imports jax

ROOT = Path(__file__).parent.parent

# The hook instruments what Python's own path finder finds, which the finder of an editable install is not. So the
# package is put on the path here, and its top-level folders (dflax.train = train/, ...) on the package's path.
install_import_hook("dflax", "beartype.beartype")
sys.path.insert(0, str(ROOT / "src"))

import dflax  # noqa: E402  the hook and the path above must come first

dflax.__path__.append(str(ROOT))

jax.config.update("jax_default_matmul_precision", "highest")

# Compiled programs are kept between runs. A bound on the size makes JAX lock the folder, which parallel test processes need.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
jax.config.update("jax_compilation_cache_max_size", 2**30)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
