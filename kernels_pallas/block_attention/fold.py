"""From the op's arrays to the kernels' tiles and back, the same on both platforms.

The query heads of one kv head become rows beside the tokens: a tile is rows [(g, token), D] against keys [columns, D], two matrix
products. Short blocks that share a context are taken together as one group (training: many anchors), long ones are cut:

    q      [B, N, T, Hq, D]   -> [B, Hkv, tiles, R, D]
    k_blk  [B, N, T, Hkv, D]  -> [B, Hkv, groups * padded keys, D]

The context needs no folding, it is read where it lies.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflax.kernels_pallas.block_attention.sizes import Sizes
from dflax.kernels_pallas.block_attention.walk import (
    BLK_HIGH,
    BLK_LOW,
    FAR,
    Case,
    Walk,
    Where,
    rows_see,
    tiles_walk,
    visitors,
)


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def power(n: int, least: int = 16) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class Plan:
    """How one call is cut.

    Blocks N of T tokens go into `groups` of `blocks`; a group's queries into `q_tiles` tiles of `tokens`, with G heads each, padded to
    `rows`; its keys into `k_tiles` tiles of `keys`; the context into `c_tiles` tiles of `columns`, the last one perhaps partial. Queries
    and block keys have a head dimension padded to `head`.
    """

    N: int
    T: int
    S: int
    G: int
    D: int
    blocks: int
    tokens: int
    rows: int
    keys: int
    columns: int
    head: int

    @property
    def groups(self) -> int:
        return -(-self.N // self.blocks)

    @property
    def span(self) -> int:
        """Tokens of a group."""
        return self.blocks * self.T

    @property
    def q_tiles(self) -> int:
        return -(-self.span // self.tokens)

    @property
    def k_tiles(self) -> int:
        return -(-self.span // self.keys)

    @property
    def c_tiles(self) -> int:
        return -(-self.S // self.columns)

    @property
    def tiles(self) -> int:
        """Query tiles of a row of the batch."""
        return self.groups * self.q_tiles

    @property
    def partial(self) -> bool:
        """Whether the last context tile reaches past the context's end."""
        return self.S % self.columns != 0


