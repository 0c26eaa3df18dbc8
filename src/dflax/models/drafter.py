"""The DFlash drafter (arXiv 2602.06036, section 4): a few decoder layers over a block [anchor, mask, mask, ...].

Target features reach every layer as keys and values, made by the layer's own k/v projections and k_norm from the fused context
c = hidden_norm(fc(features)); c never passes input_layernorm, queries or a feed-forward. Only the block is a residual stream.
The embedding table and the head are the target's, frozen and passed in.

The drafters of the paper's ablation share this code: in "*_fused" ones features enter by the input instead, x =
input_proj([embedding; c]), and the context keys and values come from the drafter's own causal stream over the context (in the
manner of EAGLE-3); "autoregressive*" ones are causal inside the block and predict the next token from clean ones.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflax.cache import KVCache
from dflax.config import DrafterConfig
from dflax.kernels_pallas.block_attention import NO_WINDOW, block_attention
from dflax.models.layers import MLP, Attention, Linear, RMSNorm, matmul, rope_table, run_layer
from dflax.models.stack import joined, pick, walk


class DrafterLayer(nnx.Module):
    """A Qwen3-style layer whose attention also sees context keys and values."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, qkv_bias=config.attention_bias,
            out_bias=config.attention_bias, qk_norm=True, eps=config.rms_norm_eps, rngs=rngs,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B N T E"], rope: tuple[Array, Array], attend: Callable[[Array, Array, Array], Array]
    ) -> tuple[Float[Array, "B N T E"], Array, Array]:
        h = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(h, rope)
        x = x + self.self_attn.output(attend(self.self_attn.queries(h, rope), k, v))
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Drafter(nnx.Module):
    """Parameters under their official names; see the module's docstring for the data flow."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs):
        size = config.hidden_size
        self.fc = Linear(len(config.target_layer_ids) * size, size, rngs=rngs)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        if config.fused:
            self.input_proj = Linear(2 * size, size, rngs=rngs)
        self.layers = nnx.List([DrafterLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.config = config
        self.remat = self.scan = False  # a training step's copy says (`dflax.train.passes`)

    def fuse(self, features: Float[Array, "B T ME"]) -> Float[Array, "B T E"]:
        """Joined target features -> context vectors: project first, then norm."""
        return self.hidden_norm(self.fc(features))

    def context(
        self,
        embedded: Float[Array, "B T E"],
        fused: Float[Array, "B T E"],
        cache: KVCache,
        ctx_start: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "L B T Hkv D"], Float[Array, "L B T Hkv D"]]:
        """Context keys and values of T tokens that follow the cache, for every layer; write them with `KVCache.commit`.

        `embedded` (the tokens' embeddings) and the cached context matter to fused drafters only. ctx_start: first visible column per
        token where documents are packed.
        """
        config = self.config
        positions = cache.length[:, None] + jnp.arange(fused.shape[1], dtype=jnp.int32)
        rope = rope_table(config.rope, config.head_dim, positions)
        if not config.fused:
            step = lambda layer, i, causal, carry: (carry, layer.self_attn.keys_values(fused, rope))
            k, v = self._walk(step, None)[1]
        else:
            mask = "causal"
            if ctx_start is not None:
                mask = ((positions[:, :, None] >= positions[:, None]) & (positions[:, None] >= ctx_start[..., None]))[
                    :, None
                ]
            x = self.input_proj(jnp.concatenate([embedded * config.input_embedding_scale, fused], axis=-1))
            k, v = self._run(x[:, None], cache, cache.length[:, None], positions[:, None], None, mask)[1]
            k, v = k[:, :, 0], v[:, :, 0]
        return k, v

    def block(
        self,
        embedded: Float[Array, "B N K E"],
        last_fused: Float[Array, "B N E"],
        cache: KVCache,
        anchor: Int[Array, "B N"],
        ctx_start: Int[Array, "B N"] | None = None,
    ) -> Float[Array, "B N K E"]:
        """Hidden states of N blocks per row, after the final norm.

        A block sees the context columns before its anchor's position, strictly, and itself. embedded: the target's embeddings of
        [anchor, mask, ...]. last_fused: context vector of the token before the anchor (fused drafters only).
        """
        config = self.config
        positions = anchor[..., None] + jnp.arange(embedded.shape[2], dtype=jnp.int32)
        x = embedded * config.input_embedding_scale if config.input_embedding_scale != 1.0 else embedded
        if config.fused:
            x = self.input_proj(jnp.concatenate([x, jnp.broadcast_to(last_fused[:, :, None], x.shape)], axis=-1))
        x, _ = self._run(x, cache, anchor, positions, ctx_start)
        return self.norm(x)

    def predictions(self, hidden: Float[Array, "B N K E"]) -> Float[Array, "B N k E"]:
        """The K - 1 states that score the tokens at anchor + 1 .. anchor + K - 1: slot k's own, or the one before where autoregressive."""
        return hidden[..., :-1, :] if self.config.autoregressive else hidden[..., 1:, :]

    def logits(self, hidden: Float[Array, "... E"], head: Float[Array, "V E"]) -> Float[Array, "... V"]:
        """float32 logits over the rows of `head` (the target's, or the draft vocabulary's subset of it)."""
        logits = matmul(hidden, head) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _run(self, x, cache, ctx_len, positions, ctx_start, mask=None):
        """All layers over blocks x [B, N, T, E]; returns the stream and the layers' own keys and values [L, B, N, T, Hkv, D].

        mask: of the blocks; None: each layer's own kind.
        """
        config = self.config
        rope = rope_table(config.rope, config.head_dim, positions)
        windows = [config.window(i) or NO_WINDOW for i in range(config.num_layers)]

        def step(layer, i, causal, x):
            within = ("causal" if causal else "full") if mask is None else mask

            def attend(q, k, v):
                return block_attention(
                    q, cache.k, cache.v, k, v, layer=i, ctx_start=ctx_start, ctx_len=ctx_len, q_pos=positions,
                    mask=within, window=pick(windows, i), scale=config.head_dim**-0.5,
                )  # fmt: skip

            x, k, v = run_layer(layer, x, rope, attend, self.remat)
            return x, (k, v)

        return self._walk(step, x)

    def _walk(self, step, carry):
        """The carry behind the last layer, and the outs of all."""
        kinds = [self.config.is_causal(i) for i in range(self.config.num_layers)]
        pieces = list(walk(self.layers, kinds, step, carry, self.scan))
        return pieces[-1][1], joined([out for *_, out in pieces])


def greedy_block(tokens: Int[Array, "B N"], mask_token_id: int, block_size: int) -> Int[Array, "B N K"]:
    """[anchor, mask, ..., mask] for anchors `tokens`."""
    masks = jnp.full((*tokens.shape, block_size - 1), mask_token_id, tokens.dtype)
    return jnp.concatenate([tokens[..., None], masks], axis=-1)


def initial_scale(
    drafter: Drafter, embed: Float[Array, "V E"], head: Float[Array, "Vd E"], std: float = 1.0
) -> Drafter:
    """Scales the final norm so that fresh logits have about this standard deviation: training starts near ln V, not far above it.

    A fresh drafter hardly moves the mask's embedding, which a tied head scores far from evenly: that state sets the scale.
    """
    mask = embed[drafter.config.mask_token_id].astype(jnp.float32)
    state = mask * jax.lax.rsqrt(jnp.mean(mask * mask) + drafter.config.rms_norm_eps)
    logits = drafter.logits(state[None], head.astype(jnp.float32))
    scale = std / jnp.sqrt(jnp.mean(jnp.square(logits)))
    drafter.norm.weight[...] = jnp.full_like(drafter.norm.weight[...], scale)
    return drafter
