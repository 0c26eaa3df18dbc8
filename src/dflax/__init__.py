"""dflax: language models that emit whole blocks of tokens per step, in JAX.

The public API is listed here and imported on first use, so that `import dflax` and `dflax --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dflax.errors import DflaxError

if TYPE_CHECKING:
    from dflax.infer.generate import generate, speculate, stream
    from dflax.model import Model, load

__version__ = "0.1.0"

_HOME = {
    "load": "dflax.model",
    "Model": "dflax.model",
    "generate": "dflax.infer.generate",
    "speculate": "dflax.infer.generate",
    "stream": "dflax.infer.generate",
}

__all__ = ["DflaxError", "Model", "__version__", "generate", "load", "speculate", "stream"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dflax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
