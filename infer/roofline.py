"""What a step costs at least, computed from shapes: bytes that must be read, FLOPs that must be done, and the time a chip's peaks allow.

A lower bound for comparing ways to decode, not a forecast: kernels reach a part of the peaks, and small work is bound by latency.
"""

from dataclasses import dataclass

from dflax.config import DrafterConfig, ModelConfig
from dflax.kernels_pallas.chips import Chip


@dataclass(frozen=True)
class Ways:
    """Into how many parts a mesh cuts weights, rows, and what has heads or columns: what is not cut, every chip does."""

    weights: int = 1
    rows: int = 1
    heads: int = 1

    def of_cache(self, heads: int) -> int:
        """Parts of a cache with that many key/value heads, which are whole on every chip where the mesh does not divide them."""
        return self.rows * (1 if heads % self.heads else self.heads)


@dataclass(frozen=True)
class Work:
    """Of one step, over all chips together."""

    weights: float
    """Bytes."""
    caches: tuple[tuple[int, float], ...]
    """(key/value heads, bytes) of each."""
    flops: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.weights + other.weights, self.caches + other.caches, self.flops + other.flops)

    @property
    def bytes(self) -> float:
        return self.weights + sum(size for _, size in self.caches)

    def seconds(self, chip: Chip, ways: Ways, collective_bytes: float = 0.0) -> float:
        """The slowest of memory, arithmetic and what a chip sends, all three at the same time."""
        read = self.weights / ways.weights + sum(size / ways.of_cache(heads) for heads, size in self.caches)
        flops = self.flops / (ways.rows * ways.heads)
        return max(read / chip.bandwidth, flops / chip.flops, collective_bytes / chip.link)


def layer_parameters(config: ModelConfig | DrafterConfig, tokens: int = 0) -> tuple[float, float]:
    """Parameters of all layers that a pass over `tokens` tokens reads, and those that one token is multiplied with.

    They differ for mixtures of experts: with uniform routing n tokens read 1 - (1 - k / E)^n of the experts.
    """
    heads = (config.num_heads * 2 + config.num_kv_heads * 2) * config.head_dim * config.hidden_size
    moe = getattr(config, "moe", None)
    read = used = float(heads * config.num_layers)
    for layer in range(config.num_layers):
        if moe is None or not config.is_moe(layer):  # pyright: ignore[reportAttributeAccessIssue] - drafters have no experts
            read += (dense := 3.0 * config.hidden_size * config.intermediate_size)
            used += dense
            continue
        expert = 3.0 * config.hidden_size * moe.intermediate_size
        share = 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens
        read += expert * moe.num_experts * share
        used += expert * moe.experts_per_token
    return read, used


def forward(
    config: ModelConfig | DrafterConfig, rows: int, block: int, live: int, width: int, head_rows: int, vocabulary: int
) -> Work:
    """A pass of `rows` rows of `block` tokens over `live` cached columns each, of which a layer with a window sees its window; the head
    scores `head_rows` tokens of a row.

    width: bytes of a weight and of a cache entry.
    """
    tokens = rows * block
    read, used = layer_parameters(config, tokens)
    head = float(vocabulary * config.hidden_size) if head_rows else 0.0
    seen = [min(live, config.window(layer) or live) for layer in range(config.num_layers)]
    kept = 2.0 * config.num_kv_heads * config.head_dim * sum(seen) * rows
    attention = 4.0 * config.num_heads * config.head_dim * sum(columns + block for columns in seen) * tokens
    flops = 2 * used * tokens + 2 * head * rows * head_rows + attention
    return Work((read + head) * width, ((config.num_kv_heads, kept * width),), flops)


def speculative_round(
    target: ModelConfig, drafter: DrafterConfig | None, rows: int, block: int, live: int, width: int
) -> Work:
    """Draft, verify, commit; without a drafter one plain step."""
    work = forward(target, rows, block, live, width, block, target.vocab_size)
    if drafter is None:
        return work
    scored = drafter.draft_vocab_size or target.vocab_size
    draft = forward(drafter, rows, block, live, width, block - 1, scored)
    fuse = float(len(drafter.target_layer_ids) * drafter.hidden_size**2)
    context = 2.0 * drafter.num_kv_heads * drafter.head_dim * drafter.hidden_size * drafter.num_layers
    return work + draft + Work(fuse * width, (), 2 * (fuse + context) * rows * block)


def drafter_training(
    target: ModelConfig, drafter: DrafterConfig, rows: int, length: int, anchors: int, width: int
) -> Work:
    """A step with online features. The frozen target: forward, 2 FLOPs a parameter and token. The drafter: 6, over the blocks of all
    anchors; its frozen head and the fusion of frozen features: 4 (no gradient of the head, none of the features). Attention is left
    out. Bytes: weights once forward and, for the drafter, three times in float32 with its moments."""
    tokens, slots = rows * length, rows * min(anchors, length) * drafter.block_size
    read, used = layer_parameters(target, tokens)
    own_read, own = layer_parameters(drafter, slots)
    fuse = float(len(drafter.target_layer_ids) * drafter.hidden_size**2)
    context = 2.0 * drafter.num_kv_heads * drafter.head_dim * drafter.hidden_size * drafter.num_layers
    head = float((drafter.draft_vocab_size or target.vocab_size) * target.hidden_size)
    flops = 2 * used * tokens + 6 * own * slots + (4 * fuse + 6 * context) * tokens + 4 * head * slots
    return Work(read * width + head * width + 3 * 4 * (own_read + fuse), (), flops)


def diffusion_training(config: ModelConfig, rows: int, length: int, answer_columns: int) -> Work:
    """A step that trains every parameter: 6 FLOPs a parameter and token, the head on `answer_columns` tokens a row. Attention is left
    out. Bytes: parameters, gradients and two moments in float32, read and written once."""
    read, used = layer_parameters(config, rows * length)
    head = float(config.vocab_size * config.hidden_size)
    return Work(2 * 4 * 4 * (read + 2 * head), (), 6 * used * rows * length + 6 * head * rows * answer_columns)
