"""A mesh from a string, and one table from logical axes to mesh axes.

Mesh axes: `data` (replicas), `fsdp` (parameters cut over their embedding axis), `tensor` (heads, feed-forward, vocabulary). They are Auto
axes, stated explicitly because `jax.make_mesh` makes Explicit ones by default: the compiler places what is not constrained.
An axis that does not divide a dimension is dropped for that dimension: the array is replicated there, and the report says so.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dflax.errors import DflaxError

MESH_AXES = ("data", "fsdp", "tensor")

LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "row": ("data", "fsdp", "tensor"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "feed_forward": ("tensor",),
    "vocab": ("tensor",),
    "vocab_slice": ("tensor", "fsdp"),
    "expert": ("tensor",),
    "layers": (),
    "length": (),
    "head_dim": (),
}


PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens.weight": ("vocab", "embed"),
    "lm_head.weight": ("vocab", "embed"),
    "q_proj.weight": ("heads", "embed"),
    "k_proj.weight": ("kv_heads", "embed"),
    "v_proj.weight": ("kv_heads", "embed"),
    "o_proj.weight": ("embed", "heads"),
    "gate_proj.weight": ("feed_forward", "embed"),
    "up_proj.weight": ("feed_forward", "embed"),
    "down_proj.weight": ("embed", "feed_forward"),
    "fc.weight": ("embed", None),
    "input_proj.weight": ("embed", None),
}
"""Logical axes of a module's parameters by the end of their path; others (norms, biases, routers) are whole everywhere. Stacked experts
have the expert axis in front."""


def parameter_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """Logical axes of the parameter at a dotted path."""
    axes = PARAMETER_AXES.get(".".join(path.split(".")[-2:]), (None,) * ndim)
    return axes if len(axes) == ndim else ("expert", *axes)


def axes_of(parameters: Mapping[str, Any]) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of a module's parameters (arrays or shapes) by dotted path, for `tree_shardings`."""
    return {path: parameter_axes(path, leaf.ndim) for path, leaf in parameters.items()}


def parameter_sharding(mesh: Mesh, shapes: Mapping[str, Sequence[int]]) -> Callable[[str], NamedSharding]:
    """Where each parameter of a module lies: dotted path -> NamedSharding, for the paths in `shapes`."""
    return lambda path: NamedSharding(mesh, spec(parameter_axes(path, len(shapes[path])), shapes[path], mesh)[0])


def not_cut(mesh: Mesh | AbstractMesh, shapes: Mapping[str, Sequence[int]], kv_heads: int | None = None) -> list[str]:
    """A line for everything of a model that the mesh does not divide, so that each device holds it whole along that axis.

    shapes: of its parameters by dotted path. kv_heads: their number; where they are not divided, every device has the whole cache of a
    decoding loop and attends for all heads. (The projections to keys and values are cut by features all the same, through a head.)
    """
    lines = [line for path, shape in shapes.items() for line in spec(parameter_axes(path, len(shape)), shape, mesh)[1]]
    if kv_heads is not None:
        whole = spec(("kv_heads",), (kv_heads,), mesh)[1]
        lines += [f"{line}; every device has the whole cache and attends for all heads" for line in whole]
    return list(dict.fromkeys(lines))


def report_rows(rows: int, mesh: Mesh | AbstractMesh | None) -> None:
    """Logs, once for a number of rows, that the mesh does not divide those that are decoded together: every device computes them all."""
    for line in () if mesh is None else batch_spec((rows,), mesh)[1]:
        _log_once(line)


@cache
def _log_once(line: str) -> None:
    if jax.process_index() == 0:
        logging.getLogger("dflax").warning("mesh: %s", line)


