"""Who sees what, for the kernels: intervals of columns per query row, and the walk of every query tile over the tiles it has to meet.

All masks but explicit ones are intervals. A query sees the context columns low <= s < high without gap_low <= s < gap_high: start and
length, the window and the hole, folded into four numbers. Of the block it sees blk_low <= key < blk_high, if positions and an explicit
mask (where there is one) agree. So nothing of the size queries x context is ever made, and a tile's walk follows from minima and
maxima over its rows: tiles nobody sees are left out of it, tiles everybody sees whole need no mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

LOW, HIGH, GAP_LOW, GAP_HIGH, BLK_LOW, BLK_HIGH, POSITION = range(7)
ROW_FIELDS = 8
"""Numbers per query row, in the order above; one is spare (eight fill a tile of the TPU's memory)."""

FIRST, BEFORE, AGAIN, AFTER, ALL_LOW, ALL_HIGH, ANY_GAP_LOW, ANY_GAP_HIGH = range(8)
BLK_FIRST, BLK_COUNT, BLK_ALL_LOW, BLK_ALL_HIGH = range(8, 12)
TILE_FIELDS = 16
"""Numbers per query tile, in this order; four are spare.

Context tiles: BEFORE of them from FIRST on, then, behind the hole, AFTER of them from AGAIN on. Block tiles: BLK_COUNT from BLK_FIRST on.
Every row of the tile sees the columns ALL_LOW <= s < ALL_HIGH outside of ANY_GAP, and the block's keys BLK_ALL_LOW <= key < BLK_ALL_HIGH.
"""

FAR = 2**30
"""Past every column and position."""


class Case(NamedTuple):
    """What is static about a call."""

    kind: Literal["full", "causal", "array"]
    scale: float
    soft_cap: float | None

    @property
    def two_sided(self) -> bool:
        return self.kind != "causal"


class Where(NamedTuple):
    """Who sees whom: arguments of `block_attention`, the optional ones filled in except `hole`; `mask` only where explicit."""

    layer: Any
    ctx_start: Any
    ctx_len: Any
    q_pos: Any
    mask: Any
    hole: Any
    blk_len: Any
    window: Any


def rows_see(case: Case, where: Where, capacity: int) -> tuple[Int[Array, "F B N T"], Bool[Array, "B N"]]:
    """The row fields of every token, keys counted within its own block; and for which blocks the interval alone says it all."""
    q_pos, window = where.q_pos.astype(jnp.int32), jnp.minimum(where.window, FAR).astype(jnp.int32)
    token = jnp.arange(q_pos.shape[-1], dtype=jnp.int32)
    one = lambda x: jnp.broadcast_to(x[..., None].astype(jnp.int32), q_pos.shape)

    low = jnp.maximum(jnp.maximum(one(where.ctx_start), q_pos - window + 1), 0)
    high = jnp.minimum(one(where.ctx_len), capacity)
    if case.two_sided:
        high = jnp.minimum(high, q_pos + window)
    zero = jnp.zeros_like(q_pos)
    gap_low, gap_high = (zero, zero) if where.hole is None else (one(where.hole[..., 0]), one(where.hole[..., 1]))

    blk_low, blk_high = zero, one(where.blk_len)
    if case.kind == "causal":
        blk_high = jnp.minimum(blk_high, token + 1)
    elif case.kind == "array":
        seen = where.mask & (token < where.blk_len[..., None])[..., None, :]
        any_seen = seen.any(-1)
        blk_low = jnp.where(any_seen, jnp.argmax(seen, -1), 0).astype(jnp.int32)
        blk_high = jnp.where(any_seen, token.size - jnp.argmax(seen[..., ::-1], -1), 0).astype(jnp.int32)
    # Where positions count up by one, a window is an interval of keys as well. (Where they do not, in trees, they are compared.)
    in_line = (q_pos == q_pos[..., :1] + token).all(-1)
    blk_low = jnp.where(in_line[..., None], jnp.maximum(blk_low, token - window + 1), blk_low)
    if case.two_sided:
        blk_high = jnp.where(in_line[..., None], jnp.minimum(blk_high, token + window), blk_high)
    simple = in_line if case.kind != "array" else jnp.zeros_like(in_line)
    return jnp.stack([low, high, gap_low, gap_high, blk_low, blk_high, q_pos, zero]), simple


def tiles_walk(
    rows: Int[Array, "B t F n"], simple: Bool[Array, "B t n"], capacity: int, columns: int, keys: int
) -> Int[Array, "B t W"]:
    """The tile fields from the row fields of each tile; keys counted within the tile's group of blocks."""
    low, high, gap_low, gap_high, blk_low, blk_high = (rows[:, :, i] for i in range(POSITION))
    first, end = _hull(low, high)
    first, end = first // columns, -(-end // columns)
    stop, again = -(-gap_low.max(-1) // columns), gap_high.min(-1) // columns  # tiles inside everybody's gap
    stop, again = jnp.where(again > stop, stop, end), jnp.where(again > stop, again, end)
    before, again = jnp.clip(stop, first, end) - first, jnp.clip(again, first, end)
    after = end - again
    has_gap = gap_high > gap_low
    blk_first, blk_end = _hull(blk_low, blk_high)
    blk_first, blk_end = blk_first // keys, -(-blk_end // keys)
    fields = [
        first, before, jnp.minimum(again, max(-(-capacity // columns) - 1, 0)), after,
        low.max(-1), high.min(-1), jnp.where(has_gap, gap_low, FAR).min(-1), jnp.where(has_gap, gap_high, 0).max(-1),
        blk_first, blk_end - blk_first, blk_low.max(-1), jnp.where(simple, blk_high, 0).min(-1),
    ]  # fmt: skip
    fields += [jnp.zeros_like(first)] * (TILE_FIELDS - len(fields))
    return jnp.stack(fields, axis=-1)


def _hull(low: Array, high: Array) -> tuple[Array, Array]:
    """The smallest interval around all non-empty ones of the last axis; (0, 0) if there are none."""
    alive = high > low
    some = alive.any(-1)
    return (
        jnp.where(some, jnp.where(alive, low, FAR).min(-1), 0),
        jnp.where(some, jnp.where(alive, high, 0).max(-1), 0),
    )


@dataclass(frozen=True)
class Walk:
    """One query tile's walk: context tiles, in at most two stretches (before and after the hole), then block tiles.

    `read(i)` gives the tile's field i: a scalar from memory in a kernel, a column of the table outside of one.
    """

    read: Callable[[int], Any]

    @property
    def context_steps(self) -> Any:
        return self.read(BEFORE) + self.read(AFTER)

    @property
    def block_steps(self) -> Any:
        return self.read(BLK_COUNT)

    def context_tile(self, step: Any) -> Any:
        """Step 0 of a walk without context still names a tile that exists."""
        before = self.read(BEFORE)
        return jnp.where(step < before, self.read(FIRST) + step, self.read(AGAIN) + step - before)

    def block_tile(self, step: Any) -> Any:
        return self.read(BLK_FIRST) + step

    def meets_context(self, tile: Any) -> Any:
        first, before, again, after = (self.read(i) for i in (FIRST, BEFORE, AGAIN, AFTER))
        return ((tile >= first) & (tile < first + before)) | ((tile >= again) & (tile < again + after))

    def meets_block(self, tile: Any) -> Any:
        return (tile >= self.read(BLK_FIRST)) & (tile < self.read(BLK_FIRST) + self.read(BLK_COUNT))

    def sees_all_of_context(self, tile: Any, columns: int) -> Any:
        """Whether every row of the query tile sees every column of this tile."""
        begin, end = tile * columns, (tile + 1) * columns
        in_gap = (end > self.read(ANY_GAP_LOW)) & (begin < self.read(ANY_GAP_HIGH))
        return (begin >= self.read(ALL_LOW)) & (end <= self.read(ALL_HIGH)) & ~in_gap

    def sees_all_of_block(self, tile: Any, keys: int) -> Any:
        return (tile * keys >= self.read(BLK_ALL_LOW)) & ((tile + 1) * keys <= self.read(BLK_ALL_HIGH))


def visitors(meets: Bool[Array, "... t k"]) -> Int[Array, "... k 2"]:
    """For every key tile the first query tile that meets it, and how many follow up to the last one (0: nobody does)."""
    t = meets.shape[-2]
    some = meets.any(-2)
    first = jnp.where(some, jnp.argmax(meets, -2), 0)
    count = jnp.where(some, t - jnp.argmax(meets[..., ::-1, :], -2) - first, 0)
    return jnp.stack([first, count], axis=-1).astype(jnp.int32)


def sees_context(row: Callable[[int], Array], column: Array) -> Array:
    """Inside a kernel: `row(i)` is field i of the query rows and `column` the context's columns, one of them upright, the other lying."""
    in_gap = (column >= row(GAP_LOW)) & (column < row(GAP_HIGH))
    return (column >= row(LOW)) & (column < row(HIGH)) & ~in_gap


def sees_block(row: Callable[[int], Array], key: Array, position: Array, window: Array, two_sided: bool) -> Array:
    """The same for keys of the block and their positions, but for an explicit mask."""
    distance = row(POSITION) - position
    sees = (key >= row(BLK_LOW)) & (key < row(BLK_HIGH)) & (distance < window)
    return sees & (-distance < window) if two_sided else sees
