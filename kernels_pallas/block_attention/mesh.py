"""The kernels on a mesh: every device attends for its own rows and heads, without a word to the others.

The compiler cannot cut a kernel. So where the arrays of a call lie on a mesh of the project's axes (`dflax.sharding`), which their types
say while a program is traced, the kernel is wrapped in a `shard_map` over batch and kv heads.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dflax import sharding
from dflax.kernels_pallas.block_attention.walk import Where

QUERIES = "batch", None, None, "kv_heads", None
CACHE = None, "batch", "kv_heads", None, None
LAYER = "batch", "kv_heads", None, None
STATISTICS = "batch", None, None, "kv_heads"

ARRAYS = QUERIES, CACHE, CACHE, QUERIES, QUERIES
OUTPUTS = QUERIES, STATISTICS
GRADIENTS = QUERIES, LAYER, LAYER, QUERIES, QUERIES


def sharded(function: Callable[..., Any], arrays: Any, where: Where, more: Any, results: Any) -> Any:
    """function(*arrays, where, *more), on each device for its part.

    arrays: q, k_ctx, v_ctx, k_blk, v_blk. more: nothing, or output, statistics and gradient. results: logical axes of what comes back.
    """
    q, k_ctx = arrays[:2]
    mesh = jax.typeof(q).sharding.mesh
    ours = set(sharding.MESH_AXES) <= set(mesh.axis_names) and AxisType.Manual not in mesh.axis_types
    if not ours or mesh.size == 1:
        return function(*arrays, where, *more)
    sizes = {"batch": q.shape[0], "kv_heads": k_ctx.shape[2], None: 1}
    # Query heads go with their kv head; what an axis does not divide is computed by all of it.
    place = {name: sharding.spec((name,), (size,), mesh)[0][0] for name, size in sizes.items()}
    cut = lambda axes: P(*(place[name] for name in axes))
    rows = P(place["batch"])
    in_where = Where(*(None if x is None else P() if x.ndim == 0 else rows for x in where))
    in_specs = (*map(cut, ARRAYS), in_where, *map(cut, (QUERIES, STATISTICS, QUERIES)[: len(more)]))
    out_specs = tuple(map(cut, results))
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        *arrays, where, *more
    )
