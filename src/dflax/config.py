"""What a model is, as frozen dataclasses: every number that changes the computation, and nothing else.

`dflax.families` translates between these and Hugging Face `config.json` dictionaries.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding in the half-split (NeoX) form.

    `scaling="linear"` divides positions by `factor`; `"llama3"` rescales low frequencies as Llama 3.1 does.
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class MoEConfig:
    """Dropless mixture of experts; the router is a softmax in float32 over all experts.

    With `expert_bias` a vector is added to the probabilities when experts are chosen; it does not weigh what they give.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    expert_bias: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama or Qwen kind; a diffusion language model where it is `bidirectional`.

    `windows` has one entry per layer: the sliding window in tokens (a key is visible when q_pos - k_pos < window), or
    None for full attention. `moe_layers` tells which layers route to experts; empty means none does. `shifted_logits`: a
    bidirectional model whose logits at position i - 1 predict token i (Dream). `mask_token_id` stands for what is not written yet;
    None where the model is autoregressive or its config.json does not tell.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    max_positions: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    moe: MoEConfig | None = None
    moe_layers: tuple[bool, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bidirectional: bool = False
    shifted_logits: bool = False
    mask_token_id: int | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]


DrafterKind = Literal["dflash", "dflash_fused", "autoregressive", "autoregressive_fused"]


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter: a few decoder layers over a block, fed with features of a frozen target (arXiv 2602.06036, section 4).

    `block_size` counts the anchor, so a block drafts block_size - 1 tokens. `causal` and `windows` have one entry per layer:
    whether block tokens see only earlier block tokens, and the sliding window. `target_layer_ids` are the tapped target
    layers, 0-based: a feature is the residual stream after that layer. `draft_vocab_size` < `vocab_size` means that the
    drafter scores only that many rows of the target's head (the ids travel with the weights).

    `kind` names the drafters of the paper's ablation: how features enter ("dflash": keys and values of every layer;
    "*_fused": added to the input of the block) and whether the block is drafted at once or token by token.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    """None: the file does not tell."""
    max_positions: int = 40960
    attention_bias: bool = False
    causal: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    draft_vocab_size: int | None = None
    kind: DrafterKind = "dflash"

    @property
    def fused(self) -> bool:
        return self.kind.endswith("_fused")

    @property
    def autoregressive(self) -> bool:
        return self.kind.startswith("autoregressive")

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def is_causal(self, layer: int) -> bool:
        return self.autoregressive or (bool(self.causal) and self.causal[layer])


CONTROLLER_FEATURES = ("confidence", "entropy", "average", "momentum", "position", "uncertainty")
"""What a controller of adaptive denoising may read of a position, in this order (arXiv 2605.30753, A.3)."""

ControllerKind = Literal["lstm", "gru", "mlp"]


@dataclass(frozen=True)
class ControllerConfig:
    """TSPD's controller: a tiny network, shared by all positions, that decides whether a position's token is fixed.

    The defaults have the published 2,112 parameters and a head of 13. `features` names what it reads (a part of
    CONTROLLER_FEATURES). `smoothing` is alpha of the moving average of the confidence (published). `neighbours`: it reads confidence and
    entropy of so many slots on either side too, and how much is written before the slot (ours; 0: as published, a slot by itself).
    """

    block_length: int = 32
    kind: ControllerKind = "lstm"
    layers: int = 2
    hidden_size: int = 12
    features: tuple[str, ...] = CONTROLLER_FEATURES
    smoothing: float = 0.25
    neighbours: int = 0

    @property
    def inputs(self) -> int:
        """Numbers that the network reads of a slot and its neighbours in one step."""
        return len(self.features) + (4 * self.neighbours + 1 if self.neighbours else 0)


@dataclass(frozen=True)
class FilterConfig:
    """Learn2PD's acceptance filter (arXiv 2509.25188): two linear layers over the confidences of a block of this length."""

    block_length: int = 32
