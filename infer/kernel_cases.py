"""Calls of `block_attention` to be measured: shapes of life, the same computed in other ways, their least work, and exact results."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float64

from dflax.kernels_pallas.block_attention import block_attention, reference

ARRAYS = "q", "k_ctx", "v_ctx", "k_blk", "v_blk"
COLD = 128 * 2**20
DOCUMENTS = 3
"""In a packed row."""

Kind = Literal["decode", "tree", "prefill", "canvas", "packed", "train"]


@dataclass(frozen=True)
class Case:
    """One call: `batch` rows of `anchors` blocks of `block` tokens over `context` columns, all of them live.

    decode: every token of a block sees the whole block, as a drafter's do. tree: a binary tree of drafts. prefill: a causal chunk of a
    prompt behind what came before it. canvas: a diffusion model's full pass, without context. packed: a target's pass over whole rows of a
    few documents, causal inside each, without context. train: forward and backward of many anchors, spread evenly over the context that
    they share; an anchor sees what is before it.
    """

    kind: Kind
    batch: int
    context: int
    block: int
    anchors: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    most_layers: int = 16

    @property
    def name(self) -> str:
        many = f", {self.anchors} anchors" if self.anchors > 1 else ""
        return f"{self.kind}: batch {self.batch}, context {self.context}, T {self.block}{many}"

    @property
    def layers(self) -> int:
        """Layers attended one after the other in a measured call, each over a cache of its own: so many that no chip's own memory holds
        them all from one call to the next (at most `most_layers`)."""
        if self.kind == "train" or not self.context:
            return 1
        return int(np.clip(-(-COLD // self.context_bytes), 1, self.most_layers))

    @property
    def context_bytes(self) -> int:
        """Keys and values of a layer."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> float:
        """Least traffic of a layer: everything read once and written once; the backward pass reads all again and writes gradients."""
        width = jnp.dtype(self.dtype).itemsize
        tokens = self.batch * self.anchors * self.block * self.head_dim * width
        queries, keys = tokens * self.heads, 2 * tokens * self.kv_heads
        forward = self.context_bytes + keys + 2 * queries
        return float(forward + (2 * (self.context_bytes + keys) + 4 * queries if self.kind == "train" else 0))

    @cached_property
    def flops(self) -> float:
        """Two products a visible pair and head; the backward pass has five more."""
        return (14.0 if self.kind == "train" else 4.0) * self.heads * self.head_dim * self.batch * self._pairs()

    def _pairs(self) -> float:
        """Visible (query, key) pairs of a row."""
        context, block = self.sees()
        return float(context[0].sum()) * self.block + float(block[0].sum())

    def lengths(self) -> np.ndarray:
        """Live columns of every block, int32 [B, N]."""
        if self.kind != "train":
            return np.full((self.batch, 1), self.context, np.int32)
        anchors = np.linspace(0, self.context, self.anchors, endpoint=False)
        return np.broadcast_to(anchors.astype(np.int32), (self.batch, self.anchors))

    def mask(self) -> Bool[np.ndarray, "B N T T"] | None:
        """Who sees whom in a block, [query, key]. Of a tree: a node sees itself and its ancestors. None: everything is seen."""
        if self.kind in ("prefill", "packed"):
            slot = np.arange(self.block)
            document = slot * (DOCUMENTS if self.kind == "packed" else 1) // self.block
            sees = (slot[:, None] >= slot) & (document[:, None] == document)
        elif self.kind == "tree":
            sees = np.eye(self.block, dtype=bool)
            for node in range(1, self.block):
                sees[node] |= sees[(node - 1) // 2]
        else:
            return None
        return np.broadcast_to(sees, (self.batch, 1, self.block, self.block))

    def sees(self) -> tuple[Bool[np.ndarray, "B N S"], Bool[np.ndarray, "B N T T"]]:
        """Which context columns a block sees, and who sees whom in it."""
        context = np.arange(self.context) < self.lengths()[..., None]
        mask = self.mask()
        shape = (self.batch, self.anchors, self.block, self.block)
        return context, np.broadcast_to(True, shape) if mask is None else mask

    def arrays(self, layers: int) -> dict[str, Array]:
        """Random q, k_ctx, v_ctx, k_blk, v_blk, in the op's shapes."""
        context = (layers, self.batch, self.kv_heads, self.context, self.head_dim)
        block = (self.batch, self.anchors, self.block)
        shapes = {"q": (*block, self.heads, self.head_dim), "k_ctx": context, "v_ctx": context}
        shapes |= dict.fromkeys(("k_blk", "v_blk"), (*block, self.kv_heads, self.head_dim))
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {name: _normal(key, shape, self.dtype) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def where(self) -> dict[str, Array]:
        """The op's other arguments; `form` is its mask where there is none among them."""
        lengths, mask = jnp.asarray(self.lengths()), None if self.form == "causal" else self.mask()
        found = {"ctx_len": lengths, "q_pos": lengths[..., None] + jnp.arange(self.block, dtype=jnp.int32)}
        return found if mask is None else found | {"mask": jnp.asarray(mask)}

    @property
    def form(self) -> Literal["causal", "full"]:
        return "causal" if self.kind == "prefill" else "full"


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))

