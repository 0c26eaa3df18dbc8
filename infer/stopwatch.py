"""Times of calls that share a machine: every call in turn, again and again, and the median of each."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_CALLS = 1000


def seconds(calls: Mapping[str, Callable[[], Any]], repeats: int, at_least: float) -> dict[str, float]:
    """Name -> median seconds of a call, when all have been compiled.

    A turn enqueues a call as often as makes `at_least` seconds and waits once, so that what it takes to enqueue does not count. Turns go
    round among the calls: what else the machine does falls on all alike.
    """
    counts = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        once = _turn(call, 1)
        counts[name] = int(np.clip(np.ceil(at_least / max(once, 1e-9)), 1, MOST_CALLS))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            taken[name].append(_turn(calls[name], counts[name]) / counts[name])
    return {name: float(np.median(times)) for name, times in taken.items()}


def _turn(call: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    out = None
    for _ in range(count):
        out = call()
    jax.block_until_ready(out)
    return time.perf_counter() - begin


def ceilings(dtype: str, copied: int, side: int, repeats: int, at_least: float) -> dict[str, float]:
    """What this machine's device reaches by itself: "bytes" a second, read and written, of a pass over `copied` bytes, and "flops" a second
    of the product of two square matrices of `side`."""
    long = jnp.ones((copied // jnp.dtype(dtype).itemsize,), dtype)
    square = jax.random.normal(jax.random.key(0), (side, side), dtype)
    copy, product = jax.jit(lambda x: x + 1), jax.jit(lambda x: x @ x)
    found = seconds({"copy": lambda: copy(long), "product": lambda: product(square)}, repeats, at_least)
    return {"bytes": 2 * long.nbytes / found["copy"], "flops": 2 * side**3 / found["product"]}
