"""One program in several processes, one a host: who they are, told by the cluster or by hand."""

import re
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflax.errors import DflaxError


def join(text: str) -> None:
    """Makes this process one of several, before anything is computed.

    text: "" is a process alone; "auto" lets TPU slices, Slurm and Open MPI say who is who; "HOST:PORT,COUNT,INDEX" names the address of
    the first process, their number and this one's place. Joining again is nothing.

    Raises DflaxError for another text, or where the others cannot be reached.
    """
    if not text or jax.distributed.is_initialized():
        return
    options = {}
    if text != "auto":
        match = re.fullmatch(r"(?P<host>[^,\s]+:\d+),(?P<count>\d+),(?P<index>\d+)", text)
        if match is None or int(match["index"]) >= int(match["count"]):
            raise DflaxError(
                f'distributed is {text!r}; it must be "", "auto" or HOST:PORT,COUNT,INDEX such as 10.0.0.1:8476,4,0'
            )
        options = {
            "coordinator_address": match["host"],
            "num_processes": int(match["count"]),
            "process_id": int(match["index"]),
        }
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise DflaxError(f"distributed {text!r}: {' '.join(str(error).split())[:300]}") from error


def everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """Host arrays, the same in every process, as arrays that a program over the mesh takes: whole on each of its devices where several
    processes share it, on the default device of a process alone."""
    if mesh is None or jax.process_count() == 1:
        return jax.device_put(tree)
    place = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> jax.Array:
        host = np.asarray(jax.device_put(leaf))  # as jit would take it: plain numbers become 32 bits wide
        return jax.make_array_from_callback(host.shape, place, lambda at: host[at])

    return jax.tree.map(put, tree)


def fetch(tree: Any) -> Any:
    """Device arrays as numpy, whole in every process: all of them call it together."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def get(leaf: jax.Array) -> np.ndarray:
        here = leaf.is_fully_addressable or leaf.is_fully_replicated
        return np.asarray(leaf if here else multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(get, tree)


def agreed(values: dict[str, float]) -> dict[str, float]:
    """The first process' numbers, bit for bit, in all of them: what they decide together must not hang on a rounding."""
    if jax.process_count() == 1:
        return values
    bits = np.array(list(values.values()), np.float64).view(np.int32)
    first = np.asarray(multihost_utils.broadcast_one_to_all(bits), np.int32).view(np.float64)
    return dict(zip(values, first.tolist(), strict=True))
