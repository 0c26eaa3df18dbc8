"""The kernels on a mesh: every device attends for its own rows and heads (`dflax.sharding.each_device`)."""

from collections.abc import Callable
from typing import Any

from dflax import sharding
from dflax.kernels_pallas.block_attention.walk import Where

QUERIES = "batch", None, None, "kv_heads", None  # query heads go with their kv head
CACHE = None, "batch", "kv_heads", None, None
LAYER = "batch", "kv_heads", None, None
STATISTICS = "batch", None, None, "kv_heads"

ARRAYS = QUERIES, CACHE, CACHE, QUERIES, QUERIES
OUTPUTS = [QUERIES, STATISTICS]
GRADIENTS = [QUERIES, LAYER, LAYER, QUERIES, QUERIES]


def sharded(function: Callable[..., Any], arrays: Any, where: Where, more: Any, results: list[Any]) -> Any:
    """function(*arrays, where, *more), on each device for its part.

    arrays: q, k_ctx, v_ctx, k_blk, v_blk. more: nothing, or output, statistics and gradient. results: logical axes of what comes back.
    """
    rows = Where(*(None if x is None else () if x.ndim == 0 else ("batch",) for x in where))
    axes = (*ARRAYS, rows, *(QUERIES, STATISTICS, QUERIES)[: len(more)])
    sizes = {"batch": arrays[0].shape[0], "kv_heads": arrays[1].shape[2]}
    parts = (*arrays, where, *more)
    return tuple(sharding.each_device(lambda *parts: list(function(*parts)), parts, axes, results, sizes))