def make_mesh(text: str = "", devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with Auto axes from "data=2,fsdp=4"; "" is one device. One axis may be -1: whatever the other axes leave.

    Axes that are not named have size 1, so every mesh has all of `MESH_AXES`. Raises DflaxError for an unknown axis, a size that is no
    number, or a product that is not the number of devices.
    """
    if not text.strip():
        devices = list(devices or jax.devices())[:1]
    devices = list(devices or jax.devices())
    sizes: dict[str, int] = dict.fromkeys(MESH_AXES, 1)
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in MESH_AXES:
            raise DflaxError(f"mesh {text!r}: unknown axis {name!r}; the axes are {', '.join(MESH_AXES)}")
        try:
            sizes[name] = int(size)
        except ValueError:
            raise DflaxError(f"mesh {text!r}: {part!r} should read {name}=NUMBER") from None
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise DflaxError(f"mesh {text!r}: sizes are positive, and at most one is -1")
    if free:
        sizes[free[0]] = len(devices) // math.prod(size for size in sizes.values() if size != -1)
    if math.prod(sizes.values()) != len(devices):
        shape = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise DflaxError(f"mesh {text!r}: {shape} does not make the {len(devices)} devices there are")
    grid = np.asarray(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec, list[str]]:
    """The PartitionSpec of an array with one logical axis name (or None) per dimension, and a line for each axis that had to be dropped."""
    if len(axes) != len(shape):
        raise DflaxError(f"{len(axes)} logical axes {tuple(axes)} for an array of shape {tuple(shape)}")
    parts: list[Any] = []
    dropped: list[str] = []
    used: set[str] = set()
    for logical, size in zip(axes, shape, strict=True):
        if logical is not None and logical not in LOGICAL_AXES:
            raise DflaxError(f"unknown logical axis {logical!r}; known: {', '.join(LOGICAL_AXES)}")
        wanted = LOGICAL_AXES[logical] if logical is not None else ()
        names = tuple(name for name in wanted if mesh.shape[name] > 1 and name not in used)
        ways = math.prod(mesh.shape[name] for name in names)
        if size % ways:
            dropped.append(f"{logical} of size {size} is replicated: {'*'.join(names)} = {ways} does not divide it")
            names = ()
        used.update(names)
        parts.append(names if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*parts), dropped


def fsdp_spec(shape: Sequence[int], mesh: Mesh | AbstractMesh) -> tuple[PartitionSpec, list[str]]:
    """For an array whose axes have no names: its largest dimension that `fsdp` divides is cut, vectors and scalars are replicated."""
    ways = mesh.shape["fsdp"]
    if ways == 1 or len(shape) < 2:
        return PartitionSpec(), []
    fitting = [i for i, size in enumerate(shape) if size % ways == 0]
    if not fitting:
        return PartitionSpec(), [f"shape {tuple(shape)} is replicated: fsdp = {ways} divides no dimension"]
    largest = max(fitting, key=lambda i: shape[i])
    return PartitionSpec(*("fsdp" if i == largest else None for i in range(len(shape)))), []


def gathered(weight: Any, path: str) -> Any:
    """A parameter as a layer of a training step uses it: whole over `fsdp`, still cut over `tensor`. Tables of the vocabulary stay cut
    (`dflax.models.vocabulary`)."""
    axes = parameter_axes(path, weight.ndim)
    return weight if axes[0] == "vocab" else laid(weight, [None if axis == "embed" else axis for axis in axes])


def laid(array: Any, axes: Sequence[str | None]) -> Any:
    """An array of a traced program, with one logical axis name (or None) per dimension, in its place on the mesh that its type names."""
    mesh = mesh_of(array)
    if mesh is None:
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec(axes, array.shape, mesh)[0]))


def tree_shardings(tree: Any, mesh: Mesh, axes: Any = None) -> tuple[Any, list[str]]:
    """A NamedSharding for every leaf of `tree` (arrays or ShapeDtypeStructs) and the report of what is replicated.

    `axes`, if given, maps a leaf's key path (`jax.tree_util.keystr`, simple, "/" between keys) to its logical axes; other leaves follow
    `fsdp_spec`.
    """
    report: list[str] = []

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        named = (axes or {}).get(name)
        found, dropped = fsdp_spec(leaf.shape, mesh) if named is None else spec(named, leaf.shape, mesh)
        report.extend(f"{name}: {line}" for line in dropped)
        return NamedSharding(mesh, found)

    return jax.tree_util.tree_map_with_path(place, tree), report


def batch_spec(shape: Sequence[int], mesh: Mesh | AbstractMesh) -> tuple[PartitionSpec, list[str]]:
    """First dimension over (data, fsdp); replicated, which is reported, if that does not divide it."""
    return spec(("batch", *(None,) * (len(shape) - 1)), shape, mesh) if shape else (PartitionSpec(), [])


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Arrays of the host, the same in every process, over the mesh: rows are cut, each process uploads only its own.

    Of arrays that are read where they are indexed (rows of a feature cache, memory-mapped) it reads only these too; others are in every
    process whole.
    """

    def put(array: Any) -> jax.Array:
        host = array if hasattr(array, "shape") else np.asarray(array)
        place = NamedSharding(mesh, batch_spec(host.shape, mesh)[0])
        return jax.make_array_from_callback(host.shape, place, lambda at: host[at])

    return jax.tree.map(put, batch)


def loop_sharding(leaf: Any, mesh: Mesh, batch: int) -> NamedSharding:
    """Where an array of a decoding loop's state lies (or one of its shape): a cache over batch and key/value heads, what has a row per
    prompt over the batch, the rest everywhere."""
    axes: tuple[str | None, ...] = (None,) * leaf.ndim
    if leaf.ndim == 5:  # a stacked cache [L, B, Hkv, S, D]
        axes = ("layers", "batch", "kv_heads", "length", "head_dim")
    elif leaf.ndim and leaf.shape[0] == batch:
        axes = ("batch", *axes[1:])
    return NamedSharding(mesh, spec(axes, leaf.shape, mesh)[0])


def place_loop_state(state: Any, mesh: Mesh, batch: int) -> Any:
    """The state with every array in its place, inside a jitted function."""
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, loop_sharding(leaf, mesh, batch)), state)


def mesh_of(array: Any) -> AbstractMesh | None:
    """The mesh that an array's type names while a program is traced; None without one of ours, on one device, or inside a shard_map."""
    mesh = jax.typeof(array).sharding.mesh
    ours = set(MESH_AXES) <= set(mesh.axis_names) and AxisType.Manual not in mesh.axis_types
    return mesh if ours and mesh.size > 1 else None


def each_device(
    function: Callable[..., Any], arguments: Sequence[Any], axes: Sequence[Any], results: Any, sizes: Mapping[str, int]
) -> Any:
    """function(*arguments), computed by every device for its own part, without a word to the others.

    For what the compiler cannot cut (kernels) or would gather (updates at traced places). The mesh is that of the first argument's type
    (`mesh_of`); without one the function runs as it is.

    Args:
      axes: for every argument the tuple of its dimensions' logical axes (None: whole), or a tree of such tuples.
      results: the same for what comes back.
      sizes: of every logical axis that is used. What the mesh does not divide is computed by all of its devices (`not_cut` and
        `report_rows` say so before).
    """
    mesh = mesh_of(arguments[0])
    if mesh is None:
        return function(*arguments)
    place = {name: spec((name,), (size,), mesh)[0][0] for name, size in sizes.items()} | {None: None}
    cut = lambda tree: jax.tree.map(
        lambda axes: PartitionSpec(*(place[name] for name in axes)), tree, is_leaf=lambda leaf: type(leaf) is tuple
    )
    return jax.shard_map(
        function, mesh=mesh, in_specs=tuple(map(cut, axes)), out_specs=cut(results), check_vma=False
    )(*arguments)  # fmt: skip
