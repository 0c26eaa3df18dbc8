"""Problems for the kernels' tests: static shapes, and traced data of every kind for them."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from dflax.kernels_pallas.block_attention import reference
from dflax.kernels_pallas.block_attention.sizes import Sizes
from dflax.kernels_pallas.block_attention.walk import FAR, Case, Where

SIZES = Sizes(32, 128, 16)


@dataclass(frozen=True)
class Shape:
    """Everything static: one compiled program each."""

    B: int = 2
    N: int = 1
    T: int = 5
    G: int = 2
    Hkv: int = 2
    D: int = 32
    S: int = 256
    L: int = 2
    kind: Literal["full", "causal", "array"] = "full"
    soft_cap: float | None = None
    hole: bool = False
    cut: Sizes | None = SIZES
    """None: the table's."""

    @property
    def case(self) -> Case:
        return Case(self.kind, self.D**-0.5, self.soft_cap)


def arrays(shape: Shape, draw: np.random.Generator, dtype=jnp.float32):
    normal = lambda *size: jnp.asarray(draw.standard_normal(size), dtype)
    context, block = (shape.L, shape.B, shape.Hkv, shape.S, shape.D), (shape.B, shape.N, shape.T, shape.Hkv, shape.D)
    q = normal(shape.B, shape.N, shape.T, shape.Hkv * shape.G, shape.D)
    return q, normal(*context), normal(*context), normal(*block), normal(*block)


def where(shape: Shape, draw: np.random.Generator, length: int | None = None, window: int = FAR) -> Where:
    """length: the same for all rows; None: drawn, 0 and full among them. Anchors come sorted and not, trees with depths as positions."""
    rows = (shape.B, shape.N)
    ints = lambda low, high, size=rows: jnp.asarray(draw.integers(low, high, size), jnp.int32)
    lengths = draw.integers(0, shape.S + 1, rows) if length is None else np.full(rows, length)
    if length is None:
        lengths[draw.random(rows) < 0.2] = 0
        lengths[draw.random(rows) < 0.2] = shape.S
        if draw.random() < 0.5:
            lengths = np.sort(lengths, axis=1)
    ctx_len = jnp.asarray(lengths, jnp.int32)
    start = jnp.where(jnp.asarray(draw.random(rows) < 0.5), 0, jnp.minimum(ints(0, shape.S + 1), ctx_len))
    step, mask, hole = jnp.arange(shape.T, dtype=jnp.int32), None, None
    if shape.kind == "array":
        mask = jnp.asarray(draw.random((*rows, shape.T, shape.T)) < 0.4)
        step = jnp.asarray(np.minimum.accumulate(draw.integers(0, shape.T, shape.T)[::-1])[::-1].copy(), jnp.int32)
    if shape.hole:
        low = ints(0, shape.S + 1)
        hole = jnp.stack([low, low + ints(-2, shape.S // 2 + 1)], axis=-1)
    blk_len = jnp.where(jnp.asarray(draw.random(rows) < 0.5), shape.T, ints(0, shape.T + 1))
    layer, q_pos = jnp.int32(draw.integers(shape.L)), ctx_len[..., None] + step
    return Where(layer, start, ctx_len, q_pos, mask, hole, blk_len, jnp.int32(window))


def by_definition(shape: Shape, given, where: Where):
    case = shape.case
    mask = where.mask if case.kind == "array" else case.kind
    return reference.attend(*given, where.layer, where.ctx_start, where.ctx_len, where.q_pos, mask, where.hole, where.blk_len,
                            where.window, case.scale, case.soft_cap)  # fmt: skip
