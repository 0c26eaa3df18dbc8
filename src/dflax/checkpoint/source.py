"""Where tensors come from: what `fill` asks of a checkpoint, whatever its format."""

from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class TensorSource(Protocol):
    """An open checkpoint. Names are Hugging Face names; nothing is read before it is asked for."""

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        ...

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part that `index` (slices of the leading axes, step 1) selects, in the stored dtype (bfloat16 is ml_dtypes')."""
        ...

    def close(self) -> None:
        """Lets go of the files."""
        ...
