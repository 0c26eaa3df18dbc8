"""One decoder backbone for every family, autoregressive or diffusion: what differs between them is in ModelConfig."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dflax.cache import KVCache
from dflax.config import ModelConfig
from dflax.kernels_pallas.block_attention import NO_WINDOW, block_attention
from dflax.models.features import FeatureTap
from dflax.models.layers import MLP, Attention, Embedding, RMSNorm, matmul, rope_table, run_layer
from dflax.models.moe import MoE
from dflax.models.stack import joined, pick, walk


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, qkv_bias=config.qkv_bias,
            out_bias=config.out_bias, qk_norm=config.qk_norm, eps=config.rms_norm_eps, rngs=rngs,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.moe is not None and config.is_moe(layer):
            self.mlp = MoE(config.hidden_size, config.moe, rngs=rngs)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T E"], rope: tuple[Array, Array], attend: Callable[..., Array]
    ) -> tuple[Float[Array, "B T E"], Array, Array]:
        """`attend(q, k, v)` mixes; returns the new residual stream and the block's own keys and values."""
        h = self.input_layernorm(x)
        q = self.self_attn.queries(h, rope)
        k, v = self.self_attn.keys_values(h, rope)
        x = x + self.self_attn.output(attend(q, k, v))
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """What a forward pass over a block of tokens gives.

    hidden: after the final norm. features: the tapped layers' outputs, joined; None without taps. k, v: the block's own keys and
    values of every layer, not yet in the cache (`Decoder.read`), else None.
    """

    hidden: Float[Array, "B T E"]
    features: Float[Array, "B T ME"] | None
    k: Float[Array, "L B T Hkv D"] | None
    v: Float[Array, "L B T Hkv D"] | None