Attend = Callable[..., Array]
"""(arrays, where, layer) -> [B, N, T, Hq, D]"""


def op(case: Case, arrays: dict[str, Array], where: dict[str, Array], layer: int) -> Array:
    """`block_attention` as every caller calls it."""
    return block_attention(**arrays, layer=layer, scale=case.head_dim**-0.5, **{"mask": case.form, **where})


def definition(case: Case, arrays: dict[str, Array], where: dict[str, Array], layer: int) -> Array:
    """Plain XLA."""
    lengths, mask = where["ctx_len"], where.get("mask", case.form)
    nothing, whole = jnp.zeros_like(lengths), jnp.full_like(lengths, case.block)
    q, k_ctx, v_ctx, k_blk, v_blk = (arrays[name] for name in ARRAYS)
    return reference.attend(
        q, k_ctx, v_ctx, k_blk, v_blk, layer, nothing, lengths, where["q_pos"], mask, None, whole, 2**30, case.head_dim**-0.5, None
    )  # fmt: skip


def library(
    case: Case, arrays: dict[str, Array], where: dict[str, Array], layer: int, implementation: Literal["xla", "cudnn"]
) -> Array:
    """`jax.nn.dot_product_attention` on keys that lie as it wants them: see `for_library`. Anchors are one long row under a mask."""
    q = arrays["q"].reshape(case.batch, -1, case.heads, case.head_dim)
    k, v = arrays[f"k{layer}"], arrays[f"v{layer}"]
    out = jax.nn.dot_product_attention(
        q, k, v, mask=where.get("mask"), scale=case.head_dim**-0.5, implementation=implementation
    )
    return out.reshape(arrays["q"].shape)


