"""dflax: language models that emit whole blocks of tokens per step, in JAX.

The public API is listed here and imported on first use, so that `import dflax` and `dflax --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dflax.errors import DflaxError

if TYPE_CHECKING:
    from dflax import controllers, policies
    from dflax.infer.canvas import Cache
    from dflax.infer.diffuse import denoise
    from dflax.infer.endings import EndOfText
    from dflax.infer.extrapolation import ConfidenceExtrapolation
    from dflax.infer.generate import generate, speculate
    from dflax.infer.streaming import stream
    from dflax.model import Model, load
    from dflax.sharding import make_mesh

__version__ = "0.1.0"

_HOME = {
    "Cache": "dflax.infer.canvas",
    "ConfidenceExtrapolation": "dflax.infer.extrapolation",
    "EndOfText": "dflax.infer.endings",
    "denoise": "dflax.infer.diffuse",
    "load": "dflax.model",
    "make_mesh": "dflax.sharding",
    "Model": "dflax.model",
    "generate": "dflax.infer.generate",
    "speculate": "dflax.infer.generate",
    "stream": "dflax.infer.streaming",
}

__all__ = [
    "Cache",
    "ConfidenceExtrapolation",
    "DflaxError",
    "EndOfText",
    "Model",
    "__version__",
    "controllers",
    "denoise",
    "generate",
    "load",
    "make_mesh",
    "policies",
    "speculate",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name in ("controllers", "policies"):
        return importlib.import_module(f"dflax.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'dflax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