def make_plan(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], sizes: Sizes, *, powers: bool) -> Plan:
    """For q [B, N, T, Hq, D] and a context [L, B, Hkv, S, D]. powers: everything a power of two (Triton), else tokens by eights (TPU)."""
    _, N, T, Hq, D = q_shape
    Hkv, S = kv_shape[2:4]
    G = Hq // Hkv
    most = max(sizes.rows // G, 1) if powers else max(sizes.rows // G // 8 * 8, 8)
    blocks = min(N, max(1, most // T))
    span = blocks * T
    tokens = -(-span // -(-span // most))  # tiles of equal size
    if powers:
        return Plan(
            N, T, S, G, D, blocks, tokens, power(tokens * G), min(sizes.keys, power(span)), sizes.columns, power(D)
        )
    tokens = up(tokens, 8)
    return Plan(N, T, S, G, D, blocks, tokens, tokens * G, min(sizes.keys, up(span, 16)), min(sizes.columns, S or 8), D)


@dataclass(frozen=True)
class Folded:
    """What the kernels read beside the context and what comes from the output's gradient."""

    q: Float[Array, "B Hkv tiles R D"]
    k_blk: Float[Array, "B Hkv all_keys D"]
    v_blk: Float[Array, "B Hkv all_keys D"]
    rows: Int[Array, "B tiles F R"]
    table: Int[Array, "B tiles W"]
    positions: Int[Array, "B key_tiles 1 keys"]
    mask: Int[Array, "B tiles k_tiles tokens keys"] | None
    window: Int[Array, " one"]
    layer: Int[Array, " one"]

    @property
    def walk(self) -> Walk:
        """Of all query tiles at once: fields [B, tiles]."""
        return Walk(lambda i: self.table[..., i])

    @property
    def block(self) -> list[Array]:
        """What is known of the block's keys; the mask only where it is explicit."""
        found = [self.k_blk, self.v_blk, self.positions]
        return found if self.mask is None else [*found, self.mask]

    def context_visitors(self, plan: Plan) -> Int[Array, "B c_tiles 2"]:
        """Which query tiles meet each context tile: the first and how many."""
        tile = jnp.arange(plan.c_tiles, dtype=jnp.int32)
        return visitors(Walk(lambda i: self.table[..., i, None]).meets_context(tile))

    def block_visitors(self, plan: Plan) -> Int[Array, "B key_tiles 2"]:
        """The same for the tiles of block keys of all groups, which only tiles of their group meet."""
        B = self.table.shape[0]
        table = self.table.reshape(B, plan.groups, plan.q_tiles, -1)
        tile = jnp.arange(plan.k_tiles, dtype=jnp.int32)
        found = visitors(Walk(lambda i: table[..., i, None]).meets_block(tile))  # [B, groups, k_tiles, 2]
        first = jnp.arange(plan.groups, dtype=jnp.int32)[:, None] * plan.q_tiles
        return found.at[..., 0].add(first).reshape(B, -1, 2)


def fold(plan: Plan, case: Case, where: Where, q: Array, k_blk: Array, v_blk: Array) -> Folded:
    B = q.shape[0]
    seen, simple = rows_see(case, where, plan.S)
    begin = jnp.arange(plan.N, dtype=jnp.int32)[:, None] % plan.blocks * plan.T  # a block's first key in its group
    seen = seen.at[jnp.array([BLK_LOW, BLK_HIGH])].add(begin)
    # Padded tokens are copies of the last real one: they change no minimum or maximum over a tile.
    tokens = jnp.stack([_tokens(plan, field, "edge") for field in seen], axis=2)  # [B, tiles, F, tokens]
    simple = _tokens(plan, jnp.broadcast_to(simple[..., None], where.q_pos.shape), "edge")
    rows = jnp.tile(tokens, (1, 1, 1, plan.G))
    rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, plan.rows - rows.shape[-1])], mode="edge")
    positions = _keys(plan, where.q_pos.astype(jnp.int32))
    return Folded(
        fold_queries(plan, q),
        fold_keys(plan, k_blk),
        fold_keys(plan, v_blk),
        rows,
        tiles_walk(tokens, simple, plan.S, plan.columns, plan.keys),
        positions.reshape(B, plan.groups * plan.k_tiles, 1, plan.keys),
        _mask(plan, where.mask) if case.kind == "array" else None,
        jnp.minimum(where.window, FAR).astype(jnp.int32).reshape(1),
        jnp.asarray(where.layer, jnp.int32).reshape(1),
    )


def fold_queries(plan: Plan, x: Float[Array, "B N T Hq D"]) -> Float[Array, "B Hkv tiles R head"]:
    """Padded rows are 0."""
    return _queries(plan, _pad(x, {4: plan.head}))


def unfold_queries(plan: Plan, x: Float[Array, "B Hkv tiles R head"]) -> Float[Array, "B N T Hq D"]:
    B, Hkv, tiles, _, _ = x.shape
    x = x[:, :, :, : plan.G * plan.tokens, : plan.D].reshape(B, Hkv, tiles, plan.G, plan.tokens, -1)
    x = x.transpose(0, 2, 4, 1, 3, 5).reshape(B, plan.groups, plan.q_tiles * plan.tokens, Hkv * plan.G, -1)
    return x[:, :, : plan.span].reshape(B, plan.groups * plan.blocks, plan.T, Hkv * plan.G, -1)[:, : plan.N]


def fold_statistics(plan: Plan, *x: Float[Array, "B N T Hq"]) -> Float[Array, "B Hkv tiles n R"]:
    """Numbers per query and head, rows as those of `fold_queries`."""
    return jnp.stack([_queries(plan, one[..., None])[..., 0] for one in x], axis=3)


def unfold_statistics(plan: Plan, x: Float[Array, "B Hkv tiles R"]) -> Float[Array, "B N T Hq"]:
    return unfold_queries(plan, x[..., None])[..., 0]


def fold_keys(plan: Plan, x: Float[Array, "B N T Hkv D"]) -> Float[Array, "B Hkv keys head"]:
    x = _keys(plan, _pad(x, {4: plan.head}))  # [B, groups, keys, Hkv, head]
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def unfold_keys(plan: Plan, x: Float[Array, "B Hkv keys head"]) -> Float[Array, "B N T Hkv D"]:
    B, Hkv, _, head = x.shape
    x = x.reshape(B, Hkv, plan.groups, -1, head)[:, :, :, : plan.span, : plan.D].transpose(0, 2, 3, 1, 4)
    return x.reshape(B, plan.groups * plan.blocks, plan.T, Hkv, -1)[:, : plan.N]


def _queries(plan: Plan, x: Float[Array, "B N T Hq D"]) -> Float[Array, "B Hkv tiles R D"]:
    """The heads of a kv head before the tokens."""
    B, _, _, Hq, D = x.shape
    x = _pad(x, {1: plan.groups * plan.blocks}).reshape(B, plan.groups, plan.span, Hq, D)
    x = _pad(x, {2: plan.q_tiles * plan.tokens}).reshape(B, plan.tiles, plan.tokens, Hq // plan.G, plan.G, D)
    x = x.transpose(0, 3, 1, 4, 2, 5).reshape(B, Hq // plan.G, plan.tiles, plan.G * plan.tokens, D)
    return _pad(x, {3: plan.rows})


def _pad(x: Array, sizes: dict[int, int], mode: str = "constant") -> Array:
    """Axes grown to these sizes at their ends."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths, mode=mode) if any(after for _, after in widths) else x


def _tokens(plan: Plan, x: Shaped[Array, "B N T"], mode: str) -> Shaped[Array, "B tiles tokens"]:
    x = _pad(x, {1: plan.groups * plan.blocks}, mode).reshape(x.shape[0], plan.groups, plan.span)
    return _pad(x, {2: plan.q_tiles * plan.tokens}, mode).reshape(x.shape[0], plan.tiles, plan.tokens)


def _keys(plan: Plan, x: Shaped[Array, "B N T ..."]) -> Shaped[Array, "B groups keys ..."]:
    x = _pad(x, {1: plan.groups * plan.blocks})
    x = x.reshape(x.shape[0], plan.groups, plan.span, *x.shape[3:])
    return _pad(x, {2: plan.k_tiles * plan.keys})


def _mask(plan: Plan, mask: Array) -> Int[Array, "B tiles k_tiles tokens keys"]:
    """An explicit mask [B, N, T, T] tile by tile; a tile with several blocks is block diagonal.

    int8, because XLA would widen booleans to 32 bits.
    """
    mask = _pad(mask.astype(jnp.int8), {1: plan.groups * plan.blocks})
    mask = mask.reshape(-1, plan.groups, plan.blocks, plan.T, plan.T)
    if plan.blocks > 1:
        same = jnp.eye(plan.blocks, dtype=jnp.int8)[:, None, :, None]
        mask = mask[:, :, :, :, None] * same
    mask = mask.reshape(-1, plan.groups, plan.span, plan.span)
    mask = _pad(mask, {2: plan.q_tiles * plan.tokens, 3: plan.k_tiles * plan.keys})
    mask = mask.reshape(-1, plan.groups, plan.q_tiles, plan.tokens, plan.k_tiles, plan.keys)
    return mask.transpose(0, 1, 2, 4, 3, 5).reshape(-1, plan.tiles, plan.k_tiles, plan.tokens, plan.keys)
