"""The arithmetic of one query tile against one key tile, as both kernels do it: values in, values out, float32 inside.

Masked logits are a finite NEGATIVE and a row's maximum starts at FLOOR, far above it: what is hidden weighs exactly 0, also for rows
that see nothing.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dflax.kernels_pallas.block_attention.reference import FLOOR, NEGATIVE
from dflax.kernels_pallas.block_attention.walk import Case


def dot(a: Array, b: Array, across: tuple[int, int]) -> Array:
    """Contracts axis across[0] of a with across[1] of b, accumulating in float32. float32 is float32: no TF32, no bfloat16 passes."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((across[0],), (across[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def logits(case: Case, a: Array, b: Array) -> Array:
    """[rows of a, rows of b]: queries against keys, or keys against queries."""
    x = dot(a, b, (1, 1)) * case.scale
    return x if case.soft_cap is None else case.soft_cap * jnp.tanh(x / case.soft_cap)


def hide(x: Array, visible: Array | None) -> Array:
    return x if visible is None else jnp.where(visible, x, NEGATIVE)


def absorb(state: tuple[Array, Array, Array], x: Array, v: Array) -> tuple[Array, Array, Array]:
    """Online softmax: (top [R, 1], total [R, 1], out [R, D]) takes in logits x [R, n] with values v [n, D]."""
    top, total, out = state
    above = jnp.maximum(top, jnp.max(x, axis=1, keepdims=True))
    p, shrink = jnp.exp(x - above), jnp.exp(top - above)
    total = total * shrink + jnp.sum(p, axis=1, keepdims=True)
    return above, total, out * shrink + dot(p.astype(v.dtype), v, (1, 0))


def nothing(rows: int, head: int) -> tuple[Array, Array, Array]:
    """The state before the first tile."""
    return (
        jnp.full((rows, 1), FLOOR, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros((rows, head), jnp.float32),
    )


def result(state: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """(output [R, D], log of the sum of exponentials [R, 1]); 0 and FLOOR for a row that saw nothing."""
    top, total, out = state
    total = jnp.where(total == 0, 1.0, total)
    return out / total, top + jnp.log(total)


def weights(
    case: Case, x: Array, gradient: Array, visible: Array | None, lse: Array, delta: Array
) -> tuple[Array, Array]:
    """(p, ds): the weights of logits x and the loss's gradient by scale * q k.

    gradient: of the weights, do v^T. lse and delta = sum(do * o) are of the queries. Any orientation.
    """
    p = jnp.exp(x - lse)
    ds = p * (gradient - delta)
    if case.soft_cap is not None:
        ds *= 1.0 - jnp.square(x / case.soft_cap)
    return (p, ds) if visible is None else (jnp.where(visible, p, 0.0), jnp.where(visible, ds, 0.0))
