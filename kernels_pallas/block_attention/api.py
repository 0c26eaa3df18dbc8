"""The public op `block_attention`: what it computes, what its arguments mean, and which backend computes it where.

The platform is chosen when a program is lowered, not when it is traced: one jitted function lowers for CPU, TPU and CUDA, also on a
machine that has none of them. On TPU and GPU the Pallas kernels run, on a CPU the plain definition or, for decoding, `cpu.py`.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflax.kernels_pallas.block_attention import cpu, gpu, gpu_backward, mesh, reference, tpu, tpu_backward
from dflax.kernels_pallas.block_attention.walk import Case, Where

NO_WINDOW = 2**30
"""A window larger than any context, so that sliding and full layers share one program."""


def block_attention(
    q: Float[Array, "B N T Hq D"],
    k_ctx: Float[Array, "L B Hkv S D"],
    v_ctx: Float[Array, "L B Hkv S D"],
    k_blk: Float[Array, "B N T Hkv D"],
    v_blk: Float[Array, "B N T Hkv D"],
    *,
    layer: int | Int[Array, ""],
    ctx_len: Int[Array, "B N"],
    q_pos: Int[Array, "B N T"],
    mask: Literal["full", "causal"] | Bool[Array, "B N T T"],
    ctx_start: Int[Array, "B N"] | None = None,
    hole: Int[Array, "B N 2"] | None = None,
    blk_len: Int[Array, "B N"] | None = None,
    window: int | Int[Array, ""] = NO_WINDOW,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "B N T Hq D"]:
    """softmax(scale * q k^T) v over [visible context | visible block], per row and per block.

    N blocks of a row share its context: N = 1 at inference, the number of anchors in training. Everything about a row is
    traced data, so rows of any length and state run in one compiled program.

    Args:
      q: block queries, after RoPE.
      k_ctx, v_ctx: the whole stacked cache, keys after RoPE; column s holds position s. Only `layer` is read.
      k_blk, v_blk: keys (after RoPE) and values of the block itself.
      layer: which layer of the cache; a Python int (negative: from the end) or an int32 scalar.
      ctx_len: context columns s < ctx_len are visible (strict: an anchor does not see its own feature).
      q_pos: absolute position of every query; block keys have the positions of their queries.
      mask: inside the block: "full" (both directions), "causal" (by order in the block), or explicit, [query, key].
      ctx_start: context columns s >= ctx_start are visible; None: from 0.
      hole: columns lo <= s < hi are skipped; None: no hole.
      blk_len: live rows of the block; dead rows are seen by nobody. None: all live.
      window: a key is visible when q_pos - k_pos < window, and where the mask is not causal also k_pos - q_pos < window.
      scale: factor on the logits, normally head_dim ** -0.5.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap); None: no cap.

    Returns:
      The attention output in q's dtype; softmax in float32. A query with no visible key gives 0 and passes gradient 0.
    """
    B, N, T = q_pos.shape
    if ctx_start is None:
        ctx_start = jnp.zeros_like(ctx_len)
    if blk_len is None:
        blk_len = jnp.full((B, N), T, jnp.int32)
    reference.mask_is_two_sided(mask)  # refuses what is no mask
    kind, array = (mask, None) if isinstance(mask, str) else ("array", mask)
    fixed, traced = (layer % k_ctx.shape[0], None) if isinstance(layer, int) else (None, layer)
    how = How(Case(kind, scale, soft_cap), fixed)
    where = Where(traced, ctx_start, ctx_len, q_pos, array, hole, blk_len, jnp.asarray(window, jnp.int32))
    return _attend(how, (q, k_ctx, v_ctx, k_blk, v_blk), where)


class How(NamedTuple):
    """What is static: the case, and the layer where it is a Python int (else it is in `Where`)."""

    case: Case
    layer: int | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, arrays: Any, where: Where) -> Array:
    plain = lambda backend: partial(_plain, backend, how)
    kernel = lambda forward: lambda arrays, where: _forward_kernel(forward, how, arrays, where)[0]
    return _by_platform(plain, kernel, arrays, where)


def _attend_saving(how: How, arrays: Any, where: Where) -> Any:
    """The output, and what the gradient needs. The statistics are the kernels' alone: the definition's gradient starts afresh."""
    unused = jnp.zeros(arrays[0].shape[:-1], jnp.float32)
    plain = lambda backend: lambda arrays, where: (_plain(backend, how, arrays, where), unused)
    out, lse = _by_platform(plain, lambda forward: partial(_forward_kernel, forward, how), arrays, where)
    return out, (arrays, where, out, lse)


def _by_platform(plain: Any, kernel: Any, arrays: Any, where: Where) -> Any:
    branches = {"tpu": kernel(tpu.forward), "cuda": kernel(gpu.forward), "default": plain(reference)}
    q, k_ctx = arrays[:2]
    L = k_ctx.shape[0]
    # Many blocks share a context in training only, and a layer that fits the processor's cache may as well be read whole.
    if q.shape[1] == 1 and L > 1 and k_ctx.size // L > cpu.WHOLE:
        branches["cpu"] = plain(cpu)
    return jax.lax.platform_dependent(arrays, where, **branches)


def _gradients(how: How, saved: Any, gradient: Array) -> Any:
    def plain(arrays, where, out, lse, gradient):
        return jax.vjp(lambda *arrays: _plain(reference, how, arrays, where), *arrays)[1](gradient)

    def kernel(backward):
        def run(arrays, where, out, lse, gradient):
            where = _with_layer(how, where)
            dq, dk_ctx, dv_ctx, dk_blk, dv_blk = mesh.sharded(
                partial(backward, case=how.case), arrays, where, (out, lse, gradient), mesh.GRADIENTS
            )
            put = lambda x: _into_stack(x, arrays[1].shape, how.layer, where.layer)
            return dq, put(dk_ctx), put(dv_ctx), dk_blk, dv_blk

        return run

    found = jax.lax.platform_dependent(
        *saved, gradient, tpu=kernel(tpu_backward.backward), cuda=kernel(gpu_backward.backward), default=plain
    )
    return found, None


_attend.defvjp(_attend_saving, _gradients)


def _plain(backend: Any, how: How, arrays: Any, where: Where) -> Array:
    mask = where.mask if how.case.kind == "array" else how.case.kind
    layer = where.layer if how.layer is None else how.layer
    return backend.attend(
        *arrays, layer, where.ctx_start, where.ctx_len, where.q_pos, mask, where.hole, where.blk_len, where.window,
        how.case.scale, how.case.soft_cap,
    )  # fmt: skip


def _forward_kernel(forward: Any, how: How, arrays: Any, where: Where) -> Any:
    return mesh.sharded(partial(forward, case=how.case), arrays, _with_layer(how, where), (), mesh.OUTPUTS)


def _with_layer(how: How, where: Where) -> Where:
    """Kernels take the layer as data, so that all layers of a model share one trace."""
    return where if how.layer is None else where._replace(layer=jnp.int32(how.layer))


def _into_stack(x: Array, shape: tuple[int, ...], fixed: int | None, layer: Array) -> Array:
    """One layer's gradient as that of the stack, zero elsewhere. Pads, which XLA adds up over the layers in one pass."""
    if fixed is None:
        return jax.lax.dynamic_update_index_in_dim(jnp.zeros(shape, x.dtype), x, layer, 0)
    return jax.lax.pad(x[None], jnp.zeros((), x.dtype), [(fixed, shape[0] - 1 - fixed, 0)] + [(0, 0, 0)] * x.ndim)
