"""From a checkpoint to device arrays, leaf by leaf: at no time is there a second copy of the model in memory.

With a sharding each device's part is read on its own, so that a process touches only the bytes that it keeps.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from dflax.checkpoint.source import TensorSource
from dflax.errors import DflaxError
from dflax.families import TensorRule

Index = tuple[slice, ...]

# Tensors that some exporters write and no computation needs: RoPE's inverse frequencies are a function of the config.
IGNORED = ("*rotary_emb.inv_freq", "*rope_freqs*")
SHOWN = 8  # how many problems an error spells out


def fill(
    shapes: Mapping[str, tuple[int, ...]],
    rules: Mapping[str, TensorRule],
    source: TensorSource,
    dtype: jax.typing.DTypeLike = "float32",
    sharding: Sharding | Callable[[str], Sharding] | None = None,
    ignore: Iterable[str] = (),
    check_finite: bool = True,
) -> dict[str, jax.Array]:
    """Reads every parameter named in `shapes` into a device array.

    Args:
      shapes: dotted module path -> shape of the parameter.
      rules: dotted module path -> names of the tensors that hold it. A name may carry or lack the prefix "model.".
      source: the open checkpoint.
      dtype: of the arrays.
      sharding: None (default device), one sharding for all, or a function of the path.
      ignore: glob patterns of tensor names that may be there without use (a head that is tied, for example).
      check_finite: refuse NaN and infinite weights by name.

    Returns:
      dotted module path -> array of the asked shape, dtype and sharding.

    Raises:
      DflaxError: one line with every missing, unexpected or misshapen tensor; or the tensors that are not finite, in all processes that
        share the arrays, whichever of them reads the bad part.
    """
    places = match(shapes, rules, source, ignore)
    bad: set[str] = set()

    def read(path: str, index: Index) -> np.ndarray:
        parts = _parts(places[path], rules[path].stacked, shapes[path], index)
        out = np.empty(_extent(shapes[path], index), dtype)
        for slot, name, part in parts:
            values = source.read(name, part)
            if not jax.numpy.issubdtype(values.dtype, jax.numpy.floating):
                raise DflaxError(f"{name} holds {values.dtype}; weights are floating-point numbers")
            if check_finite and not _finite(values):
                bad.add(name)
            out[slot] = values
        return out

    leaves = {path: _put(path, shapes[path], lambda index, path=path: read(path, index), sharding) for path in shapes}
    if check_finite and not all(leaf.is_fully_addressable for leaf in leaves.values()):
        names = sorted({name for found in places.values() for name in found})
        seen = multihost_utils.process_allgather(np.array([name in bad for name in names]))
        bad = {name for name, flag in zip(names, seen.any(axis=0), strict=True) if flag}
    if bad:
        raise DflaxError(
            f"weights are not finite (NaN or infinity) in {_listed(sorted(bad))}; the checkpoint is damaged"
        )
    return leaves


def match(
    shapes: Mapping[str, tuple[int, ...]],
    rules: Mapping[str, TensorRule],
    source: TensorSource,
    ignore: Iterable[str] = (),
) -> dict[str, tuple[str, ...]]:
    """Dotted path -> the names under which the source has its tensors. Reads headers only; arguments and error as for `fill`."""
    known = (*IGNORED, *ignore)
    if unruled := sorted(set(shapes) - set(rules)):
        raise DflaxError(f"no tensor name is known for the parameters {_listed(unruled)}")
    present = set(source.names())
    places, used, missing, misshapen = {}, set(), [], []
    for path, shape in shapes.items():
        rule = rules[path]
        wanted = shape[1:] if rule.stacked else shape
        if rule.stacked and len(rule.names) != shape[0]:
            raise DflaxError(f"{path} stacks {shape[0]} tensors but {len(rule.names)} names are given")
        found = []
        for name in rule.names:
            here = next((n for n in _spellings(name) if n in present), None)
            if here is None:
                missing.append(name)
                continue
            found.append(here)
            if source.shape(here) != wanted:
                misshapen.append(f"{here} has shape {list(source.shape(here))}, the config asks for {list(wanted)}")
        used.update(found)
        places[path] = tuple(found)
    extra = sorted(n for n in present - used if not any(fnmatchcase(n, pattern) for pattern in known))
    problems = []
    if missing:
        close = difflib.get_close_matches(missing[0], extra, 1)
        problems.append(f"missing {_listed(missing)}" + (f" (is it {close[0]}?)" if close else ""))
    if extra:
        problems.append(f"unexpected {_listed(extra)}")
    if misshapen:
        problems.append(
            "; ".join(misshapen[:SHOWN]) + (f"; and {len(misshapen) - SHOWN} more" if len(misshapen) > SHOWN else "")
        )
    if problems:
        raise DflaxError(f"the checkpoint's tensors do not fit its config: {'; '.join(problems)}")
    return places


def named(leaves: Mapping[str, jax.Array], rules: Mapping[str, TensorRule]) -> dict[str, np.ndarray]:
    """The way back: dotted path -> array becomes tensor name -> array on the host, stacked leaves taken apart."""
    out = {}
    for path, leaf in leaves.items():
        host = np.asarray(leaf)
        rule = rules[path]
        out.update(zip(rule.names, host, strict=True) if rule.stacked else [(rule.names[0], host)])
    return out


def _put(
    path: str,
    shape: tuple[int, ...],
    read: Callable[[Index], np.ndarray],
    sharding: Sharding | Callable[[str], Sharding] | None,
) -> jax.Array:
    if sharding is None:
        return jax.device_put(read(tuple(slice(0, n) for n in shape)))
    where = sharding if isinstance(sharding, Sharding) else sharding(path)
    return jax.make_array_from_callback(shape, where, lambda index: read(index or ()))


OTHER_NAMES = (("layers.0.", "midlayer."), ("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc."))
"""Prefixes that some exporters of drafters write instead of the official ones."""


def _spellings(name: str) -> list[str]:
    """The names under which a tensor may stand: with "model." or without, and those of other exporters."""
    bare = name.removeprefix("model.")
    other = [there + bare.removeprefix(here) for here, there in OTHER_NAMES if bare.startswith(here)]
    return [name, *(f"{prefix}{n}" for n in (bare, *other) for prefix in ("", "model."))]


def _extent(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(n))) for part, n in zip(index, shape, strict=True))


def _parts(
    names: tuple[str, ...], stacked: bool, shape: tuple[int, ...], index: Index
) -> list[tuple[int | slice, str, Index]]:
    """What to read for `index` of a leaf: (place in the result, tensor, slices of the tensor)."""
    if not stacked:
        return [(slice(None), names[0], index)]
    chosen = range(*index[0].indices(shape[0]))
    return [(slot, names[i], index[1:]) for slot, i in enumerate(chosen)]


def _finite(values: np.ndarray) -> bool:
    if values.dtype.name == "bfloat16":  # numpy has no fast path: all exponent bits set means NaN or infinity
        return not np.any((values.view(np.uint16) & 0x7F80) == 0x7F80)
    return bool(np.all(np.isfinite(values)))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
