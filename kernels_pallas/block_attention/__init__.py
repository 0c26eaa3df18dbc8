"""Attention of a block of queries over a stretch of cached context and the block itself: the one op of this library."""

from dflax.kernels_pallas.block_attention.api import NO_WINDOW, block_attention

__all__ = ["NO_WINDOW", "block_attention"]