def for_library(case: Case, arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Context and blocks of every layer as one array [B, S + N T, Hkv, D], made before the clock runs, and a mask where not all is seen."""
    found = {"q": arrays["q"]}
    for layer in range(arrays["k_ctx"].shape[0]):
        for name in "kv":
            block = arrays[f"{name}_blk"].reshape(case.batch, -1, case.kv_heads, case.head_dim)
            found[f"{name}{layer}"] = jnp.concatenate(
                [arrays[f"{name}_ctx"][layer].transpose(0, 2, 1, 3), block], axis=1
            )
    if case.mask() is None and case.kind != "train":
        return found, {}
    context, block = case.sees()
    N, T = case.anchors, case.block
    own = np.eye(N, dtype=bool)[:, None, :, None] & block[:, :, :, None, :]  # [B, N, T, N, T]: a block sees no other
    seen = np.concatenate([np.repeat(context, T, axis=1), own.reshape(case.batch, N * T, N * T)], axis=2)
    return found, {"mask": jnp.asarray(seen[:, None])}


def program(case: Case, attend: Attend, layers: int) -> Callable[[dict[str, Array], dict[str, Array]], Any]:
    """What is timed: all layers, each asked what the one before it answered; of training the output and every gradient."""

    def decode(arrays, where):
        for layer in range(layers):
            arrays = arrays | {"q": attend(case, arrays, where, layer)}
        return arrays["q"]

    def train(arrays, where):
        out, pull = jax.vjp(lambda arrays: attend(case, arrays, where, 0), arrays)
        return out, pull(jnp.ones_like(out))[0]

    return train if case.kind == "train" else decode


def lowered(case: Case, attend: Attend) -> jax.stages.Lowered:
    """The program, from shapes alone."""
    return jax.jit(program(case, attend, case.layers)).lower(*jax.eval_shape(lambda: arguments(case, attend)))


def ways(platform: str) -> dict[str, Attend]:
    """Ways to compute a call, ours first."""
    found: dict[str, Attend] = {"block_attention": op, "XLA reference": definition}
    found["dot_product_attention"] = partial(library, implementation="xla")
    if platform == "gpu":
        found["cuDNN"] = partial(library, implementation="cudnn")
    return found


def is_ours(attend: Attend) -> bool:
    """Whether it takes arrays as the op does."""
    return attend in (op, definition)


def arguments(case: Case, attend: Attend) -> tuple[dict[str, Array], dict[str, Array]]:
    """(arrays, where) as this way wants them, of all layers."""
    arrays = case.arrays(case.layers)
    return (arrays, case.where()) if is_ours(attend) else for_library(case, arrays)


def exact(case: Case, arrays: dict[str, Array]) -> dict[str, Float64[np.ndarray, "..."]]:
    """Output and, of training, the gradients of its sum, in float64 by numpy, from the same rounded inputs."""
    q, k_ctx, v_ctx, k_blk, v_blk = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (arrays[name] for name in ARRAYS)
    )
    group, scale, T = case.heads // case.kv_heads, case.head_dim**-0.5, case.block
    context, block = case.sees()
    found = {"out": np.zeros_like(q)} | {name: np.zeros(x.shape) for name, x in arrays.items() if case.kind == "train"}
    for b, n, h in np.ndindex(case.batch, case.anchors, case.heads):
        kv = h // group
        keys, values = (np.concatenate([c[0, b, kv], x[b, n, :, kv]]) for c, x in ((k_ctx, k_blk), (v_ctx, v_blk)))
        sees = np.concatenate([np.broadcast_to(context[b, n], (T, case.context)), block[b, n]], axis=1)
        query = q[b, n, :, h]
        logits = np.where(sees, scale * query @ keys.T, -np.inf)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        found["out"][b, n, :, h] = p @ values
        if case.kind != "train":
            continue
        dp = np.broadcast_to(values.sum(1), p.shape)  # the gradient of the output is 1 everywhere
        ds = scale * p * (dp - (p * dp).sum(1, keepdims=True))
        found["q"][b, n, :, h] = ds @ keys
        dk, dv = ds.T @ query, np.broadcast_to(p.sum(0)[:, None], values.shape)
        for name, gradient in (("k", dk), ("v", dv)):
            found[f"{name}_ctx"][0, b, kv] += gradient[: case.context]
            found[f"{name}_blk"][b, n, :, kv] += gradient[case.context :]
    return found


def errors(case: Case, attend: Attend, compiled: Callable[..., Any], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """Root mean square distance from `exact` of the output and every gradient of the same name, relative to the exact one's root mean
    square. One layer (see `small`)."""
    out = compiled(*arguments(case, attend))
    got = {"out": out} if case.kind != "train" else {"out": out[0]} | out[1]
    rms = lambda x: float(np.sqrt(np.mean(np.square(x))))
    return {
        name: rms(np.asarray(got[name].astype(jnp.float32), np.float64) - value) / rms(value)
        for name, value in wanted.items()
        if name in got
    }


def small(case: Case) -> Case:
    """The same kind in a size that float64 on the host can do."""
    return replace(
        case, batch=1, context=min(case.context, 500), block=min(case.block, 100), anchors=min(case.anchors, 8),
        heads=min(case.heads, 8), kv_heads=min(case.kv_heads, 2), most_layers=1,
    )  # fmt: skip
