"""How large the tiles are: one table for both kernels.

A query tile holds `rows` = tokens x query heads of one kv head; what it meets are `columns` of the context and `keys` of the block.

| platform | use | bytes of a head | rows | columns | keys | warps | why |
| --- | --- | --- | --- | --- | --- | --- | --- |
| TPU | at most 128 rows in all (decode, verify) | any | 128 | 1024 | 512 | - | bound by memory: long transfers hide the step's own cost |
| TPU | more (prefill, canvases, training) | any | 512 | 512 | 512 | - | 512 operations a byte read: v6e needs 560, v5p 166, v5e 240 |
| GPU | forward | 256 | 64 | 64 | 64 | 4 | 80 KiB shared, 167 registers, no spill |
| GPU | forward, more than 64 rows in all | 256 | 128 | 64 | 64 | 8 | 104 KiB, 214 registers |
| GPU | backward | 256 | 64 | 64 | 64 | 4 | 128 KiB of 227 |
| GPU | all | 512 (float32, or head_dim 256) | 32 | 32 | 32 | 4 | half of the rows at twice the bytes |
| GPU | all | 1024 (float32, head_dim 256) | 16 | 32 | 32 | 4 | the smallest tile of a tensor core |

Pads: TPU tokens of a tile to 8 (a sublane tile), GPU rows, keys and head_dim to powers of two, at least 16 (Triton has no others). The
cache is never padded: the kernels mask its end. (On TPU a program whose cache has heads narrower than 128 turns it once when it is called
and once when it returns: XLA's layout of such arguments has the columns last.)

Chosen from what compiles for v5e, v5p, v6e and H100 and from the chips' published ratios of operations to bytes; shared memory and
registers are those that ptxas gave a forerunner of these kernels with the same tiles. Nothing here was timed: tune it on a chip.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """One line of the table."""

    rows: int
    columns: int
    keys: int
    warps: int = 4
    stages: int = 2


def tpu(rows: int) -> Sizes:
    """For a problem with this many query rows of one kv head in all."""
    return Sizes(128, 1024, 512) if rows <= 128 else Sizes(512, 512, 512)


def gpu(rows: int, head_bytes: int, *, backward: bool = False) -> Sizes:
    """`head_bytes`: of one key, its head_dim padded to a power of two."""
    if head_bytes > 512:
        return Sizes(16, 32, 32)
    if head_bytes > 256:
        return Sizes(32, 32, 32)
    return Sizes(64, 64, 64) if backward or rows <= 64 else Sizes(128, 64, 64, warps=8)