class Decoder(nnx.Module):
    """Token embedding, layers, final norm and head (the embedding table itself where tied)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, i, rngs=rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.config = config
        self.remat = self.scan = False  # a training step's copy says (`dflax.train.passes`)

    @property
    def head(self) -> Float[Array, "V E"]:
        """The output matrix: logits = hidden @ head^T."""
        return (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight[...]

    def logits(self, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """float32 logits of hidden states (after the final norm)."""
        return matmul(hidden, self.head)

    def read(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        *,
        taps: tuple[int, ...] = (),
        ctx_start: Int[Array, " B"] | None = None,
    ) -> Block:
        """A causal block behind the cache, which is not written: commit k, v through an accepted path afterwards.

        ctx_start hides the cache's columns before it.
        """
        x, tap, _, (k, v) = self._run(tokens, cache, taps, ctx_start=ctx_start, own=True)
        return Block(self.norm(x), tap, k, v)

    def write(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        n: Int[Array, " B"],
        *,
        taps: tuple[int, ...] = (),
    ) -> tuple[Block, KVCache]:
        """A causal block whose first n[b] rows are known to stay (prefill): each layer writes them into the cache as it goes."""
        write = lambda cache, layer, k, v: cache.write(layer, k, v, n)
        x, tap, cache, _ = self._run(tokens, cache, taps, blk_len=n, keep=write)
        return Block(self.norm(x), tap, None, None), cache.advance(n)

    def whole(self, tokens: Int[Array, "B S"], *, taps: tuple[int, ...] = ()) -> Block:
        """Whole sequences of equal length, seen as the model was trained: causally, or in both directions."""
        mask = "full" if self.config.bidirectional else "causal"
        x, tap, *_ = self._run(tokens, self.empty_cache(tokens), taps, mask=mask)
        return Block(self.norm(x), tap, None, None)

    def among(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], mask: Bool[Array, "B T T"]
    ) -> Float[Array, "B T E"]:
        """Tokens at any positions, each of which sees those that mask [query, key] says.

        Returns the residual stream before the final norm.
        """
        return self._run(tokens, self.empty_cache(tokens), mask=mask[:, None], positions=positions)[0]

    def canvas(
        self, tokens: Int[Array, "B S"], length: Int[Array, " B"], cache: KVCache | None = None
    ) -> tuple[Float[Array, "B S E"], KVCache]:
        """A full pass of a diffusion model: columns below length[b] see each other in both directions, nobody sees the others.

        Returns the residual stream before the final norm (`predict` norms the rows that are asked for), and the cache, of S columns,
        with the keys and values of the whole canvas; its length is not touched. cache None: nothing is kept.
        """
        nothing = self.empty_cache(tokens)
        zero = jnp.zeros_like(length)
        x, _, kept, _ = self._run(
            tokens, nothing if cache is None else cache, blk_len=length, keep=None if cache is None else KVCache.write_all,
            mask="full", start=zero, ctx_len=zero, context=nothing,
        )  # fmt: skip
        return x, kept

    def stretch(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        start: Int[Array, " B"],
        length: Int[Array, " B"],
        ctx_len: Int[Array, " B"],
        hole: Int[Array, "B 2"] | None = None,
    ) -> Float[Array, "B T E"]:
        """A short pass of a diffusion model: T columns from start[b] on, of which length[b] are alive, over a cached canvas.

        They see each other afresh, and of the cache the columns below ctx_len[b] outside `hole` (their own stale ones). The cache
        is not written. Returns the residual stream before the final norm.
        """
        return self._run(tokens, cache, blk_len=length, mask="full", start=start, ctx_len=ctx_len, hole=hole)[0]

    def predict(self, x: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """float32 logits of rows of the residual stream."""
        return self.logits(self.norm(x))

    def hidden_states(self, tokens: Int[Array, "B S"]) -> Float[Array, "L B S E"]:
        """Output of every layer, before the final norm, without a cache (for inspection and tests)."""
        taps = tuple(range(self.config.num_layers))
        features = self.whole(tokens, taps=taps).features
        assert features is not None
        B, S, _ = features.shape
        return features.reshape(B, S, len(taps), -1).transpose(2, 0, 1, 3).astype(jnp.float32)

    def packed(
        self,
        tokens: Int[Array, "B S"],
        ctx_start: Int[Array, "B S"],
        *,
        taps: tuple[int, ...] = (),
    ) -> Block:
        """A whole packed sequence without a cache: a token sees its own document only, from column ctx_start on.

        Rotary positions are columns; attention depends on their differences alone.
        """
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        mask = (column[:, None] >= column) & (column >= ctx_start[..., None])
        x, tap, *_ = self._run(tokens, self.empty_cache(tokens), taps, mask=mask[:, None])
        return Block(self.norm(x), tap, None, None)

    def empty_cache(self, tokens: Int[Array, "B T"]) -> KVCache:
        """A cache without room, for passes over whole sequences."""
        return KVCache.empty(self.config, tokens.shape[0], 0, self.embed_tokens.weight[...].dtype)

    def _run(
        self,
        tokens: Array,
        cache: KVCache,
        taps: tuple[int, ...] = (),
        *,
        blk_len: Array | None = None,
        ctx_start: Array | None = None,
        keep: Callable[[KVCache, Any, Array, Array], KVCache] | None = None,
        own: bool = False,
        mask: Any = "causal",
        start: Array | None = None,
        ctx_len: Array | None = None,
        hole: Array | None = None,
        context: KVCache | None = None,
        positions: Array | None = None,
    ) -> tuple[Array, Array | None, KVCache, Any]:
        """The layers over a block; `keep(cache, layer, k, v) -> cache` says what becomes of the block's keys and values.

        The block begins at the cache's cursor, and the context ends there, where start (or positions, of every token) and ctx_len do
        not say otherwise. What is seen beside the block is `context` if that is not the cache itself. Returns the residual stream, the
        tapped layers, the cache, and with `own` the block's keys and values of all layers.
        """
        config = self.config
        x = self.embed_tokens(tokens)
        first: Array = cache.length if start is None else start
        seen: Array = cache.length if ctx_len is None else ctx_len
        if positions is None:
            positions = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        rope = rope_table(config.rope, config.head_dim, positions)
        one = lambda value: None if value is None else value[:, None]  # the op's axis of blocks
        windows = [config.window(i) or NO_WINDOW for i in range(config.num_layers)]

        def step(layer: DecoderLayer, i: Any, kind: Any, carry: tuple[Array, KVCache]) -> tuple[Any, Any]:
            x, cache = carry
            visible = context or cache

            def attend(q: Array, k: Array, v: Array) -> Array:
                out = block_attention(
                    q[:, None], visible.k, visible.v, k[:, None], v[:, None], layer=i, ctx_start=one(ctx_start),
                    ctx_len=seen[:, None], q_pos=positions[:, None], mask=mask, blk_len=one(blk_len), hole=one(hole),
                    window=pick(windows, i), scale=config.head_dim**-0.5,
                )  # fmt: skip
                return out[:, 0]

            x, k, v = run_layer(layer, x, rope, attend, self.remat)
            return (x, cache if keep is None else keep(cache, i, k, v)), (k, v) if own else None

        # A tapped layer is the last of its piece.
        kinds = [(config.is_moe(i), sum(tap < i for tap in taps)) for i in range(config.num_layers)]
        tap = FeatureTap(taps)
        carry, outs = (x, cache), []
        pieces = walk(self.layers, kinds, step, carry, self.scan)
        for i, carry, out in pieces:
            tap(i, carry[0])
            outs.append(out)
        x, cache = carry
        return x, tap.features() if taps else None, cache, joined(outs)
