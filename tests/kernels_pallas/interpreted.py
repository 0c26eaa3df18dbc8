"""The public function with a platform's kernels in it, interpreted: for tests of all that surrounds the kernels."""

from contextlib import contextmanager
from functools import partial

import jax
import pytest

from dflax.kernels_pallas.block_attention import gpu, gpu_backward, tpu, tpu_backward

KERNELS = {"tpu": ("tpu", tpu, tpu_backward), "gpu": ("cuda", gpu, gpu_backward)}


@contextmanager
def interpreted(platform):
    """Every attention that is traced now, its gradient too, is this platform's. Gives a list that fills with the shapes of q."""
    lowered, forward, backward = KERNELS[platform]
    choose, traced = jax.lax.platform_dependent, []

    def chosen(*arguments, **branches):
        if lowered not in branches:  # somebody else's choice
            return choose(*arguments, **branches)
        traced.append(arguments[0][0].shape)
        return branches[lowered](*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "forward", partial(forward.forward, interpret=True))
        patch.setattr(backward, "backward", partial(backward.backward, interpret=True))
        patch.setattr(jax.lax, "platform_dependent", chosen)
        yield traced
